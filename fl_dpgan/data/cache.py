"""A site's images once read, in a folder that only one user can enter; whole or not there at all."""

import fcntl
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fl_dpgan.data.formats import bad
from fl_dpgan.files import sync


@dataclass(frozen=True)
class SiteImages:
    """A site's records, ready for training. What this says stays at the site.

    Attributes:
        images: uint8 (N, channels, size, size), 0 to 255, read-only and mapped into memory from the cache.
        labels: int64 (N,), numbers of the federation's classes.
        patients: each record's patient id (N,), where the source has them.
        conversions: how many records each conversion changed, or what was left out how often.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    patients: tuple[str, ...] | None
    conversions: dict[str, int]


#: The name of an entry: its fingerprint, a SHA-256.
_ENTRY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Unread:
    """What a cache is filled with: `rows` gives an image (channels, size, size) for each label.

    `conversions` is complete when `rows` is at its end.
    """

    rows: Iterator[NDArray[np.uint8]]
    shape: tuple[int, int, int]
    labels: NDArray[np.int64]
    patients: tuple[str, ...] | None
    conversions: dict[str, int]


def cached(folder: Path, fingerprint: str, read: Callable[[], Unread]) -> SiteImages:
    """The records of this fingerprint: from the folder where they are whole there, else read, and put there.

    What is stale goes once its successor is whole. Of two processes one waits for the other.

    Raises:
        DataError: the folder is another user's, open to others, cannot be written or is full; or `read` raises it.
    """
    _make_private(folder)
    place = folder / fingerprint
    with _lock(folder):
        images = _load(place)
        if images is None:
            _fill(folder, place, read())
            images = _load(place)
        if images is None:
            raise bad(place, "reads otherwise than it was written", "check the disk")
        for path in folder.iterdir():  # of what else lies there nothing is known: it stays
            if path != place and _ENTRY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
    return images


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise bad(folder, f"cannot be the cache ({error.strerror})", "set data.cache to a folder to write to") from None
    if state.st_uid != os.geteuid():
        raise bad(folder, "belongs to another user", "run this as the user that owns the cache, or set data.cache")
    if state.st_mode & 0o077:
        raise bad(folder, "is open to other users of this machine", f"chmod 700 {folder}")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder; the operating system lets go where this process dies."""
    with open(folder / "lock", "ab", opener=_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _fill(folder: Path, place: Path, unread: Unread) -> None:
    partial = folder / "partial"
    for path in (partial, place):  # what a killed process left, or what is damaged
        shutil.rmtree(path, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        with open(partial / "images.npy", "xb", opener=_private) as file:
            check = _write_images(file, unread)
        about = {
            "shape": [len(unread.labels), *unread.shape],
            "check": check,
            "labels": unread.labels.tolist(),
            "patients": unread.patients,
            "conversions": unread.conversions,
        }
        with open(partial / "records.json", "xb", opener=_private) as file:
            content = json.dumps(about).encode()
            file.write(b"%08x\n" % zlib.crc32(content) + content)
            file.flush()
            os.fsync(file.fileno())
        sync(partial)
        partial.rename(place)
        sync(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        need = len(unread.labels) * int(np.prod(unread.shape)) / 1e6
        raise bad(folder, f"cannot be written ({error.strerror})", f"it takes {need:.0f} MB: free some") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_images(file: IO[bytes], unread: Unread) -> int:
    """Write all images and return their CRC-32."""
    head = _header((len(unread.labels), *unread.shape))
    # claims the room first: a full disk shows at once, not after an hour of decoding
    os.posix_fallocate(file.fileno(), 0, len(head) + len(unread.labels) * int(np.prod(unread.shape)))
    file.write(head)
    check = 0
    for row in unread.rows:
        content = row.tobytes()
        check = zlib.crc32(content, check)
        file.write(content)
    file.flush()
    os.fsync(file.fileno())
    return check


def _load(place: Path) -> SiteImages | None:
    """What was written there; None where it is not there, or not whole."""
    try:
        check, _, content = (place / "records.json").read_bytes().partition(b"\n")
        if check != b"%08x" % zlib.crc32(content):
            return None
        about = json.loads(content)
        shape = tuple(about["shape"])
        head, path = _header(shape), place / "images.npy"
        with path.open("rb") as file:
            if file.read(len(head)) != head or path.stat().st_size != len(head) + int(np.prod(shape)):
                return None
        images = np.memmap(path, np.uint8, "c", len(head), shape)
        labels, patients = np.array(about["labels"], np.int64), about["patients"]
        whole = zlib.crc32(images.data) == about["check"] and labels.shape == shape[:1]
        if not whole or (patients is not None and len(patients) != len(labels)):
            return None
        return SiteImages(images, labels, None if patients is None else tuple(patients), dict(about["conversions"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
