import hashlib
import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.release import unit_vectors
from fl_dpgan.privacy.moments import Features, Fourier, Wavelets
from fl_dpgan.scattering import FirstOrder

FOURIER = Features(parts=(Fourier(count=4000, scales=(60.0,)),))
WAVELETS = Features(parts=(Wavelets(count=4000, scales=(0.2,), side=4),))
ALL = Features(
    parts=(Fourier(count=40, scales=(20.0, 60.0)), Wavelets(count=40, side=2, weight=3.0)),
    count_share=0.2,
)


def images(count, channels=1, size=28, seed=0):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_fourier_features_give_the_gaussian_kernel():
    x = images(6) * torch.linspace(0.1, 1, 6).view(-1, 1, 1, 1)
    found = FeatureMap(FOURIER, (1, 28, 28))(x) / FOURIER.weights[0]
    pixels = ((x + 1) / 2).flatten(1).double()
    kernel = torch.exp(-torch.cdist(pixels, pixels).square() / (2 * 60.0))
    assert torch.allclose((found @ found.T).double(), kernel, atol=5 / math.sqrt(2000))


@pytest.mark.parametrize("channels", [1, 3])
def test_wavelet_features_give_the_gaussian_kernel_of_scattering_coefficients(channels):
    x = images(6, channels) * torch.linspace(0.1, 1, 6).view(-1, 1, 1, 1)
    found = FeatureMap(WAVELETS, (channels, 28, 28))(x) / WAVELETS.weights[0]
    u = FirstOrder(side=4, channels=channels)((x + 1) / 2).double()
    kernel = torch.exp(-torch.cdist(u, u).square() / (2 * 0.2))
    assert torch.allclose((found @ found.T).double(), kernel, atol=5 / math.sqrt(2000))


@given(st.integers(0, 2**31 - 1), st.sampled_from([0.0, 1e-30, 0.3, 1.0, 50.0]))
@settings(max_examples=40, deadline=None)
def test_invariant_1_whatever_the_image_a_unit_adds_a_vector_of_norm_at_most_one(seed, scale):
    vectors = unit_vectors(FeatureMap(ALL, (1, 28, 28)), images(3, seed=seed) * scale)
    assert bool((vectors.norm(dim=1) <= 1 + 1e-12).all())
    torch.testing.assert_close(vectors[:, -1], torch.full((3,), math.sqrt(0.2), dtype=torch.float64), rtol=1e-4, atol=0)


def test_an_ordinary_image_uses_its_whole_norm():
    assert unit_vectors(FeatureMap(ALL, (1, 28, 28)), images(4)).norm(dim=1).min() > 0.999


def test_features_follow_from_the_seed_alone():
    torch.manual_seed(1)
    first = FeatureMap(ALL, (1, 28, 28))(images(2))
    torch.manual_seed(2)
    assert torch.equal(first, FeatureMap(ALL, (1, 28, 28))(images(2)))
    for number in (0, 1):
        parts = [part.model_copy(update={"seed": 1}) if i == number else part for i, part in enumerate(ALL.parts)]
        other = Features(parts=tuple(parts), count_share=0.2)
        assert not torch.equal(first, FeatureMap(other, (1, 28, 28))(images(2)))


def test_the_random_rows_of_two_kinds_are_not_the_same():
    fourier, wavelets = FeatureMap(ALL, (1, 28, 28)).parts
    least = min(fourier.rows.shape[1], wavelets.fourier.rows.shape[1])
    first, second = fourier.rows[0, :least], wavelets.fourier.rows[0, :least]
    assert abs(float(torch.nn.functional.cosine_similarity(first, second, dim=0))) < 0.6


def test_every_party_has_the_same_random_rows_on_every_machine():
    rows = FeatureMap(Features(parts=(Fourier(count=4, scales=(1.0, 4.0), seed=7),)), (1, 1, 3)).parts[0].rows
    # the first numbers of an AES-256 stream under SHA-256 of "('fourier', 7)", by Box and Muller, with scales 1 and 4
    stream = Cipher(algorithms.AES(hashlib.sha256(b"('fourier', 7)").digest()), modes.CTR(bytes(16))).encryptor()
    uniform = (np.frombuffer(stream.update(bytes(48)), dtype="<u8") >> np.uint64(11)).astype(float) + 0.5
    radii, angles = np.sqrt(-2 * np.log(uniform[:3] / 2**53)), 2 * np.pi * uniform[3:] / 2**53
    np.testing.assert_allclose(rows[0], radii * np.cos(angles), rtol=1e-5)
    np.testing.assert_allclose(rows[1], radii * np.sin(angles) / 2, rtol=1e-5)


def test_an_image_that_is_not_square_has_its_features():
    found = FeatureMap(ALL, (1, 28, 20))(torch.rand(2, 1, 28, 20))
    assert found.shape == (2, 80) and bool(found.isfinite().all())
