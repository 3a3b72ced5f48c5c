"""Folders of images, one for each class."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fl_dpgan.data.dicom import is_dicom
from fl_dpgan.data.formats import RawImages, bad
from fl_dpgan.data.pictures import read_pictures
from fl_dpgan.data.pixels import is_image_name
from fl_dpgan.errors import DataError

OTHER_FILES = "files that are no images, left out"


def read_folder(root: Path, split: str) -> RawImages:
    """List `root/split/class_name/*.png|jpg|jpeg`; the classes are the sorted folder names of `root/train`.

    Images are decoded one at a time as they are iterated, so that large originals are never all in memory.
    Raises DataError for a missing or empty folder, a class that the train folder lacks, or an unreadable image.
    """
    classes = _class_folders(root / "train")
    if extra := sorted(set(_class_folders(root / split)) - set(classes)):
        raise bad(root / split / extra[0], "is a class that the train folder lacks", "add it there or remove it")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = root / split / name
        if not folder.is_dir():
            raise bad(folder, "the class folder is missing", "create it with at least one PNG or JPEG image")
        found = sorted(path for path in folder.iterdir() if is_image_name(path))
        if not found:
            raise bad(folder, "the class folder holds no PNG or JPEG image", "add images or remove the class")
        files += found
        labels += [label] * len(found)
    return RawImages(read_pictures((path, None) for path in files), np.array(labels, np.int64), classes)


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders in `folder`."""
    if not folder.is_dir():
        raise bad(folder, "the folder is missing", "lay the images out as train/CLASS/*.png and test/CLASS/*.png")
    names = tuple(sorted(path.name for path in _visible(folder) if path.is_dir()))
    if not names:
        raise bad(folder, "holds no class folder", "lay the images out as train/CLASS/*.png and test/CLASS/*.png")
    return names


def list_site_folder(root: Path) -> tuple[list[tuple[Path, str]], Counter[str]]:
    """List a site's images `root/LABEL/*` in a fixed order, each with its label, and count what is left out.

    Images are .png, .jpg, .jpeg and .dcm files, and files without a suffix that begin as DICOM does. Hidden files and
    folders (.DS_Store) do not count.

    Raises:
        DataError: the folder is missing or holds no image, or a label's folder holds a folder: nothing is left out
            that may hold images.
    """
    if not root.is_dir():
        raise _unreadable(root)
    found: list[tuple[Path, str]] = []
    left_out: Counter[str] = Counter()
    for folder in _visible(root):
        if not folder.is_dir():
            left_out[OTHER_FILES] += 1
            continue
        for path in _visible(folder):
            if path.is_dir():
                raise bad(
                    path, "is a folder in a label's folder", "put the images into LABEL itself, or use a manifest"
                )
            if is_image_name(path) or path.suffix.lower() == ".dcm" or (not path.suffix and is_dicom(path)):
                found.append((path, folder.name))
            else:
                left_out[OTHER_FILES] += 1
    if not found:
        raise bad(root, "holds no image", "lay them out as LABEL/*.png, .jpg or .dcm")
    return found, left_out


def _visible(folder: Path) -> Iterator[Path]:
    return iter(sorted(path for path in folder.iterdir() if not path.name.startswith(".")))


def _unreadable(root: Path) -> DataError:
    return bad(root, "is not an existing folder", "set data.path to the folder that holds a folder for each label")
