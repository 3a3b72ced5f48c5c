"""Divides the records of one data set among simulated sites with the partitioners of flwr-datasets."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.errors import ConfigError, DataError

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

PartitionKind = Literal["iid", "dirichlet", "size", "pathological"]

# A site without records cannot train; any larger minimum would reject legal small or skewed divisions.
_MIN_SITE_SIZE = 1


def partition(
    labels: NDArray[np.int64],
    *,
    kind: PartitionKind,
    num_sites: int,
    seed: int,
    alpha: float | None = None,
    sizes: Sequence[int] | None = None,
    classes_per_site: int | None = None,
) -> list[NDArray[np.int64]]:
    """Return, for each site, the sorted int64 indices of its records; sites never share a record.

    `labels` is an integer array (N,). Every kind first shuffles the records by `seed`, then divides them:
    - "iid": sizes as even as possible, every record used.
    - "dirichlet": each class is divided by proportions drawn from Dirichlet(alpha > 0), every record used.
    - "size": site i gets `sizes[i]` >= 1 records; with a sum below N the rest is left out.
    - "pathological": each site gets `classes_per_site` classes; classes that no site has are left out.
    The same arguments give the same result. Raises ConfigError for a parameter that is missing or out of range, and
    DataError where the records do not allow the division (fewer records than sites, or than a class needs).
    """
    _check_parameters(kind, num_sites, seed, alpha, sizes, classes_per_site)
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "ui":
        raise DataError(f"partition: labels have shape {labels.shape}, dtype {labels.dtype}; give integers (N,)")
    if num_sites > len(labels):
        raise DataError(f"partition: {num_sites} sites for {len(labels)} records; use fewer sites or more records")
    if kind == "size" and sizes is not None and sum(sizes) > len(labels):
        raise DataError(f"partition: sizes add up to {sum(sizes)}, there are {len(labels)} records; lower the sizes")
    if classes_per_site is not None and kind == "pathological" and classes_per_site > len(np.unique(labels)):
        raise ConfigError(
            f"partition: classes_per_site is {classes_per_site}, the labels have {len(np.unique(labels))} classes; "
            "lower classes_per_site"
        )
    # Some partitioners cut the records in their order, so shuffle them here, once for every kind.
    order = np.random.default_rng(seed).permutation(len(labels))
    with _quiet_datasets():
        from datasets import Dataset

        partitioner = _make_partitioner(kind, num_sites, seed, alpha, sizes, classes_per_site)
        partitioner.dataset = Dataset.from_dict({"index": order, "label": labels[order]})
        try:
            sites = [partitioner.load_partition(site)["index"] for site in range(num_sites)]
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"partition: the records do not allow this {kind} division: {reason}") from error
        return [np.sort(np.asarray(site, np.int64)) for site in sites]


def _check_parameters(
    kind: str,
    num_sites: int,
    seed: int,
    alpha: float | None,
    sizes: Sequence[int] | None,
    classes_per_site: int | None,
) -> None:
    """Raise ConfigError for a parameter that `kind` needs and that is missing or out of range."""
    if kind not in get_args(PartitionKind):
        raise ConfigError(f"partition: kind {kind!r} is unknown; use one of {', '.join(get_args(PartitionKind))}")
    if num_sites < 1:
        raise ConfigError(f"partition: num_sites is {num_sites}; use at least 1")
    if seed < 0:
        raise ConfigError(f"partition: seed is {seed}; use 0 or more")
    if kind == "dirichlet" and (alpha is None or not 0 < alpha < math.inf):
        raise ConfigError(f"partition: alpha is {alpha}; kind 'dirichlet' needs a finite alpha above 0")
    if kind == "size" and (sizes is None or len(sizes) != num_sites or min(sizes) < 1):
        raise ConfigError(f"partition: sizes is {sizes}; kind 'size' needs {num_sites} sizes of at least 1")
    if kind == "pathological" and (classes_per_site is None or classes_per_site < 1):
        raise ConfigError(f"partition: classes_per_site is {classes_per_site}; kind 'pathological' needs at least 1")


def _make_partitioner(
    kind: PartitionKind,
    num_sites: int,
    seed: int,
    alpha: float | None,
    sizes: Sequence[int] | None,
    classes_per_site: int | None,
) -> Partitioner:
    """Build the flwr-datasets partitioner of `kind` from parameters that were checked."""
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        IidPartitioner,
        PathologicalPartitioner,
        SizePartitioner,
    )

    if kind == "dirichlet" and alpha is not None:
        return DirichletPartitioner(
            num_partitions=num_sites,
            partition_by="label",
            alpha=float(alpha),
            min_partition_size=_MIN_SITE_SIZE,
            self_balancing=False,
            seed=seed,
        )
    if kind == "size" and sizes is not None:
        return SizePartitioner([int(size) for size in sizes])
    if kind == "pathological" and classes_per_site is not None:
        # "first-deterministic" is the mode of the FedAvg paper: every class is used once there are enough sites.
        return PathologicalPartitioner(
            num_partitions=num_sites,
            partition_by="label",
            num_classes_per_partition=classes_per_site,
            class_assignment_mode="first-deterministic",
            seed=seed,
        )
    return IidPartitioner(num_partitions=num_sites)


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and warnings of `datasets` and flwr-datasets, and restore the caller's setting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets

        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            if shown:
                datasets.enable_progress_bars()
