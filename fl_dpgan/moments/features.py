"""The features of a moment release, computed: a map from an image to a vector of norm at most 1."""

import math

import torch
from torch import Tensor, nn

from fl_dpgan.privacy.moments import Feature, Features, Fourier, Wavelets
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.scattering import FirstOrder


class FeatureMap(nn.Module):
    """Images (n, channels, size, size) in [-1, 1] to features (n, `length`), differentiable, each of norm at most 1.

    Args:
        features: the public description. image_shape: (channels, size, size).
    """

    def __init__(self, features: Features, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = [_made(part, image_shape) for part in features.parts]
        self._held = nn.ModuleList(self.parts)
        self.weights = features.weights
        self.count_weight = math.sqrt(features.count_share)
        self.length = sum(part.length for part in self.parts)

    def forward(self, images: Tensor) -> Tensor:
        """The parts side by side, each times its weight."""
        pixels = (images + 1) / 2
        return torch.cat([weight * part(pixels) for weight, part in zip(self.weights, self.parts, strict=True)], dim=1)


def _made(part: Feature, image_shape: tuple[int, ...]) -> "FourierMap | WaveletMap":
    if isinstance(part, Wavelets):
        return WaveletMap(part, image_shape)
    return FourierMap(part, math.prod(image_shape))


class FourierMap(nn.Module):
    """cos(Wv) and sin(Wv) over the square root of the number of rows of W, so that the norm is 1.

    Args:
        numbers: length of v.

    Attributes:
        length: of the features.
    """

    def __init__(self, part: Fourier | Wavelets, numbers: int) -> None:
        super().__init__()
        self.length = part.count
        # all parties must have the same W: this stream is the same on every machine, which torch's own is not
        drawn = KeyedGenerator.from_seed(part.kind, part.seed).normal(part.count // 2 * numbers)
        rows = torch.from_numpy(drawn).float().view(part.count // 2, numbers)
        scales = torch.tensor([part.scales[i % len(part.scales)] for i in range(len(rows))])
        self.rows: Tensor
        self.register_buffer("rows", rows / scales.sqrt()[:, None], persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors v (n, numbers), or images of as many pixels in [0, 1], to features (n, length)."""
        angles = vectors.flatten(1) @ self.rows.T
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(len(self.rows))


class WaveletMap(nn.Module):
    """Random Fourier features of first-order scattering coefficients.

    Attributes:
        length: of the features.
    """

    def __init__(self, part: Wavelets, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.coefficients = FirstOrder(side=part.side, channels=image_shape[0])
        self.fourier = FourierMap(part, self.coefficients.length)
        self.length = part.count

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (n, channels, size, size) in [0, 1] to features (n, length)."""
        features: Tensor = self.fourier(self.coefficients(pixels))
        return features
