"""Each measure against a formula or a figure worked out by hand."""

import warnings

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

from fl_dpgan.data import ImageData
from fl_dpgan.evaluation.fidelity import compare, diversity, features_by_class, fid, kid, precision_recall


def cloud(count: int, width: int = 4, *, seed: int = 0, at: float = 0.0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(width, width))
    return torch.from_numpy(random.normal(size=(count, width)) @ mixing + at)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)[:, None]


def test_fid_is_the_closed_formula():
    fake, real = cloud(200, 8, seed=1, at=0.3), cloud(300, 8, seed=2)
    a, b = (np.cov(points.numpy(), rowvar=False) for points in (fake, real))
    gap = ((fake.mean(0) - real.mean(0)) ** 2).sum()
    assert fid(fake, real) == pytest.approx(float(gap + np.trace(a + b - 2 * sqrtm(a @ b).real)), rel=1e-6)


def test_fid_of_a_shifted_set_is_the_shift_squared():
    points = cloud(100)
    assert fid(points + 3.0, points) == pytest.approx(4 * 9, rel=1e-6)
    assert fid(points, points) == pytest.approx(0, abs=1e-6)


def test_kid_of_two_points_is_a_sum_of_three_kernels():
    fake, real = torch.full((10, 2), 2.0).double(), torch.tensor([[1.0, 0.0]] * 10).double()
    # (x . y / 2 + 1)^3: 5^3 within fakes, 1.5^3 within reals, 2^3 across
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kid(fake, real, seed=0) == (pytest.approx(125 + 3.375 - 2 * 8), pytest.approx(0, abs=1e-9))


def test_kid_is_near_zero_within_a_distribution_repeats_itself_and_leaves_the_callers_draws():
    points = cloud(400, seed=3)
    state = torch.random.get_rng_state()
    near, _ = kid(points[:200], points[200:], seed=0)
    assert torch.equal(state, torch.random.get_rng_state())
    far, _ = kid(points[:200] + 2, points[200:], seed=0)
    assert abs(near) < far / 20
    assert kid(points[:200], points[200:], seed=0)[0] == near


def test_precision_and_recall_of_points_on_a_line():
    # To the third neighbour it is, from each real: 3, 2, 2, 2.65, 4.65. From each fake: 0.3, 0.2, 0.2, 0.3, 24.4.
    real, fake = column(0, 1, 2, 3, 5.65), column(5.5, 5.6, 5.7, 5.8, 30)
    precision, recall = precision_recall(fake, real)
    assert precision == 0.8  # all but 30
    assert recall == 0.2  # 5.65 alone


@pytest.mark.parametrize("shift, share", [(0.0, 1.0), (1e4, 0.0)])
def test_precision_and_recall_of_one_set_and_of_sets_far_apart(shift, share):
    points = cloud(50)
    assert precision_recall(points + shift, points) == (share, share)


def test_diversity_is_the_ratio_of_mean_distances():
    # (1 + 2 + 1) / 3 against (2 + 6 + 4) / 3
    assert diversity(column(0, 1, 2), column(0, 2, 6)) == pytest.approx(1 / 3)


def test_a_generator_of_one_image_per_class_is_found_out():
    real = [cloud(30, seed=label, at=label) for label in range(3)]
    collapsed = [points[:1].expand(30, -1) for points in real]
    found = compare(collapsed, real, seed=0)
    assert (found["diversity_min"], found["diversity_mean"]) == (0, 0)
    assert found["recall"] == pytest.approx(3 / 90)  # the three images that it copies
    assert found["precision"] == 1.0
    one_class = compare([collapsed[0], *real[1:]], real, seed=0)
    assert one_class["diversity_min"] == 0
    assert one_class["diversity_mean"] == pytest.approx(2 / 3)
    assert [row["diversity"] for row in one_class["per_class"]] == [0, pytest.approx(1), pytest.approx(1)]


def test_both_sides_give_equally_many_images_of_a_class():
    fake = [cloud(count, seed=1) for count in (20, 9)]
    real = [cloud(count, seed=2) for count in (12, 30)]
    found = compare(fake, real, seed=0)
    assert [row["images"] for row in found["per_class"]] == [12, 9]
    assert found["images"] == 21
    assert found["fid"] == pytest.approx(fid(torch.cat([fake[0][:12], fake[1]]), torch.cat([real[0], real[1][:9]])))


def test_fid_is_left_out_where_there_are_no_more_images_than_features():
    found = compare([cloud(4)] * 2, [cloud(4)] * 2, seed=0)
    assert found["fid"] is not None
    assert [row["fid"] for row in found["per_class"]] == [None, None]


def test_features_are_what_the_last_layer_sees_class_by_class():
    network = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    images = np.array([0, 255, 255, 0, 255], np.uint8).reshape(5, 1, 1, 1).repeat(2, 2).repeat(2, 3)
    data = ImageData(images, np.array([1, 0, 1, 1, 0]), ("a", "b"))
    first, second = features_by_class(network, data, 2)
    assert first.tolist() == [[1.0] * 4, [1.0] * 4]
    assert second.tolist() == [[0.0] * 4, [1.0] * 4]
