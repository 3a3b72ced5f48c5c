"""A simulation's records, laid out site by site in the run's folder while it runs: its processes share one copy."""

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data import ImageData
from fl_dpgan.errors import RunFolderError


def write(folder: Path, images: ImageData, parts: Sequence[NDArray[np.int64]]) -> None:
    """Write each site's records one after another.

    Raises:
        RunFolderError: the disk is full or read-only.
    """
    order = np.concatenate(parts)
    arrays: dict[str, NDArray[Any]] = {
        "images": images.images[order],
        "labels": images.labels[order],
        "ends": np.cumsum([len(part) for part in parts]),
        "classes": np.array(images.classes),
    }
    if images.patients is not None:
        arrays["patients"] = np.array(images.patients)[order]
    try:
        folder.mkdir(exist_ok=True)
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    except OSError as error:
        remove(folder)
        raise RunFolderError(
            f"{folder} cannot be written: {error.strerror or error}; free some space, or give another --out"
        ) from error


def read(folder: Path, index: int) -> ImageData:
    """The records of one site. Their pixels stay on disk and in the system's cache, once for all processes.

    Raises:
        RunFolderError: there are none, which `write` has to lay out first.
    """
    arrays = _open(folder)
    start, end = (int(arrays["ends"][index - 1]) if index else 0), int(arrays["ends"][index])
    patients = arrays.get("patients")
    return ImageData(
        arrays["images"][start:end],
        arrays["labels"][start:end],
        tuple(arrays["classes"].tolist()),
        None if patients is None else tuple(patients[start:end].tolist()),
    )


def remove(folder: Path) -> None:
    """Delete what `write` wrote; processes that have it open keep what they see."""
    shutil.rmtree(folder, ignore_errors=True)
    _open.cache_clear()


@lru_cache(maxsize=2)
def _open(folder: Path) -> dict[str, NDArray[Any]]:
    if not (folder / "ends.npy").is_file():
        raise RunFolderError(f"{folder} holds no records; the run's server lays them out when it starts")
    try:
        # copy on write: nobody writes, but PyTorch warns of memory that is read-only
        return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} is damaged ({error}); continue the run with --resume") from error
