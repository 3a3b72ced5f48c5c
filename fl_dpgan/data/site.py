"""Reads the images that a site's file names, under the federation's labels. Everything it says stays at the site."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.cache import SiteImages, Unread, cached
from fl_dpgan.data.folders import list_site_folder
from fl_dpgan.data.formats import RawImages, bad, read_idx_pair, read_site_npz
from fl_dpgan.data.manifest import image_of, patients_of, read_rows
from fl_dpgan.data.pictures import read_picture
from fl_dpgan.data.pixels import Picture, fit, fitting
from fl_dpgan.data.quiet import quiet

if TYPE_CHECKING:
    from fl_dpgan.site_file import SiteData

__all__ = ["SiteImages", "missing_classes", "read_site"]

_VERSION = 1  # of the rules that make pixels of files; with another one a cache is read anew
_THREADS = 8  # a large radiograph takes a few hundred megabytes while it is decoded
_TEST_ROWS = "rows of split test, left out"
_IDX_CLASSES = tuple(map(str, range(256)))


@dataclass(frozen=True)
class _Records:
    """Records that are listed and not decoded: of each the site's label, and what reads its image."""

    labels: Sequence[str]
    pictures: Sequence[Callable[[], Picture]]
    patients: tuple[str, ...] | None = None
    left_out: Mapping[str, int] | None = None


@dataclass(frozen=True)
class _Source:
    """`files` are all that is read, and `listing` what is known of them without reading them."""

    files: list[Path]
    listing: list[object]
    read: Callable[[], _Records]


def read_site(
    data: SiteData,
    labels: Mapping[str, str],
    classes: Sequence[str],
    *,
    size: int,
    channels: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SiteImages:
    """Read a site's images, or take them from its cache where nothing has changed since.

    Args:
        data: where they are. Of a manifest, rows whose split is `test` are left out, and counted.
        labels: the federation's name for each of the site's labels that is called otherwise.
        classes: the federation's labels, in the order of their numbers.
        size: the width and height that every image is brought to.
        channels: 1 (colour becomes grey) or 3 (grey is replicated).
        on_progress: is told how many of how many images are read.

    Raises:
        ConfigError: a file is DICOM, and pydicom is not installed.
        DataError: a label has no class, a file is missing or cannot be read, or the cache cannot be used.
    """
    if unknown := sorted({name for name in labels.values() if name not in classes}):
        raise bad(f"[labels] maps to {_some(unknown)}", "which the federation does not have", _choices(classes))

    def unread() -> Unread:
        records = source.read()
        numbers = _numbers(data.path, records.labels, labels, classes)
        conversions = Counter(records.left_out)
        rows = _prepared(records.pictures, size, channels, conversions, on_progress)
        return Unread(rows, (channels, size, size), numbers, records.patients, conversions)

    try:
        source = _SOURCES[data.source](data.path)
        fingerprint = _fingerprint(data, source, [sorted(labels.items()), list(classes), size, channels])
        with quiet():
            images = cached(data.cache, fingerprint, unread)
    except OSError as error:
        raise bad(data.path, f"cannot be read ({error})", "check its permissions and its disk") from error
    on_progress(len(images.labels), len(images.labels))
    return images


def missing_classes(images: SiteImages, classes: Sequence[str]) -> list[str]:
    """The federation's labels of which the site has no record."""
    there = set(np.unique(images.labels).tolist())
    return [name for number, name in enumerate(classes) if number not in there]


def _numbers(where: Path, names: Sequence[str], labels: Mapping[str, str], classes: Sequence[str]) -> NDArray[np.int64]:
    """The number of each record's class."""
    number = {name: classes.index(labels.get(name, name)) for name in set(names) if labels.get(name, name) in classes}
    if unmapped := sorted(set(names) - set(number)):
        raise bad(where, f"has the labels {_some(unmapped)}, which the federation does not have", _choices(classes))
    return np.array([number[name] for name in names], np.int64)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _choices(classes: Sequence[str]) -> str:
    return f"map them in [labels] of the site's file to {_some(classes)}"


def _prepared(
    pictures: Sequence[Callable[[], Picture]],
    size: int,
    channels: int,
    conversions: Counter[str],
    on_progress: Callable[[int, int], None],
) -> Iterator[NDArray[np.uint8]]:
    """Decode and fit all images in order, several at a time (Pillow and NumPy work without the interpreter's lock)."""

    def prepare(picture: Callable[[], Picture]) -> Picture:
        image, notes = picture()
        return fit(image, size, channels), (*notes, *fitting(image, size, channels))

    pool = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _THREADS))
    try:
        for done, (image, notes) in enumerate(pool.map(prepare, pictures), 1):
            conversions.update(notes)
            on_progress(done, len(pictures))
            yield image
    finally:
        pool.shutdown(cancel_futures=True)


def _fingerprint(data: SiteData, source: _Source, settings: list[object]) -> str:
    """SHA-256 of the files' names, sizes and times and of the settings; it stays in the cache's folder."""
    root = data.path if data.path.is_dir() else data.path.parent
    missing = [path for path in source.files if not path.is_file()]
    if missing:
        others = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise bad(missing[0], f"is not a file{others}", "mend the paths, or leave them out")
    stamps = [(os.path.relpath(path, root), (state := path.stat()).st_size, state.st_mtime_ns) for path in source.files]
    content = json.dumps([_VERSION, data.source, str(root), settings, source.listing, stamps])
    return hashlib.sha256(content.encode()).hexdigest()


def _folder(path: Path) -> _Source:
    found, left_out = list_site_folder(path)
    labels = [label for _, label in found]
    pictures = [partial(read_picture, file) for file, _ in found]
    return _Source([file for file, _ in found], [left_out], lambda: _Records(labels, pictures, None, left_out))


def _manifest(path: Path) -> _Source:
    rows = read_rows(path)
    kept = [row for row in rows if row.get("split") != "test"]
    if not kept:
        raise bad(path, "has only rows of split test, which are left out", "mark some as train")
    images = [image_of(path, row) for row in kept]
    left_out = Counter({_TEST_ROWS: len(rows) - len(kept)} if len(kept) < len(rows) else {})
    records = _Records(
        [row["label"] for row in kept], [partial(read_picture, *image) for image in images], patients_of(kept), left_out
    )
    return _Source([file for file, _ in images], [rows], lambda: records)


def _npz(path: Path) -> _Source:
    if not path.is_file():
        raise bad(path, "is not an existing .npz file", "set data.path to the NPZ file itself")
    return _Source([path], [], lambda: _arrays(read_site_npz(path)))


def _idx(path: Path) -> _Source:
    if not path.is_dir():
        raise bad(path, "is not an existing folder", "set data.path to the folder that holds the two IDX files")
    images, labels = _idx_file(path, "images", "idx3"), _idx_file(path, "labels", "idx1")
    return _Source([images, labels], [], lambda: _arrays(read_idx_pair(images, labels, _IDX_CLASSES)))


def _idx_file(folder: Path, kind: str, code: str) -> Path:
    """The folder's one file of a kind, compressed or not; the training part where there is a test part too."""
    found = sorted(path for path in folder.iterdir() if path.name.removesuffix(".gz").endswith(f"{kind}-{code}-ubyte"))
    if len(found) > 1:
        found = [path for path in found if path.name.startswith("train-")]
    if len(found) != 1:
        raise bad(folder, f"does not hold exactly one file *{kind}-{code}-ubyte or .gz", "keep the one that you mean")
    return found[0]


def _arrays(raw: RawImages) -> _Records:
    pictures = [partial(_as_it_is, image) for image in raw.images]
    return _Records([raw.classes[label] for label in raw.labels], pictures)


def _as_it_is(image: NDArray[np.uint8]) -> Picture:
    return image, ()


_SOURCES = {"folder": _folder, "manifest": _manifest, "npz": _npz, "idx": _idx}
