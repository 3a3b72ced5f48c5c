"""One image of a PNG, JPEG or DICOM file."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.dicom import is_dicom, read_dicom
from fl_dpgan.data.formats import bad
from fl_dpgan.data.pixels import Picture, read_image
from fl_dpgan.data.quiet import quiet


def read_picture(path: Path, frame: int | None = None) -> Picture:
    """Read an image as uint8 (H, W) or (H, W, 3), and name the conversions that it took.

    A file is DICOM where its content or its name (.dcm) says so.

    Args:
        path: the file.
        frame: which frame of a DICOM file, from 1; other files have one image.

    Raises:
        ConfigError: the file is DICOM, and pydicom is not installed.
        DataError: the file is missing, damaged or of a kind that is not read, or has no such frame.
    """
    with quiet():
        if is_dicom(path) or path.suffix.lower() == ".dcm":
            return read_dicom(path, frame)
        if frame not in (None, 1):
            raise bad(path, f"has no frame {frame}", "leave the column frame empty for PNG and JPEG files")
        return read_image(path)


def read_pictures(files: Iterable[tuple[Path, int | None]]) -> Iterator[NDArray[np.uint8]]:
    """Read the images of files and frames one at a time, so that large originals are never all in memory."""
    for path, frame in files:
        yield read_picture(path, frame)[0]
