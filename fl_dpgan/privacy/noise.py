"""Randomness for sampling and noise: an AES-256-CTR stream, keyed by the operating system or, in simulation, a seed."""

import hashlib
import os
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class KeyedGenerator:
    """A cryptographic generator of uniform and Gaussian numbers.

    The same key gives the same stream on every machine. `from_os` is for sites; `from_seed` exists for simulations
    alone, where runs must be repeatable, and voids the guarantee for anyone who knows the seed.
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
        words = np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")
        # the largest word would be rounded up to 1
        return np.minimum(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)

    def bernoulli(self, count: int, rate: float) -> NDArray[np.bool_]:
        """(count,) independent trials, each true with probability `rate`."""
        return self.uniform(count) < rate

    def integers(self, count: int, high: int) -> NDArray[np.int64]:
        """(count,) integers uniform on 0 .. high - 1."""
        return (self.uniform(count) * high).astype(np.int64)

    def normal(self, count: int) -> Floats:
        """(count,) standard Gaussians in double precision (Box and Muller, 1958)."""
        half = (count + 1) // 2
        radius = np.sqrt(-2.0 * np.log(self.uniform(half)))
        angle = 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
