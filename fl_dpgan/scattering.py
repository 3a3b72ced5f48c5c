"""A fixed scattering transform: what wavelets find in an image, and in what they found. Nothing in it is learnt.

Of two orders for D: under differential privacy, a few parameters on good fixed features learn sooner than a network
that has to find its features through the noise (Tramer and Boneh, arXiv 2011.11660, section 3). Of the first order
alone for a moment release, where G needs its slope thousands of times. The modulus comes after each order (Bruna and
Mallat, arXiv 1203.1513, section 2), of Gabor wavelets of two scales. Kymatio, the library for it, does not import
beside a current SciPy.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, conv2d, normalize

#: Directions of the wavelets, equally spaced over a half turn.
_DIRECTIONS = 6
#: Side of a kernel, standard deviation of its envelope, and frequency in radians a pixel: a fine and a coarse scale.
_FINE, _COARSE = (7, 1.2, 3 * math.pi / 4), (11, 2.4, 3 * math.pi / 8)
#: Second-order coefficients are weaker; they are multiplied by this.
_SECOND_ORDER = 1.5
#: Added under the square root of a modulus, whose slope at zero would not be finite.
_SOFT = 1e-6


class _BothScales(nn.Module):
    """Has the wavelets of the fine and of the coarse scale, which go where the module goes and are not in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.fine: Tensor
        self.coarse: Tensor
        self.register_buffer("fine", wavelets(*_FINE), persistent=False)
        self.register_buffer("coarse", wavelets(*_COARSE), persistent=False)


class Scattering(_BothScales):
    """Images (n, channels, size, size) in [-1, 1] to features (n, length) of norm `scale`, differentiable.

    Args:
        size: side of the image. side: of the maps that the features are averaged to; divides half the size.
        channels: of the image; each is transformed by itself.
    """

    def __init__(self, *, size: int, side: int, channels: int, scale: float = 5.0) -> None:
        super().__init__()
        self._pool, self._scale = size // side, scale
        self.length = channels * (1 + 2 * _DIRECTIONS + _DIRECTIONS**2) * side**2

    def forward(self, images: Tensor) -> Tensor:
        """Local means of the image, of both scales' moduli, and of the fine moduli of the fine moduli."""
        pixels = (images + 1) / 2
        first = modulus(pixels, self.fine)
        maps = [
            avg_pool2d(pixels, self._pool),
            avg_pool2d(first, self._pool),
            avg_pool2d(modulus(pixels, self.coarse, stride=2), self._pool // 2),
            _SECOND_ORDER * avg_pool2d(modulus(avg_pool2d(first, 2), self.fine), self._pool // 2),
        ]
        return self._scale * normalize(torch.cat([each.flatten(1) for each in maps], dim=1), dim=1)


class FirstOrder(_BothScales):
    """Pixels (n, channels, size, size) in [0, 1] to vectors (n, length) of norm 1, differentiable.

    Args:
        side: of the maps that the image and both scales' moduli are averaged to. channels: of the image.
    """

    def __init__(self, *, side: int, channels: int) -> None:
        super().__init__()
        self._side = side
        self.length = channels * (1 + 2 * _DIRECTIONS) * side**2

    def forward(self, pixels: Tensor) -> Tensor:
        """Local means of the image and of the moduli, taken at every other pixel."""
        maps = [pixels, modulus(pixels, self.fine, stride=2), modulus(pixels, self.coarse, stride=2)]
        means = [adaptive_avg_pool2d(each, self._side).flatten(1) for each in maps]
        return normalize(torch.cat(means, dim=1), dim=1)


def modulus(maps: Tensor, kernels: Tensor, stride: int = 1) -> Tensor:
    """The length of each map's response to each complex wavelet.

    Args:
        maps: (n, channels, h, w). kernels: (2 directions, 1, k, k), real and imaginary parts in turn.

    Returns:
        (n, channels x directions, h / stride, w / stride).
    """
    n, channels, height, width = maps.shape
    parts = conv2d(maps.reshape(-1, 1, height, width), kernels, padding=kernels.shape[-1] // 2, stride=stride)
    both = parts.view(n, channels * len(kernels) // 2, 2, *parts.shape[2:])
    return (both.square().sum(2) + _SOFT).sqrt()


def wavelets(side: int, spread: float, frequency: float) -> Tensor:
    """Gabor wavelets of mean zero and norm 1 in each direction, (2 directions, 1, side, side).

    Args:
        spread: standard deviation, in pixels, of the envelope along the wave; it is twice as long across.
    """
    place = torch.arange(side) - (side - 1) / 2
    y, x = torch.meshgrid(place, place, indexing="ij")
    found = []
    for angle in (math.pi * number / _DIRECTIONS for number in range(_DIRECTIONS)):
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        envelope = torch.exp(-(along.square() + across.square() / 4) / (2 * spread**2))
        wave = envelope * torch.cos(frequency * along)
        real = wave - envelope * (wave.sum() / envelope.sum())  # no answer to a constant
        imaginary = envelope * torch.sin(frequency * along)
        length = (real.square().sum() + imaginary.square().sum()).sqrt()
        found += [real / length, imaginary / length]
    return torch.stack(found)[:, None]
