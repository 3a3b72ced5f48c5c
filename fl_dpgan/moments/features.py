"""The features of a moment release, computed: a map from an image to a vector of norm at most 1."""

import math
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_dpgan.privacy.moments import Feature, Features, Fourier, Frequencies


class FeatureMap(nn.Module):
    """Images (n, channels, size, size) in [-1, 1] to features (n, `length`), differentiable, each of norm at most 1.

    Args:
        features: the public description. image_shape: (channels, size, size).
    """

    def __init__(self, features: Features, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_made(part, image_shape) for part in features.parts)
        self.weights = features.weights
        self.count_weight = math.sqrt(features.count_share)
        with torch.no_grad():
            self.length = self(torch.zeros(1, *image_shape)).shape[1]

    def forward(self, images: Tensor) -> Tensor:
        """The parts side by side, each times its weight."""
        pixels = (images + 1) / 2
        return torch.cat([weight * part(pixels) for weight, part in zip(self.weights, self.parts, strict=True)], dim=1)


@singledispatch
def _made(part: Feature, image_shape: tuple[int, ...]) -> nn.Module:
    raise TypeError(f"no features of kind {type(part).__name__}")


@_made.register
def _fourier(part: Fourier, image_shape: tuple[int, ...]) -> nn.Module:
    return _FourierMap(part, math.prod(image_shape))


@_made.register
def _frequencies(part: Frequencies, image_shape: tuple[int, ...]) -> nn.Module:
    return _FrequencyMap(part, image_shape[0], image_shape[1])


class _FourierMap(nn.Module):
    """cos(Wx) and sin(Wx) over the square root of the number of rows of W, so that the norm is 1."""

    def __init__(self, part: Fourier, pixels: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(part.seed)
        rows = torch.randn(part.count // 2, pixels, generator=random)
        scales = torch.tensor([part.scales[i % len(part.scales)] for i in range(len(rows))])
        self.rows: Tensor
        self.register_buffer("rows", rows / scales.sqrt()[:, None], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        angles = pixels.flatten(1) @ self.rows.T
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(len(self.rows))


class _FrequencyMap(nn.Module):
    """The products of each two of an image's low frequencies, which are brought to norm 1 first."""

    def __init__(self, part: Frequencies, channels: int, size: int) -> None:
        super().__init__()
        self.centre = part.centre
        first, second = torch.triu_indices(channels * part.side**2, channels * part.side**2)
        self.transform: Tensor
        self.first: Tensor
        self.second: Tensor
        self.twice: Tensor
        self.register_buffer("transform", cosines(part.side, size), persistent=False)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.register_buffer("twice", torch.where(first == second, 1.0, math.sqrt(2)), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        low = self.transform @ (pixels - self.centre) @ self.transform.T
        u = normalize(low.flatten(1), dim=1)
        return u[:, self.first] * u[:, self.second] * self.twice


def cosines(count: int, size: int) -> Tensor:
    """The first `count` rows of the orthonormal cosine transform (DCT-II) of `size` points, (count, size)."""
    places = torch.arange(size) + 0.5
    rows = torch.cos(math.pi / size * torch.arange(count)[:, None] * places)
    scale = torch.full((count, 1), math.sqrt(2 / size))
    scale[0] = math.sqrt(1 / size)
    return rows * scale
