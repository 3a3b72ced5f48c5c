"""Attacks on a linear classifier, whose answers can be worked out by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fl_dpgan.data import ImageData
from fl_dpgan.evaluation.robustness import fgsm, pgd, robustness, success_rate

ATTACKS = pytest.mark.parametrize("attack", [fgsm, pgd])


def linear(*weights: float) -> nn.Sequential:
    """Says class 1 where the sum of weight times pixel, on the networks' scale of -1 to 1, is above 0."""
    layer = nn.Linear(len(weights), 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0] * len(weights), weights]))
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer)


def greys(*values: int, label: int = 1) -> ImageData:
    images = np.array(values, np.uint8).reshape(-1, 1, 1, 1).repeat(2, 2).repeat(2, 3)
    return ImageData(images, np.full(len(values), label), ("dark", "bright"))


@ATTACKS
def test_the_share_that_flips_is_that_of_images_within_the_radius_of_the_boundary(attack):
    # The boundary is at 127.5, and 0.1 of 255 is 25.5: 140 and 152 flip, 154 and 250 do not; 100 is wrong already.
    assert success_rate(linear(1, 1, 1, 1), attack, greys(140, 152, 154, 250, 100)) == 0.5


@ATTACKS
def test_a_flip_downwards_counts_too(attack):
    assert success_rate(linear(1, 1, 1, 1), attack, greys(115, 103, 101, 5, label=0)) == 0.5


@ATTACKS
def test_every_pixel_moves_by_the_radius_and_stays_a_pixel(attack):
    pixels = torch.tensor([0.95, 0.5, 0.5, 0.03]).view(1, 1, 2, 2)
    moved = attack(linear(-1, -2, 3, 0.5), pixels, torch.tensor([1]))
    # away from class 1: against the sign of the weights
    assert moved.flatten().tolist() == pytest.approx([1.0, 0.6, 0.4, 0.0], abs=1e-6)


def test_pgd_turns_where_fgsm_goes_straight_on():
    class Valley(nn.Module):
        """Class 1 but within 0.02 of pixel 0.55."""

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            distance = ((images.flatten(1)[:, 0] + 1) / 2 - 0.55).abs()
            return torch.stack([torch.full_like(distance, 0.02), distance], 1)

    pixels, labels = torch.full((1, 1, 1, 1), 0.5), torch.tensor([1])
    assert fgsm(Valley(), pixels, labels).item() == pytest.approx(0.6)  # past it
    assert abs(pgd(Valley(), pixels, labels).item() - 0.55) <= 0.0251  # around it


@ATTACKS
def test_a_classifier_that_is_never_right_has_no_rate(attack):
    assert success_rate(linear(1, 1, 1, 1), attack, greys(10, 20)) is None


def test_both_attacks_are_reported_with_the_number_of_images():
    found = robustness(linear(1, 1, 1, 1), greys(140, 200))
    assert found == {"images": 2, "fgsm_success": 0.5, "pgd_success": 0.5}
