"""Checks that partitions are disjoint, complete where promised, repeatable, and skewed as asked."""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dpgan.data import partition
from fl_dpgan.errors import ConfigError, DataError

LABELS = np.repeat(np.arange(5), [40, 30, 20, 20, 10])


def check_sites(sites: list[np.ndarray], count: int) -> np.ndarray:
    """Check what every kind promises and return all indices, sorted."""
    for site in sites:
        assert site.dtype == np.int64
        assert site.size > 0
        assert (np.diff(site) > 0).all()
    together = np.sort(np.concatenate(sites))
    assert len(np.unique(together)) == len(together)
    assert together[0] >= 0 and together[-1] < count
    return together


@settings(max_examples=25, deadline=None)
@given(data=st.data(), labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), seed=st.integers(0, 2**32))
def test_iid_is_complete_even_and_repeatable(data: st.DataObject, labels: list[int], seed: int) -> None:
    num_sites = data.draw(st.integers(1, len(labels)))
    array = np.array(labels)
    sites = partition(array, kind="iid", num_sites=num_sites, seed=seed)
    assert check_sites(sites, len(labels)).tolist() == list(range(len(labels)))
    lengths = [len(site) for site in sites]
    assert len(sites) == num_sites and max(lengths) - min(lengths) <= 1
    again = partition(array, kind="iid", num_sites=num_sites, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(sites, again, strict=True))


@settings(max_examples=15, deadline=None)
@given(alpha=st.floats(0.5, 1000), num_sites=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_dirichlet_is_complete_and_repeatable(alpha: float, num_sites: int, seed: int) -> None:
    sites = partition(LABELS, kind="dirichlet", num_sites=num_sites, seed=seed, alpha=alpha)
    assert len(sites) == num_sites
    assert check_sites(sites, len(LABELS)).tolist() == list(range(len(LABELS)))
    again = partition(LABELS, kind="dirichlet", num_sites=num_sites, seed=seed, alpha=alpha)
    assert all(np.array_equal(a, b) for a, b in zip(sites, again, strict=True))


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_size_gives_exactly_the_sizes(sizes: list[int], seed: int) -> None:
    sites = partition(LABELS, kind="size", num_sites=len(sizes), seed=seed, sizes=sizes)
    check_sites(sites, len(LABELS))
    assert [len(site) for site in sites] == sizes


@settings(max_examples=15, deadline=None)
@given(classes_per_site=st.integers(1, 5), num_sites=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_pathological_limits_the_classes(classes_per_site: int, num_sites: int, seed: int) -> None:
    sites = partition(LABELS, kind="pathological", num_sites=num_sites, seed=seed, classes_per_site=classes_per_site)
    used = check_sites(sites, len(LABELS))
    assert [len(np.unique(LABELS[site])) for site in sites] == [classes_per_site] * num_sites
    # A class that any site has is used up: only whole classes are left out.
    assert np.array_equal(used, np.flatnonzero(np.isin(LABELS, np.unique(LABELS[used]))))


def test_small_alpha_skews_more_than_large_alpha() -> None:
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: float) -> float:
        sites = partition(labels, kind="dirichlet", num_sites=4, seed=1, alpha=alpha)
        shares = [np.bincount(labels[site], minlength=10) / 200 for site in sites]
        return float(np.max(shares, axis=0).mean())

    assert largest_share(0.1) > 0.6
    assert largest_share(1000.0) < 0.3


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("iid", {}),
        ("size", {"sizes": [50, 30, 20]}),
        ("dirichlet", {"alpha": 1.0}),
        ("pathological", {"classes_per_site": 2}),
    ],
)
def test_another_seed_gives_another_partition(kind: Any, options: dict[str, Any]) -> None:
    first, second = (partition(LABELS, kind=kind, num_sites=3, seed=seed, **options) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_is_quiet_and_restores_the_progress_bar_setting(capfd: pytest.CaptureFixture[str]) -> None:
    shown = not datasets.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(LABELS, kind="size", num_sites=1, seed=0, sizes=[5])  # flwr-datasets warns about unused records
    assert capfd.readouterr() == ("", "")
    assert shown is not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kind": "other"}, ConfigError, "kind 'other' is unknown"),
        ({"num_sites": 0}, ConfigError, "num_sites is 0"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"kind": "dirichlet"}, ConfigError, "alpha is None"),
        ({"kind": "dirichlet", "alpha": 0.0}, ConfigError, "alpha is 0.0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, ConfigError, "alpha is nan"),
        ({"kind": "dirichlet", "alpha": float("inf")}, ConfigError, "alpha is inf"),
        ({"kind": "size"}, ConfigError, "sizes is None"),
        ({"kind": "size", "sizes": [1]}, ConfigError, "needs 2 sizes"),
        ({"kind": "size", "sizes": [3, 0]}, ConfigError, r"sizes is \[3, 0\]"),
        ({"kind": "size", "sizes": [100, 21]}, DataError, "add up to 121, there are 120"),
        ({"kind": "pathological"}, ConfigError, "classes_per_site is None"),
        ({"kind": "pathological", "classes_per_site": 0}, ConfigError, "classes_per_site is 0"),
        ({"kind": "pathological", "classes_per_site": 6}, ConfigError, "the labels have 5 classes"),
        ({"kind": "pathological", "classes_per_site": 5, "num_sites": 11}, DataError, "Label: 4"),
        ({"kind": "dirichlet", "alpha": 1e-6, "num_sites": 20}, DataError, "max number of attempts"),
        ({"num_sites": 121}, DataError, "121 sites for 120 records"),
        ({"labels": np.zeros((3, 1), int)}, DataError, r"shape \(3, 1\)"),
        ({"labels": np.zeros(3)}, DataError, "dtype float64"),
        ({"labels": np.zeros(0, int)}, DataError, "2 sites for 0 records"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"labels": LABELS, "kind": "iid", "num_sites": 2, "seed": 0} | options
    with pytest.raises(error, match=says) as caught:
        partition(arguments.pop("labels"), **arguments)
    assert "\n" not in str(caught.value)
