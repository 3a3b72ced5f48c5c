"""Reads a CSV manifest of images: a row per image with its path, label and, where there are any, patient and split.

It is UTF-8, with or without a byte-order mark; commas, semicolons or tabs part its cells (its first line decides), and
lines end as on any system. Cells are text: leading zeros count. No error quotes a patient's id.
"""

import csv
import os
from collections import Counter
from pathlib import Path

import numpy as np

from fl_dpgan.data.formats import RawImages, bad
from fl_dpgan.data.pictures import read_pictures

_REQUIRED = {"path", "label"}
_KNOWN = _REQUIRED | {"patient", "frame", "split"}
_COLUMNS = "name the columns path, label and, if wanted, patient, frame and split in the first line"
Row = dict[str, str]


def read_manifest(path: Path, split: str) -> RawImages:
    """Read the rows of one split; the classes are the sorted labels of the training rows.

    Args:
        path: a CSV file; relative paths in it start from its folder and stay inside. Rows without a `split` column are
            all training rows. `frame` is which frame of a DICOM file, from 1.

    Raises:
        DataError: the file is missing or not CSV, a column is missing or unknown, a cell is empty, an image is listed
            twice, a label occurs in the test rows alone, or there is no row of the split.
    """
    rows = read_rows(path)
    named = sorted({row["label"] for row in rows if row.get("split", "train") == "train"})
    chosen = [row for row in rows if row.get("split", "train") == split]
    if not chosen:
        raise bad(path, f"has no row of split {split!r}", "add a column split with train and test")
    if unknown := sorted({row["label"] for row in chosen} - set(named)):
        raise bad(path, f"label {unknown[0]!r} has no training row", "add one or remove the label")
    labels = np.array([named.index(row["label"]) for row in chosen], np.int64)
    return RawImages(read_pictures(image_of(path, row) for row in chosen), labels, tuple(named), patients_of(chosen))


def patients_of(rows: list[Row]) -> tuple[str, ...] | None:
    """Each row's patient id, where there is such a column; an empty one is for the privacy unit to refuse."""
    return tuple(row["patient"] for row in rows) if "patient" in rows[0] else None


def image_of(manifest: Path, row: Row) -> tuple[Path, int | None]:
    """A row's file, and its frame where one is named."""
    return Path(os.path.normpath(manifest.parent / row["path"])), int(row["frame"]) if row.get("frame") else None


def read_rows(path: Path) -> list[Row]:
    """Read and check the rows of a manifest; DataError as for `read_manifest`."""
    if not path.is_file():
        raise bad(path, "the manifest is missing", "put it there, a CSV file with a row per image")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, strict=True, delimiter=max(",;\t", key=first.count))
            names = list(reader.fieldnames or [])
            if len(set(names)) != len(names) or not _REQUIRED <= set(names) <= _KNOWN:
                raise bad(path, _named(names), _COLUMNS)
            rows = [_row(path, reader.line_num, row) for row in reader]
    except OSError as error:
        raise bad(path, f"cannot be read ({error.strerror})", "check who may read it") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise bad(path, f"is not a CSV file in UTF-8 ({error})", "save it as UTF-8 with commas") from error
    if not rows:
        raise bad(path, "has no row", "add a row per image")
    # "a.png" and "./a.png" are one image, and so is the first frame of a file that has one
    images = [(file, frame or 1) for file, frame in (image_of(path, row) for row in rows)]
    if len(set(images)) != len(images):
        twice = Counter(images).most_common(1)[0][0][0]
        raise bad(path, f"lists {twice} more than once", "an image is one record: remove the repetition")
    return rows


def _named(names: list[str]) -> str:
    """Which columns the first line names. What is no column's name may be a record's cell, and is not quoted."""
    known = [name for name in names if name in _KNOWN]
    if names and not _REQUIRED & set(known):
        return "names no columns"
    others = f", and {len(names) - len(known)} other" if len(names) > len(known) else ""
    return f"has the columns {', '.join(known) or 'none'}{others}"


def _row(path: Path, number: int, row: dict[str, str]) -> Row:
    if None in row or None in row.values():
        raise bad(path, f"line {number} has another number of cells than there are columns", "mend the line")
    clean = {key: value.strip() for key, value in row.items()}
    if empty := [key for key, value in clean.items() if not value and key not in ("patient", "frame")]:
        raise bad(path, f"line {number} has no {empty[0]}", "fill the cell")
    if clean.get("split", "train") not in ("train", "test"):
        raise bad(path, f"line {number} has a split that is neither train nor test", "write one of these")
    frame = clean.get("frame") or "1"
    if not (frame.isascii() and frame.isdigit() and int(frame[:9]) > 0 and len(frame) < 9):
        raise bad(path, f"line {number} has a frame that is not a number from 1", "mend the cell, or leave it empty")
    if not os.path.isabs(clean["path"]) and _leaves(path.parent, clean["path"]):
        raise bad(path, f"line {number} has a path that leaves the manifest's folder", "write it as an absolute path")
    return clean


def _leaves(folder: Path, path: str) -> bool:
    """Whether a relative path leads out of the folder, by itself or through a link."""
    if os.path.normpath(path).split(os.sep)[0] == os.pardir:
        return True
    try:
        found, home = os.path.realpath(folder / path), os.path.realpath(folder)
    except ValueError:  # a name with a NUL, which no file has
        return False
    return os.path.commonpath([found, home]) != home
