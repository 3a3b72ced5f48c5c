import math

import numpy as np
import pytest
import torch
from scipy import stats

from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.release import noised_sums
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.moments import Features, Fourier, Wavelets
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.training.records import Records
from tests.privacy.gaussian import assert_standard, assert_unrelated

FEATURES = Features(parts=(Fourier(count=40), Wavelets(count=12, side=2, weight=3.0)), count_share=0.2)
MAP = FeatureMap(FEATURES, (1, 28, 28))
QUIET = Event(1.0, 0.01, 1, "moment_release")


def records(count=30, seed=0, patients=None):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=random) * 2 - 1, torch.arange(count) % 3, patients


def sums(images, labels, patients=None, event=QUIET, key=0):
    return noised_sums(MAP, Records(images, labels, patients), 3, event, KeyedGenerator.from_seed(key))


def test_the_sums_are_those_of_a_loop_over_the_records():
    images, labels, _ = records()
    expected = torch.zeros(3, MAP.length + 1, dtype=torch.float64)
    for image, label in zip(images, labels, strict=True):
        expected[label, :-1] += MAP(image[None])[0].double()
        expected[label, -1] += math.sqrt(0.2)
    assert (sums(images, labels) - expected).abs().max() < 0.01 * 6  # six standard deviations of the noise


def test_invariant_1_removing_a_record_moves_the_release_by_at_most_one():
    images, labels, _ = records()
    whole = sums(images, labels)  # the same key, so the same noise
    for gone in range(0, 30, 7):
        kept = [i for i in range(30) if i != gone]
        moved = (whole - sums(images[kept], labels[kept])).norm()
        assert 0.99 < moved <= 1 + 30 * QUIET.noise_multiplier / 1024  # the grid's rounding


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_the_noise_has_the_events_standard_deviation_on_every_number(sigma):
    images, labels, _ = records()
    event = Event(1.0, sigma, 1, "moment_release")
    draws = torch.stack([sums(images, labels, event=event, key=key) for key in range(200)])
    spread = draws.std(0)
    # 200 draws know a standard deviation to 5 %: each within five of these, and the mean over all far closer
    assert float((spread / sigma - 1).abs().max()) < 0.25
    assert float(spread.mean()) == pytest.approx(sigma, rel=0.01)


def test_what_is_released_lies_on_a_grid_that_is_coarse_beside_the_records_rounding():
    images, labels, _ = records()
    found = sums(images, labels, event=Event(1.0, 4.0, 1, "moment_release"))
    assert torch.equal(found, (found * 256).round() / 256)  # 4 / 1024


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e38])
def test_invariant_7_a_record_that_is_not_finite_adds_at_most_what_any_other_does(value):
    images, labels, _ = records()
    data = Records(images, labels)
    whole = sums(images, labels)
    data.images = images.clone()
    data.images[4] = value  # Records refuses it at the door; a fault later must still not leak
    found = noised_sums(MAP, data, 3, QUIET, KeyedGenerator.from_seed(0))
    assert bool(found.isfinite().all())
    assert (found - whole).norm() <= 2.01  # one vector of norm 1 gone, and perhaps another come


def test_invariant_11_a_patient_adds_one_vector_however_many_images_there_are():
    images, labels, _ = records(12)
    patients = ["a"] * 10 + ["b", "c"]
    counts = sums(images, labels, patients)[:, -1] / math.sqrt(0.2)
    assert float(counts.sum()) == pytest.approx(3, abs=0.3)
    chosen = [tuple(np.round((sums(images, labels, patients, key=key)[:, -1] / math.sqrt(0.2)).tolist())) for key in
              range(20)]  # fmt: skip
    assert len(set(chosen)) > 1  # another image of patient a from time to time


class Long:
    """Features of as many numbers as a million draws need; those of every image are the same."""

    length, count_weight = 99_999, 0.6

    def __call__(self, images):
        return torch.full((len(images), self.length), 0.8 / self.length**0.5)


def test_the_noise_of_a_release_is_gaussian_on_every_number_and_unrelated_between_classes():
    sigma, error = 1.7, 1e-4  # the error rate of a correct mechanism over the choice of the key, in each of the two
    images, _, _ = records(30)
    data = Records(images, torch.arange(30) % 10)
    found = noised_sums(Long(), data, 10, Event(1.0, sigma, 1, "moment_release"), KeyedGenerator.from_seed("million"))
    exact = torch.cat([torch.full((99_999,), 3 * 0.8 / 99_999**0.5), torch.tensor([3 * 0.6])]).double()
    noise = ((found - exact) / sigma).numpy()
    assert noise.size == 10**6
    assert_standard(noise, error)
    assert_unrelated(noise, error)


def test_invariant_11_the_image_through_which_a_patient_is_released_is_drawn_uniformly():
    images, labels, _ = records(9)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 0, 0, 0])
    patients = ["many"] * 6 + ["three"] * 3  # of the first, three images of class 0, two of class 1, one of class 2
    counts = torch.stack([sums(images, labels, patients, key=key)[:, -1] for key in range(600)]) / math.sqrt(0.2)
    of_many = (counts - torch.tensor([1.0, 0.0, 0.0])).round().sum(0)  # the other's are all of class 0
    assert stats.chisquare(of_many.numpy(), [300, 200, 100]).pvalue > 1e-4
