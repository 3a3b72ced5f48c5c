import numpy as np
import pytest
import torch
from scipy.signal import correlate2d

from fl_dpgan.networks import ScatteringDiscriminator
from fl_dpgan.privacy.engines import fastest
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.scattering import Scattering, modulus, wavelets


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


def test_a_small_shift_moves_the_features_less_than_the_pixels():
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    discs = torch.stack([((x - centre) ** 2 + (y - 14) ** 2 < 40).float() * 2 - 1 for centre in (13.0, 14.0)])[:, None]
    made = Scattering(size=28, side=7, channels=1)

    def distance(rows):
        rows = rows / rows.norm(dim=1, keepdim=True)
        return float((rows[0] - rows[1]).norm())

    assert distance(made(discs)) < 0.75 * distance((discs.flatten(1) + 1) / 2)


def test_the_slope_of_a_blank_image_is_finite():
    x = torch.full((1, 1, 28, 28), -1.0, requires_grad=True)
    Scattering(size=28, side=7, channels=1)(x).sum().backward()
    assert bool(x.grad.isfinite().all())


def test_a_discriminator_on_it_trains_its_layers_alone_and_with_our_engine():
    d = ScatteringDiscriminator(size=28, channels=1, num_classes=3)
    assert set(d.state_dict()) == {"head.weight", "head.bias"}
    assert fastest(d, images(2), torch.tensor([0, 2])) is LayerEngine
    assert d(images(3), torch.tensor([0, 1, 2])).shape == (3,)
