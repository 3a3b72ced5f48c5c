"""Loads one split of a named image source as uint8 arrays of one size, by per-record steps only.

Nothing here looks at more than one record at a time (no mean, no scale from the data), so preprocessing costs no
privacy budget and one record never changes how another one looks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.folders import read_folder
from fl_dpgan.data.formats import RawImages, bad, read_idx_pair, read_npz
from fl_dpgan.data.manifest import read_manifest
from fl_dpgan.data.pixels import fit
from fl_dpgan.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "test"]

_DIGIT_NAMES = tuple("0123456789")
_FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# Source name -> (name of the torchvision class, which is also that of its folder; class names).
_IDX_SOURCES = {"mnist": ("MNIST", _DIGIT_NAMES), "fashion-mnist": ("FashionMNIST", _FASHION_NAMES)}
# Source name -> (name of the medmnist class; class names).
_MEDMNIST_SOURCES = {
    "pneumoniamnist": ("PneumoniaMNIST", ("normal", "pneumonia")),
    "breastmnist": ("BreastMNIST", ("malignant", "normal, benign")),
    "retinamnist": ("RetinaMNIST", ("0", "1", "2", "3", "4")),
}
_WITHHELD_SEED = 5_000
SOURCES = ("digits", *_IDX_SOURCES, *_MEDMNIST_SOURCES, "npz", "folder", "manifest")


@dataclass(frozen=True)
class ImageData:
    """Labelled images: uint8 (N, C, S, S) in 0..255, int64 labels (N,) in 0..len(classes)-1, and class names.

    `patients` holds each record's patient id (N,), where the source has them.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    patients: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Return the number of records, N."""
        return len(self.labels)

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> ImageData:
        """Return a copy of the records at `indices` (each in 0..N-1), in that order; DataError when one is outside."""
        chosen = np.asarray(indices, np.int64)
        wrong = chosen[(chosen < 0) | (chosen >= len(self))]
        if wrong.size:
            raise bad("subset", f"index {wrong[0]} is outside 0..{len(self) - 1}", "pass indices of this data set")
        patients = None if self.patients is None else tuple(self.patients[i] for i in chosen)
        return ImageData(self.images[chosen], self.labels[chosen], self.classes, patients)


def withhold(data: ImageData, count: int) -> tuple[ImageData, ImageData]:
    """Part the images into those for the sites and `count` others, on which settings may be chosen.

    Which ones does not depend on a run's seed: no run of a series trains on another's. A patient's images stay
    together, so that with patients somewhat more than `count` may be withheld. DataError where none would be left.
    """
    units = (
        np.arange(len(data)) if data.patients is None else np.unique(np.asarray(data.patients), return_inverse=True)[1]
    )
    order = np.random.default_rng(_WITHHELD_SEED).permutation(units.max(initial=-1) + 1)
    place = np.argsort(order)[units]  # of each record's unit in the order
    first = np.sort(place)[count - 1] if 0 < count <= len(data) else (-1 if count == 0 else len(data))
    if not (place > first).any():
        raise bad("withheld", f"{count} of {len(data)} images", "set data.withheld to fewer")
    return data.subset(np.flatnonzero(place > first)), data.subset(np.flatnonzero(place <= first))


def to_tensor(images: NDArray[np.uint8]) -> torch.Tensor:
    """Map uint8 images of any shape to a float32 tensor of that shape in [-1, 1] (0 -> -1, 255 -> 1)."""
    import torch

    return to_unit(torch.from_numpy(images))


def to_unit(images: torch.Tensor) -> torch.Tensor:
    """Map a uint8 tensor of any shape to float32 in [-1, 1] (0 -> -1, 255 -> 1)."""
    return images.float() / 127.5 - 1.0


def load(
    source: str,
    *,
    split: Split,
    size: int,
    channels: int,
    data_dir: Path | None = None,
    download: bool = False,
) -> ImageData:
    """Load one split of `source` (one of `SOURCES`) as uint8 images of shape (N, channels, size, size).

    `data_dir` is where the files lie: a folder, or for `npz` the file itself; `digits` needs none. With `download`,
    MNIST, Fashion-MNIST and MedMNIST files that are not there yet are fetched into it; other sources ignore it.
    Raises ConfigError for an unknown source or split, size < 1 or channels other than 1 and 3, and DataError for
    files that are missing, damaged or out of range.
    """
    if source not in SOURCES:
        raise ConfigError(f"data source {source!r} is unknown; use one of {', '.join(SOURCES)}")
    if split not in ("train", "test"):
        raise ConfigError(f"split {split!r} is unknown; use 'train' or 'test'")
    if size < 1 or channels not in (1, 3):
        raise ConfigError(f"size {size} with {channels} channels is not possible; use size >= 1 and 1 or 3 channels")
    try:
        raw = _read_digits(split) if source == "digits" else _read_files(source, split, data_dir, download)
    except OSError as error:
        raise bad(str(data_dir), f"cannot be read ({error})", "check its permissions and its disk") from error
    images = np.empty((len(raw.labels), channels, size, size), np.uint8)
    for row, image in enumerate(raw.images):
        images[row] = fit(image, size, channels)
    return ImageData(images, raw.labels, raw.classes, raw.patients)


def _read_digits(split: Split) -> RawImages:
    """Return one part of scikit-learn's 1797 digits: a fixed, public, stratified split into 1437 and 360."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    # 0..16 to 0..255, rounded to nearest.
    images = ((digits.images.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    part = 0 if split == "train" else 1
    return RawImages(parts[part], parts[part + 2], _DIGIT_NAMES)


def _read_files(source: str, split: Split, data_dir: Path | None, download: bool) -> RawImages:
    """Find the files of `source` under `data_dir`, fetching them first where that was asked, and read them."""
    if data_dir is None:
        raise DataError(f"data source {source!r} needs data_dir, which is not set; set it to where the files lie")
    if source == "npz":
        if data_dir.suffix != ".npz" or not data_dir.is_file():
            raise bad(data_dir, "is not an existing .npz file", "set data_dir to the NPZ file itself")
        return read_npz(data_dir, split, None)
    if not download and not data_dir.is_dir():
        raise bad(data_dir, "data_dir is not an existing folder", "set data_dir to the folder that holds the files")
    if source == "folder":
        return read_folder(data_dir, split)
    if source == "manifest":
        return read_manifest(data_dir / "manifest.csv", split)
    if source in _MEDMNIST_SOURCES:
        name, classes = _MEDMNIST_SOURCES[source]
        places = [data_dir / f"{source}.npz", data_dir / "MedMNIST" / f"{source}.npz"]
        if download and not any(path.is_file() for path in places):
            _download("medmnist", name, data_dir, split=split)
        return read_npz(_find(places), split, classes)
    name, classes = _IDX_SOURCES[source]
    images, labels = (_idx_places(data_dir, name, split, kind) for kind in ("images-idx3", "labels-idx1"))
    if download and not all(any(path.is_file() for path in places) for places in (images, labels)):
        _download("torchvision.datasets", name, data_dir, train=split == "train")
    return read_idx_pair(_find(images), _find(labels), classes)


def _idx_places(data_dir: Path, name: str, split: Split, kind: str) -> list[Path]:
    """List where an official IDX file may lie, compressed or not; `name` keeps MNIST and Fashion-MNIST apart."""
    stem = f"{'train' if split == 'train' else 't10k'}-{kind}-ubyte"
    folders = (data_dir / name / "raw", data_dir / "raw", data_dir)
    return [folder / (stem + suffix) for folder in folders for suffix in ("", ".gz")]


def _find(places: list[Path]) -> Path:
    """Return the first of `places` that is a file."""
    for path in places:
        if path.is_file():
            return path
    searched = ", ".join(dict.fromkeys(str(path.parent) for path in places))
    raise DataError(f"{places[0].name} was not found in {searched}; copy it there, or allow the download")


def _download(module: str, name: str, root: Path, **options: str | bool) -> None:
    """Fetch a data set into `root` through class `name` of `module`; any failure becomes a DataError."""
    try:
        dataset = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise bad(
            name, f"the download needs the package {module!r} ({error})", f"pip install {module.split('.')[0]}"
        ) from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        dataset(root=str(root), download=True, **options)
    except Exception as error:  # the packages raise whatever their transport raises
        raise bad(
            root, f"the download of {name} failed ({error})", "check the network or copy the files there"
        ) from error
