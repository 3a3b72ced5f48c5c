"""The noised evaluation count equals a count by hand, and one unit moves it by one half."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_dpgan.privacy.accountant import Event, step_rdp
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.training.evaluation import noised_count
from fl_dpgan.training.records import Records
from tests.privacy.gaussian import assert_standard, assert_unrelated

torch.set_num_threads(1)


class Reader(nn.Module):
    """A classifier that reads the class from the first pixel: 1 where it is positive, 0 elsewhere."""

    def __init__(self, bias=0.0):
        super().__init__()
        self.sizes = []
        self.bias = bias

    def forward(self, images):
        self.sizes.append(len(images))
        first = images[:, 0, 0, 0]
        return torch.stack([-first, first + self.bias], dim=1)


def records(pixels, labels, patients=None):
    images = torch.zeros(len(pixels), 1, 28, 28)
    images[:, 0, 0, 0] = torch.tensor(pixels, dtype=torch.float32)
    return Records(images, torch.tensor(labels, dtype=torch.int64), patients)


def event(sigma):
    return Event(1.0, sigma, 1, "evaluation_count")


def on_grid(value, sigma):
    """The nearest multiple of sigma / 1024, which is a power of two times sigma and so exact."""
    return round(value / (sigma / 1024)) * (sigma / 1024)


def count(data, sigma=1e-2, seed=0, classifier=None):
    return noised_count(classifier or Reader(), data, event(sigma), KeyedGenerator.from_seed(seed))


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_the_count_is_right_less_half_of_all_plus_noise_of_half_sigma(sigma):
    data = records([0.5, 0.5, -0.5, -0.5, 0.5], [1, 0, 0, 0, 1])  # 4 of 5 right
    random = KeyedGenerator.from_seed(7)
    random.uniform(0)
    found = noised_count(Reader(), data, event(sigma), KeyedGenerator.from_seed(7))
    by_hand = 4 - 5 / 2 + sigma / 2 * float(random.normal(1)[0])
    assert found == on_grid(by_hand, sigma)
    assert found == pytest.approx(by_hand, abs=sigma / 2048)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from([-0.5, 0.5]), st.integers(0, 1)), min_size=1, max_size=12),
       who=st.integers(0, 11))  # fmt: skip
def test_sensitivity_an_image_moves_the_count_by_one_half(rows, who):
    who %= len(rows)
    rest = rows[:who] + rows[who + 1 :]
    larger = count(records(*map(list, zip(*rows, strict=True))))
    smaller = count(records([p for p, _ in rest], [label for _, label in rest]))
    assert abs(larger - smaller) == pytest.approx(0.5, abs=1e-9)


def test_invariant_11_sensitivity_a_patient_with_many_images_moves_the_count_by_one_half():
    # "z" is the last patient, so that the others' images are drawn alike with and without
    pixels, labels, ids = [0.5, -0.5, 0.5], [1, 1, 0], ["a", "a", "b"]
    for right in (0, 1):
        larger = count(records(pixels + [0.5] * 50, labels + [right] * 50, ids + ["z"] * 50), sigma=0.01)
        smaller = count(records(pixels, labels, ids), sigma=0.01)
        assert abs(larger - smaller) == pytest.approx(0.5, abs=0.05)  # the noise of 0.005 is drawn anew


def test_a_patient_counts_through_one_image_drawn_uniformly():
    data = records([0.5] * 4, [1, 0, 0, 0], ["p"] * 4)  # one of the four images is right
    found = [round(count(data, seed=seed) + 0.5) for seed in range(2000)]
    assert set(found) == {0, 1}
    assert np.mean(found) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 2000) ** 0.5)


def test_more_images_than_a_pass_holds_are_all_counted_once():
    classifier = Reader()
    found = count(records([0.5] * 1100, [1] * 1000 + [0] * 100), classifier=classifier)
    assert found == pytest.approx(1000 - 550, abs=0.05)
    assert sum(classifier.sizes) == 1100 and max(classifier.sizes) <= 512


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf])
def test_invariant_7_a_classifier_that_gives_nan_or_infinity_leaves_the_answer_finite_and_bounded(bias):
    assert abs(count(records([0.5] * 6, [0, 1] * 3), classifier=Reader(bias))) <= 3.1


def test_invariant_7_no_records_are_noised_all_the_same():
    noise = float(KeyedGenerator.from_seed(3).normal(1)[0])
    assert count(records([], []), sigma=2.0, seed=3) == on_grid(noise, 2.0) == pytest.approx(noise, abs=2.0 / 2048)


@settings(max_examples=40, deadline=None)
@given(sigma=st.sampled_from([0.1, 0.3, 1.0, 4.0, 1e3, 1e6]), seed=st.integers(0, 10**6), right=st.integers(0, 9))
def test_a_count_lies_on_the_grid_of_its_noise_whatever_was_counted(sigma, seed, right):
    found = count(records([0.5] * 9, [1] * right + [0] * (9 - right)), sigma=sigma, seed=seed)
    assert found == on_grid(found, sigma)


def test_the_classifier_is_used_in_evaluation_mode():
    classifier = Reader().train()
    count(records([0.5], [1]), classifier=classifier)
    assert not classifier.training


@pytest.mark.parametrize("order", [2.0, 7.0, 63.0])
def test_the_event_costs_what_a_gaussian_of_sensitivity_one_half_and_this_noise_costs(order):
    sigma = 3.0
    reference = RdpAccountant(orders=[order]).compose(GaussianDpEvent((sigma / 2) / 0.5))
    assert step_rdp(1.0, sigma, order) == pytest.approx(float(reference._rdp[0]), rel=1e-9)
    assert step_rdp(1.0, sigma, order) == pytest.approx(order / (2 * sigma**2), rel=1e-9)


def test_the_noise_of_counts_is_gaussian_and_that_of_one_says_nothing_of_the_next():
    data = records([0.5] * 3, [1, 1, 0])
    keys = (KeyedGenerator.from_seed("counts", number) for number in range(4096))
    noise = np.array([noised_count(Reader(), data, event(3.0), key) - 0.5 for key in keys]) / 1.5
    error = 1e-4  # the rate at which a correct mechanism fails over the choice of the keys, in each of the two
    assert_standard(noise, error)
    assert_unrelated(noise[None], error)
