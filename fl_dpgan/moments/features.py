"""The features of a moment release, computed: a map from an image to a vector of norm at most 1."""

import math
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.moments import Feature, Features, Fourier, Frequencies, Wavelets
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

    def second_moments(self) -> tuple["FrequencyMap", slice, float]:
        """The first part of second moments, its place in a feature vector, and its weight there.

        Raises:
            ConfigError: there is none.
        """
        first = 0
        for weight, part in zip(self.weights, self.parts, strict=True):
            length = part.length
            if isinstance(part, FrequencyMap):
                return part, slice(first, first + length), weight
            first += length
        raise ConfigError("matching.guidance needs second moments; add features of kind 'frequencies' to the release")

    def forward(self, images: Tensor) -> Tensor:
        """The parts side by side, each times its weight."""
        pixels = (images + 1) / 2
        return torch.cat([weight * part(pixels) for weight, part in zip(self.weights, self.parts, strict=True)], dim=1)


@singledispatch
def _made(part: Feature, image_shape: tuple[int, ...]) -> "FourierMap | WaveletMap | FrequencyMap":
    raise TypeError(f"no features of kind {type(part).__name__}")


@_made.register(Fourier)
def _fourier(part: Fourier, image_shape: tuple[int, ...]) -> "FourierMap":
    return FourierMap(part, math.prod(image_shape))


@_made.register(Wavelets)
def _wavelets(part: Wavelets, image_shape: tuple[int, ...]) -> "WaveletMap":
    return WaveletMap(part, image_shape)


@_made.register(Frequencies)
def _frequencies(part: Frequencies, image_shape: tuple[int, ...]) -> "FrequencyMap":
    return FrequencyMap(part, image_shape)


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


class FrequencyMap(nn.Module):
    """The products of each two of an image's low frequencies, which are brought to norm 1 first.

    Attributes:
        length: of the features. side: how many frequencies there are.
    """

    def __init__(self, part: Frequencies, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.centre, self.side = part.centre, channels * part.side**2
        first, second = torch.triu_indices(self.side, self.side)
        self.length = len(first)
        self.down: Tensor
        self.across: Tensor
        self.first: Tensor
        self.second: Tensor
        self.twice: Tensor
        self.register_buffer("down", cosines(part.side, height), persistent=False)
        self.register_buffer("across", cosines(part.side, width), persistent=False)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.register_buffer("twice", torch.where(first == second, 1.0, math.sqrt(2)), persistent=False)

    def directions(self, pixels: Tensor) -> Tensor:
        """Pixels (n, channels, size, size) in [0, 1] to vectors u (n, side) of norm 1."""
        low = self.down @ (pixels - self.centre) @ self.across.T
        return normalize(low.flatten(1), dim=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (n, channels, size, size) in [0, 1] to u u^T, each pair once (n, length)."""
        u = self.directions(pixels)
        return u[:, self.first] * u[:, self.second] * self.twice

    def matrix(self, features: Tensor) -> Tensor:
        """The symmetric matrix (side, side) whose pairs are these features (length,)."""
        found = features.new_zeros(self.side, self.side)
        found[self.first, self.second] = found[self.second, self.first] = features / self.twice
        return found


def cosines(count: int, size: int) -> Tensor:
    """The first `count` rows of the orthonormal cosine transform (DCT-II) of `size` points, (count, size)."""
    places = torch.arange(size) + 0.5
    rows = torch.cos(math.pi / size * torch.arange(count)[:, None] * places)
    scale = torch.full((count, 1), math.sqrt(2 / size))
    scale[0] = math.sqrt(1 / size)
    return rows * scale
