"""Reads the formats of many images in one file (IDX, MedMNIST's NPZ) and checks them before trusting them.

No reader allocates what a header claims before that many bytes have arrived, and none unpickles.
"""

from __future__ import annotations

import gzip
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fl_dpgan.errors import DataError
from fl_dpgan.text import printable

_CHUNK = 1 << 20
_MAX_CLASSES = 1000
# What the standard library raises for a damaged compressed stream.
_BROKEN_STREAM = (OSError, EOFError, zlib.error, lzma.LZMAError)
_GET_AGAIN = "fetch or copy the file again"


class _Stream(Protocol):
    """A binary stream, compressed or not."""

    def read(self, size: int, /) -> bytes:
        """Read up to `size` bytes."""


@dataclass(frozen=True)
class RawImages:
    """Records as stored: `images` yields one uint8 (H, W) or (H, W, 3) array for each of the int64 (N,) `labels`.

    `patients` holds each record's patient id, where the source has them.
    """

    images: Iterable[NDArray[np.uint8]]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    patients: tuple[str, ...] | None = None


def bad(where: Path | str, what: str, remedy: str) -> DataError:
    """Build the one-line error: where it is, what is wrong, what to do."""
    # what is wrong may quote a file, in which anything may stand
    return DataError(printable(" ".join(f"{where}: {' '.join(what.split()):.500}; {remedy}".split()), None))


def read_idx_pair(images_path: Path, labels_path: Path, classes: tuple[str, ...]) -> RawImages:
    """Read an IDX image file and its label file (`.gz` or plain); DataError where they are damaged or disagree."""
    images = _read_idx(images_path, dims=3)
    labels = _read_idx(labels_path, dims=1)
    return RawImages(images, _check_labels(labels, len(images), len(classes), labels_path), classes)


def _read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Read one unsigned-byte IDX file of `dims` dimensions."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            header = _read_at_most(stream, 4 + 4 * dims)
            magic = int.from_bytes(header[:4], "big")
            if magic != 0x0800 + dims:
                raise bad(path, f"IDX magic is 0x{magic:08x}, expected 0x{0x0800 + dims:08x}", "check which file it is")
            if len(header) < 4 + 4 * dims:
                raise bad(path, f"the IDX header ends after {len(header)} bytes", _GET_AGAIN)
            shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
            if 0 in shape:
                raise bad(path, f"the header claims shape {shape}, so it holds no record", "use a file with records")
            return np.frombuffer(_read_exactly(stream, math.prod(shape), path), np.uint8).reshape(shape)
    except _BROKEN_STREAM as error:
        raise bad(path, f"cannot be read ({error})", _GET_AGAIN) from error


def _read_at_most(stream: _Stream, count: int) -> bytearray:
    """Read up to `count` bytes, a chunk at a time: `read(count)` would allocate `count` bytes at once."""
    data = bytearray()
    while len(data) < count and (chunk := stream.read(min(_CHUNK, count - len(data)))):
        data += chunk
    return data


def _read_exactly(stream: _Stream, count: int, where: Path | str) -> bytearray:
    """Read the `count` bytes that a header claims; DataError when the file holds fewer or more."""
    data = _read_at_most(stream, count)
    if len(data) < count:
        raise bad(where, f"the header claims {count} bytes of data, the file holds {len(data)}", _GET_AGAIN)
    if stream.read(1):
        raise bad(where, f"holds more than the {count} bytes of data that its header claims", _GET_AGAIN)
    return data


def read_npz(path: Path, split: str, classes: tuple[str, ...] | None) -> RawImages:
    """Read `{split}_images` and `{split}_labels` of a MedMNIST-style NPZ file.

    Images are (N, H, W), (N, H, W, 1) or (N, H, W, 3) with whole values 0..255; labels are integers (N,) or (N, 1).
    With `classes` None, the classes are "0".."K-1" with K from the labels of both splits, so that they agree.
    Raises DataError for a file that is damaged, incomplete, holds objects, or has values outside these ranges.
    """
    return _read_npz(path, f"{split}_", ("train_labels", "test_labels"), classes)


def read_site_npz(path: Path) -> RawImages:
    """Read `images` and `labels`, or where there are none `train_images` and `train_labels`, of a site's NPZ file.

    Shapes and errors are those of `read_npz`; the classes are "0".."K-1" with K from the labels.
    """
    with _opened(path) as archive:
        prefix = "" if "images.npy" in archive.namelist() or "train_images.npy" not in archive.namelist() else "train_"
    return _read_npz(path, prefix, (f"{prefix}labels",), None)


def _read_npz(path: Path, prefix: str, all_labels: Sequence[str], classes: tuple[str, ...] | None) -> RawImages:
    with _opened(path) as archive:
        images = _as_pixels(_read_member(archive, f"{prefix}images", path), path, f"{prefix}images")
        labels = _read_member(archive, f"{prefix}labels", path)
        if classes is None:
            every = [_read_member(archive, name, path) for name in all_labels]
            top = max(0, *(int(one.max()) if one.size and one.dtype.kind in "ui" else 0 for one in every))
            classes = tuple(str(i) for i in range(min(top + 1, _MAX_CLASSES)))
    return RawImages(images, _check_labels(labels, len(images), len(classes), f"{path}[{prefix}labels]"), classes)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except DataError:
        raise
    except Exception as error:  # zipfile raises whatever a strange directory of members brings about
        raise bad(path, f"is not a readable NPZ (zip) file ({error})", _GET_AGAIN) from error


def _read_member(archive: zipfile.ZipFile, key: str, path: Path) -> NDArray[Any]:
    """Read one numeric array of an NPZ file; `np.load` would allocate the claimed shape before reading any of it."""
    where = f"{path}[{key}]"
    if f"{key}.npy" not in archive.namelist():
        held = ", ".join(sorted(name.removesuffix(".npy") for name in archive.namelist())[:8]) or "nothing"
        raise bad(path, f"has no array {key!r} (it holds {held})", "use the MedMNIST layout of keys")
    if archive.getinfo(f"{key}.npy").compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # deflate makes at most a thousand bytes of one; the other methods make millions
        raise bad(where, "is compressed by another method than NumPy's", "save it with numpy.savez_compressed")
    with archive.open(f"{key}.npy") as stream:
        try:
            read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(stream)]
            shape, fortran, dtype = read_header(stream)
            if any(length < 0 for length in shape):
                raise ValueError(f"negative shape {shape}")
        except (*_BROKEN_STREAM, zipfile.BadZipFile):
            raise  # the file's fault, not the array's
        except Exception as error:  # NumPy evaluates the header as Python text, and raises whatever that brings about
            raise bad(where, f"is not a NumPy array ({error})", _GET_AGAIN) from error
        if dtype.kind not in "uif":
            raise bad(where, f"has dtype {dtype}, objects and non-numbers are refused", "save it as uint8 or integers")
        data = _read_exactly(stream, math.prod(shape) * dtype.itemsize, where)
    try:
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except (ValueError, OverflowError, TypeError) as error:  # no bytes, but a length beyond all memory in another axis
        raise bad(where, f"has the shape {shape}, which no array has", _GET_AGAIN) from error


def _as_pixels(values: NDArray[Any], path: Path, key: str) -> NDArray[np.uint8]:
    """Check that `values` are images of whole values 0..255 and return them as uint8 (N, H, W) or (N, H, W, 3)."""
    where = f"{path}[{key}]"
    if values.ndim == 4 and values.shape[3] == 1:
        values = values[..., 0]
    if values.ndim != 3 and not (values.ndim == 4 and values.shape[3] == 3):
        raise bad(where, f"has shape {values.shape}", "give (N, H, W), (N, H, W, 1) or (N, H, W, 3)")
    if 0 in values.shape:
        raise bad(where, f"has shape {values.shape}, so it holds no image", "give at least one image")
    if values.dtype != np.uint8:
        # NaN fails every comparison, so it lands here with the values out of range. Fractions are refused because
        # images scaled to 0..1 would otherwise turn black without a word.
        wrong = ~((values >= 0) & (values <= 255) & (values == np.floor(values)))
        if wrong.any():
            raise bad(where, f"has pixel value {values[wrong][0]}", "give whole values 0..255, best as uint8")
    return values.astype(np.uint8, copy=False)


def _check_labels(labels: NDArray[Any], count: int, num_classes: int, where: Path | str) -> NDArray[np.int64]:
    """Return labels as int64 (N,); DataError unless they are `count` integers in 0..num_classes-1."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "ui":
        raise bad(where, f"labels have shape {labels.shape}, dtype {labels.dtype}", "give one integer per image")
    if len(labels) != count:
        raise bad(where, f"holds {len(labels)} labels for {count} images", "use files of the same split")
    if count == 0:
        raise bad(where, "holds no record", "use a file with at least one record")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise bad(where, f"label {labels[wrong][0]} is outside 0..{num_classes - 1}", "number the classes from 0")
    return labels.astype(np.int64)
