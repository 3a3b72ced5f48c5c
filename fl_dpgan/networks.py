"""The conditional DCGAN: a generator with batch norm, and a discriminator in which no sample touches another.

Radford et al., arXiv 1511.06434, with one deliberate difference: the discriminator has no batch norm, since batch norm
mixes the samples of a batch and so voids per-sample clipping.
"""

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fl_dpgan.errors import ConfigError
from fl_dpgan.scattering import Scattering

if TYPE_CHECKING:
    from fl_dpgan.config import ModelConfig

LabelsAt = Literal["output", "input"]

_KERNEL = 4  # side of every kernel; with stride 2 and padding 1 it halves or doubles an image
#: side of the smallest feature map, and the number of doublings from it to the image
_PYRAMID: dict[int, tuple[int, int]] = {28: (7, 2), 32: (8, 2), 64: (8, 3)}


def _pyramid(size: int) -> tuple[int, int]:
    if size not in _PYRAMID:
        raise ConfigError(f"image size {size} is not supported; choose one of {sorted(_PYRAMID)}")
    return _PYRAMID[size]


class _ToImage(nn.ConvTranspose2d):
    """The transposed convolution to an image's one or three channels: one matrix product, whose columns are folded.

    For so few channels the library's own kernel is slow on a CPU: a whole pass of G takes longer with it
    (`python -m simulations.benchmark speed fakes`).
    """

    def __init__(self, fan_in: int, channels: int) -> None:
        super().__init__(fan_in, channels, _KERNEL, 2, 1)

    def forward(self, features: Tensor, output_size: list[int] | None = None) -> Tensor:
        """(n, in_channels, s, s) to (n, out_channels, 2 s, 2 s)."""
        if features.device.type != "cpu" or output_size is not None:
            return super().forward(features, output_size)
        n, fan_in, height, width = features.shape
        rows = features.permute(0, 2, 3, 1).reshape(-1, fan_in)
        columns = (rows @ self.weight.reshape(fan_in, -1)).view(n, height * width, -1).transpose(1, 2)
        image = nn.functional.fold(columns, (2 * height, 2 * width), _KERNEL, padding=1, stride=2)
        return image if self.bias is None else image + self.bias[:, None, None]


class Generator(nn.Module):
    """Maps a latent vector and a label to an image in [-1, 1].

    Args:
        size: side of the image in pixels (28, 32 or 64).
        channels: 1 (grey) or 3 (RGB).
        num_classes: number of labels, at least 1.
        latent_dim: length of z.
        width: channels of the last hidden feature map; each level below it has twice as many.
    """

    def __init__(self, *, size: int, channels: int, num_classes: int, latent_dim: int = 64, width: int = 32) -> None:
        super().__init__()
        side, doublings = _pyramid(size)
        self.latent_dim, self.num_classes = latent_dim, num_classes
        top = width * 2 ** (doublings - 1)
        self.project = nn.Sequential(
            nn.Linear(latent_dim + num_classes, top * side * side, bias=False),
            nn.Unflatten(1, (top, side, side)),
            nn.BatchNorm2d(top),
            nn.ReLU(),
        )
        layers: list[nn.Module] = []
        for level in range(doublings - 1):
            fan_in, fan_out = top // 2**level, top // 2 ** (level + 1)
            layers += [
                nn.ConvTranspose2d(fan_in, fan_out, _KERNEL, 2, 1, bias=False),
                nn.BatchNorm2d(fan_out),
                nn.ReLU(),
            ]
        layers += [_ToImage(width, channels), nn.Tanh()]
        self.upsample = nn.Sequential(*layers)
        self.to(memory_format=torch.channels_last)  # much the faster on a CPU

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(n, latent_dim) and (n,) to (n, channels, size, size)."""
        onehot = nn.functional.one_hot(labels, self.num_classes).to(z.dtype)
        images: Tensor = self.upsample(self.project(torch.cat([z, onehot], dim=1)))
        return images


class Discriminator(nn.Module):
    """Scores an image under a label: one logit per sample, from strided convolutions.

    Args:
        size, channels, num_classes: as for `Generator`.
        width: channels of the first feature map; each further level has twice as many.
        labels: where the label enters: at the "output", of which there is one per class, or at the "input", as one map
            per class beside the image (Mirza and Osindero, arXiv 1411.1784).
    """

    def __init__(
        self, *, size: int, channels: int, num_classes: int, width: int = 16, labels: LabelsAt = "output"
    ) -> None:
        super().__init__()
        side, halvings = _pyramid(size)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, _KERNEL, 2, 1)]
        for level in range(1, halvings):
            layers += [nn.LeakyReLU(0.2), nn.Conv2d(width * 2 ** (level - 1), width * 2**level, _KERNEL, 2, 1)]
        self.features = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Flatten())
        out_features = width * 2 ** (halvings - 1) * side * side
        self.maps = _LabelMaps(num_classes, width, size) if labels == "input" else None
        self.head = nn.Linear(out_features, num_classes if self.maps is None else 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, size, size) in [-1, 1] and (n,) to logits (n,)."""
        if self.maps is None:
            logits: Tensor = self.head(self.features(images))
            return logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        first, *rest = self.features
        hidden = first(images) + self.maps(labels)
        for layer in rest:
            hidden = layer(hidden)
        scores: Tensor = self.head(hidden)
        return scores.squeeze(1)


class ScatteringDiscriminator(nn.Module):
    """Scores an image under a label from its fixed scattering coefficients: one linear output per class.

    It starts at zero, so that at first it draws G nowhere.

    Args:
        size, channels, num_classes: as for `Generator`.
    """

    def __init__(self, *, size: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.scattering = Scattering(size=size, side=_pyramid(size)[0], channels=channels)
        self.head = nn.Linear(self.scattering.length, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, size, size) in [-1, 1] and (n,) to logits (n,)."""
        logits: Tensor = self.head(self.scattering(images))
        return logits.gather(1, labels.unsqueeze(1)).squeeze(1)


class _LabelMaps(nn.Module):
    """What D's first convolution makes of one map per class, which is 1 where the label says so and 0 elsewhere.

    Such a map is constant, so a kernel's sum over it is that of its taps that lie on the image: one product in place of
    a convolution over as many channels as there are classes.
    """

    def __init__(self, num_classes: int, width: int, size: int) -> None:
        super().__init__()
        self.num_classes, self.width = num_classes, width
        self.weight = nn.Linear(num_classes, width * _KERNEL**2, bias=False)
        on_image = nn.functional.unfold(torch.ones(1, 1, size, size), _KERNEL, padding=1, stride=2)[0]
        self.on_image: Tensor  # (taps, places)
        self.register_buffer("on_image", on_image, persistent=False)

    def forward(self, labels: Tensor) -> Tensor:
        """(n,) to maps (n, width, size / 2, size / 2)."""
        onehot = nn.functional.one_hot(labels, self.num_classes).to(self.on_image.dtype)
        taps = self.weight(onehot).view(len(labels), -1, self.width)
        places = self.on_image.T.expand(len(labels), -1, -1)
        side = math.isqrt(self.on_image.shape[1])
        return torch.bmm(places, taps).view(len(labels), side, side, self.width).permute(0, 3, 1, 2)


def from_config(model: "ModelConfig", seed: int) -> tuple[nn.Module, nn.Module]:
    """The G and D that a scenario describes, initialised from its seed; the caller's random state is left as it was."""
    shape = {"size": model.size, "channels": model.channels, "num_classes": model.num_classes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(**shape, latent_dim=model.latent_dim, width=model.g_width)
        if model.d_features == "scattering":
            return generator, ScatteringDiscriminator(**shape)
        return generator, Discriminator(**shape, width=model.d_width, labels=model.d_labels)
