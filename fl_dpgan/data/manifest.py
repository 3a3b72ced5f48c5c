"""Reads a CSV manifest of images: a row per image with its path, label and, where there are any, patient and split."""

import csv
import os
from collections import Counter
from pathlib import Path

import numpy as np

from fl_dpgan.data.formats import RawImages, bad, decode_all

_REQUIRED = {"path", "label"}
_KNOWN = _REQUIRED | {"patient", "split"}
_COLUMNS = "name the columns path, label and, if wanted, patient and split"


def read_manifest(path: Path, split: str) -> RawImages:
    """Read the rows of one split; the classes are the sorted labels of the training rows.

    Args:
        path: a CSV file in UTF-8, with or without a byte-order mark; paths in it start from its folder. Rows without a
            `split` column are all training rows. Patient ids are text: leading zeros count.

    Raises:
        DataError: the file is missing or not CSV, a column is missing or unknown, a cell is empty, an image is listed
            twice, a label occurs in the test rows alone, or there is no row of the split.
    """
    rows = _rows(path)
    named = sorted({row["label"] for row in rows if row.get("split", "train") == "train"})
    chosen = [row for row in rows if row.get("split", "train") == split]
    if not chosen:
        raise bad(path, f"has no row of split {split!r}", "add a column split with train and test")
    if unknown := sorted({row["label"] for row in chosen} - set(named)):
        raise bad(path, f"label {unknown[0]!r} has no training row", "add one or remove the label")
    labels = np.array([named.index(row["label"]) for row in chosen], np.int64)
    files = [path.parent / row["path"] for row in chosen]
    patients = tuple(row["patient"] for row in chosen) if "patient" in rows[0] else None
    return RawImages(decode_all(files), labels, tuple(named), patients)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise bad(path, "the manifest is missing", "put manifest.csv into the data folder")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if len(set(names)) != len(names) or not _REQUIRED <= set(names) <= _KNOWN:
                raise bad(path, f"has the columns {', '.join(names) or 'none'}", _COLUMNS)
            rows = [_row(path, reader.line_num, row) for row in reader]
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise bad(path, f"is not a CSV file in UTF-8 ({error})", "save it as UTF-8 with commas") from error
    if not rows:
        raise bad(path, "has no row", "add a row per image")
    paths = [os.path.normpath(path.parent / row["path"]) for row in rows]  # "a.png" and "./a.png" are one image
    if len(set(paths)) != len(paths):
        twice = Counter(paths).most_common(1)[0][0]
        raise bad(path, f"lists {twice} more than once", "an image is one record: remove the repetition")
    return rows


def _row(path: Path, number: int, row: dict[str, str]) -> dict[str, str]:
    if None in row or None in row.values():
        raise bad(path, f"line {number} has another number of cells than there are columns", "mend the line")
    clean = {key: value.strip() for key, value in row.items()}
    if empty := [key for key, value in clean.items() if not value and key != "patient"]:
        raise bad(path, f"line {number} has no {empty[0]}", "fill the cell")
    if clean.get("split", "train") not in ("train", "test"):
        raise bad(path, f"line {number} has split {clean['split']!r}", "write train or test")
    return clean
