import math

import numpy as np
import pytest
import torch
from scipy.signal import correlate2d

from fl_dpgan.networks import ScatteringDiscriminator
from fl_dpgan.privacy.engines import fastest
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.scattering import FirstOrder, Scattering, modulus, wavelets


def images(count=3, size=28, channels=1):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("stride", [1, 2])
def test_a_modulus_is_the_length_of_two_correlations(stride):
    kernels = wavelets(7, 1.2, 2.0)
    x = images(2, 12, 2)
    found = modulus(x, kernels, stride)
    real, imaginary = (
        correlate2d(x[1, 1].numpy(), kernels[part, 0].numpy(), mode="same")[::stride, ::stride] for part in (4, 5)
    )
    np.testing.assert_allclose(found[1, 6 + 2], np.hypot(real, imaginary), atol=1e-3)


def test_wavelets_have_norm_one_ignore_constants_and_answer_to_their_own_direction():
    kernels = wavelets(11, 2.4, 1.2).view(6, 2, 11, 11)
    torch.testing.assert_close(kernels.square().sum((1, 2, 3)), torch.ones(6))
    assert float(kernels.sum((2, 3)).abs().max()) < 1e-5
    place = torch.arange(40.0)
    stripes = torch.cos(1.2 * place).expand(40, 40)[None, None]  # a wave along x, which is direction 0
    answers = modulus(stripes, kernels.view(12, 1, 11, 11))[0, :, 10:30, 10:30].mean((1, 2))
    assert int(answers.argmax()) == 0 and float(answers[0]) > 3 * float(answers[3])


@pytest.mark.parametrize("size, side, channels", [(28, 7, 1), (32, 8, 3), (64, 8, 1)])
def test_features_have_the_length_and_norm_that_are_said(size, side, channels):
    made = Scattering(size=size, side=side, channels=channels)
    found = made(images(3, size, channels))
    assert found.shape == (3, made.length)
    torch.testing.assert_close(found.norm(dim=1), torch.full((3,), 5.0))


def test_first_order_coefficients_are_the_local_means_of_the_image_and_of_both_scales_moduli():
    x = (images(1) + 1) / 2
    parts = [x[0, 0].numpy()]
    for kernels in (wavelets(7, 1.2, 3 * math.pi / 4), wavelets(11, 2.4, 3 * math.pi / 8)):
        answers = [correlate2d(x[0, 0].numpy(), kernel.numpy(), mode="same")[::2, ::2] for kernel in kernels[:, 0]]
        parts += [np.hypot(answers[i], answers[i + 1]) for i in range(0, 12, 2)]
    means = [part.reshape(7, len(part) // 7, 7, len(part) // 7).mean(axis=(1, 3)).ravel() for part in parts]
    expected = np.concatenate(means) / np.linalg.norm(np.concatenate(means))
    np.testing.assert_allclose(FirstOrder(side=7, channels=1)(x)[0], expected, atol=1e-4)


@pytest.mark.parametrize("size, side, channels", [(28, 7, 1), (32, 8, 3), (64, 5, 1), (3, 14, 1)])
def test_first_order_coefficients_have_norm_one_at_every_size(size, side, channels):
    made = FirstOrder(side=side, channels=channels)
    found = made((images(2, size, channels) + 1) / 2)
    assert found.shape == (2, made.length)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_a_small_shift_moves_the_features_less_than_the_pixels():
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    discs = torch.stack([((x - centre) ** 2 + (y - 14) ** 2 < 40).float() * 2 - 1 for centre in (13.0, 14.0)])[:, None]

    def distance(rows):
        rows = rows / rows.norm(dim=1, keepdim=True)
        return float((rows[0] - rows[1]).norm())

    pixels = (discs + 1) / 2
    assert distance(Scattering(size=28, side=7, channels=1)(discs)) < 0.75 * distance(pixels.flatten(1))
    assert distance(FirstOrder(side=7, channels=1)(pixels)) < 0.75 * distance(pixels.flatten(1))


@pytest.mark.parametrize("made", [Scattering(size=28, side=7, channels=1), FirstOrder(side=7, channels=1)])
@pytest.mark.parametrize("grey", [-1.0, 0.0])
def test_the_slope_of_a_blank_image_is_finite(made, grey):
    x = torch.full((1, 1, 28, 28), grey, requires_grad=True)
    made(x).sum().backward()
    assert bool(x.grad.isfinite().all())


def test_a_discriminator_on_it_trains_its_layers_alone_and_with_our_engine():
    d = ScatteringDiscriminator(size=28, channels=1, num_classes=3)
    assert set(d.state_dict()) == {"head.weight", "head.bias"}
    assert fastest(d, images(2), torch.tensor([0, 2])) is LayerEngine
    assert d(images(3), torch.tensor([0, 1, 2])).shape == (3,)
