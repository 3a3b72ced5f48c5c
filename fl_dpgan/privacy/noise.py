"""Randomness for sampling and noise: an AES-256-CTR stream, keyed by the operating system or, in simulation, a seed."""

import hashlib
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]

#: Numbers that are worked on at once: so few that they stay in a processor's cache.
_BLOCK = 4096
_ZEROS = bytes(8 * _BLOCK)


class KeyedGenerator:
    """A cryptographic generator of uniform and Gaussian numbers.

    The same key gives the same stream on every machine. `from_os` is for sites; `from_seed` exists for simulations
    alone, where runs must be repeatable, and voids the guarantee for anyone who knows the seed.

    One generator serves one answer and is never kept for the next. A process that is forked while an answer is in the
    making has the same stream as its parent and so comes to the same answer, which is what was charged; a new key for
    the fork would make of one charge two draws on the same sum.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    @classmethod
    def from_os(cls) -> "KeyedGenerator":
        """Keyed with 256 bits of the operating system's entropy."""
        return cls(os.urandom(32))

    @classmethod
    def from_seed(cls, *parts: Any) -> "KeyedGenerator":
        """Keyed with SHA-256 over the parts: distinct parts (seed, run, site, round) give independent streams."""
        return cls(hashlib.sha256(repr(parts).encode()).digest())

    def uniform(self, count: int) -> Floats:
        """(count,) numbers of 53 bits in the open interval (0, 1)."""
        numbers = np.empty(count)
        for start in range(0, count, _BLOCK):
            self._fill(numbers[start : start + _BLOCK])
        return numbers

    def bernoulli(self, count: int, rate: float) -> NDArray[np.bool_]:
        """(count,) independent trials, each true with probability `rate`."""
        return self.uniform(count) < rate

    def integers(self, count: int, high: int) -> NDArray[np.int64]:
        """(count,) integers uniform on 0 .. high - 1."""
        return (self.uniform(count) * high).astype(np.int64)

    def normal(self, count: int) -> Floats:
        """(count,) standard Gaussians in double precision (Box and Muller, 1958)."""
        import torch  # its logarithms and cosines are the fastest; what needs no noise does without

        half = (count + 1) // 2
        numbers = np.empty((2, half))
        for start in range(0, half, _BLOCK):
            cosines, sines = (torch.from_numpy(row[start : start + _BLOCK]) for row in numbers)
            radii, angles = (np.empty(len(cosines)) for _ in range(2))
            self._fill(radii)
            self._fill(angles)
            radius = torch.from_numpy(radii).log_().mul_(-2.0).sqrt_()
            angle = torch.from_numpy(angles).mul_(2.0 * np.pi)
            torch.cos(angle, out=cosines).mul_(radius)
            torch.sin(angle, out=sines).mul_(radius)
        return numbers.reshape(-1)[:count]

    def _fill(self, numbers: Floats) -> None:
        """Overwrite at most a block's numbers with uniform ones."""
        words = np.frombuffer(self._stream.update(_ZEROS[: 8 * len(numbers)]), dtype="<u8") >> np.uint64(11)
        np.multiply(np.add(words, 0.5, out=numbers), 2.0**-53, out=numbers)
        np.minimum(numbers, 1 - 2.0**-53, out=numbers)  # the largest word would be rounded up to 1


def noised(values: "Tensor", sd: float, random: KeyedGenerator) -> "Tensor":
    """Values in double precision plus Gaussian noise of standard deviation `sd`, on a grid of a power of two.

    The grid is a thousandth of the noise or finer: the lowest bits of a sum of floats can tell what was added.

    Returns:
        A tensor of the same shape in the CPU's memory.
    """
    import torch

    noise = torch.from_numpy(random.normal(values.numel())).view(values.shape)
    grid = 2.0 ** math.floor(math.log2(sd / 1024))
    return ((values.cpu() + sd * noise) / grid).round() * grid
