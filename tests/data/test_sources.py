"""Checks the image sources against files written here byte by byte and against official facts of the data sets."""

from __future__ import annotations

import gzip
import io
import os
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_dpgan.data import SOURCES, ImageData, load, to_tensor
from fl_dpgan.errors import ConfigError, DataError

RNG = np.random.default_rng(7)
PIXELS = RNG.integers(0, 256, (6, 4, 4), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 9], np.uint8)


def idx(array: np.ndarray, magic: int | None = None, shape: tuple[int, ...] | None = None) -> bytes:
    """Encode an IDX file as its specification says: magic, big-endian dimensions, bytes."""
    dims = array.shape if shape is None else shape
    return struct.pack(f">{1 + len(dims)}I", magic or 0x0800 + len(dims), *dims) + array.tobytes()


def write_mnist(folder: Path, images: bytes | None = None, labels: bytes | None = None, suffix: str = "") -> Path:
    """Write the official train pair into `folder`, gzipped for the suffix ".gz"."""
    folder.mkdir(parents=True, exist_ok=True)
    pack: Callable[[bytes], bytes] = gzip.compress if suffix == ".gz" else bytes
    (folder / f"train-images-idx3-ubyte{suffix}").write_bytes(pack(idx(PIXELS) if images is None else images))
    (folder / f"train-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(LABELS) if labels is None else labels))
    return folder


def write_npz(path: Path, **changes: Any) -> Path:
    """Write a MedMNIST-style file of 6 train and 2 test records; `changes` replace arrays, None removes one."""
    arrays: dict[str, Any] = {
        "train_images": PIXELS,
        "train_labels": np.array([[0], [1], [0], [1], [0], [1]], np.uint8),
        "test_images": PIXELS[:2],
        "test_labels": np.array([[1], [0]], np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def write_folder(root: Path) -> Path:
    """Write two classes of PNG images under train and test."""
    for split, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(("benign", "malignant")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(PIXELS[2 * label + i]).save(root / split / name / f"{i}.png")
    return root


def train(source: str, data_dir: Path | None, size: int = 4, channels: int = 1, **options: Any) -> ImageData:
    return load(source, split="train", size=size, channels=channels, data_dir=data_dir, **options)


def test_digits_split_is_fixed_stratified_and_complete() -> None:
    from sklearn.datasets import load_digits

    parts = [load("digits", split=split, size=8, channels=1) for split in ("train", "test")]
    assert [len(part) for part in parts] == [1437, 360]
    assert parts[0].images.shape == (1437, 1, 8, 8) and parts[0].images.dtype == np.uint8
    assert parts[0].labels.dtype == np.int64 and parts[0].classes == tuple("0123456789")
    digits = load_digits()
    expected = sorted(np.rint(digits.images.reshape(1797, 64) * 255 / 16 + 1e-9).astype(int).tolist())
    assert sorted(np.concatenate([part.images.reshape(-1, 64) for part in parts]).tolist()) == expected
    counts = [np.bincount(part.labels) for part in parts]
    assert np.array_equal(sum(counts), np.bincount(digits.target))
    assert np.abs(counts[1] - np.bincount(digits.target) * 360 / 1797).max() < 1
    assert np.array_equal(load("digits", split="test", size=8, channels=1).images, parts[1].images)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_mnist_places(tmp_path: Path, place: str, suffix: str) -> None:
    write_mnist(tmp_path / place, suffix=suffix)
    data = train("mnist", tmp_path)
    assert np.array_equal(data.images[:, 0], PIXELS)
    assert np.array_equal(data.labels, LABELS) and data.labels.dtype == np.int64


def test_mnist_and_fashion_side_by_side(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    write_mnist(tmp_path / "FashionMNIST/raw", images=idx(255 - PIXELS))
    assert np.array_equal(train("fashion-mnist", tmp_path).images, 255 - train("mnist", tmp_path).images)
    assert train("fashion-mnist", tmp_path).classes[9] == "Ankle boot"


@pytest.mark.parametrize("place", ["", "MedMNIST"])
def test_medmnist_places(tmp_path: Path, place: str) -> None:
    write_npz(tmp_path / place / "pneumoniamnist.npz")
    data = train("pneumoniamnist", tmp_path)
    assert np.array_equal(data.images[:, 0], PIXELS)
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1] and data.classes == ("normal", "pneumonia")


def test_npz_classes_agree_between_splits(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz", test_labels=np.array([4, 0]), train_images=np.asfortranarray(PIXELS * 1.0))
    parts = [load("npz", split=split, size=4, channels=1, data_dir=path) for split in ("train", "test")]
    assert parts[0].classes == parts[1].classes == ("0", "1", "2", "3", "4")
    assert np.array_equal(parts[0].images[:, 0], PIXELS)


def test_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    (root / "train/benign/notes.txt").write_text("not an image")
    Image.fromarray(np.full((9, 5, 3), 200, np.uint8)).save(root / "train/malignant/z.JPG")
    data = train("folder", root)
    assert data.classes == ("benign", "malignant") and data.labels.tolist() == [0, 0, 1, 1, 1]
    assert np.array_equal(data.images[:4, 0], PIXELS[:4])
    assert np.abs(data.images[4].astype(int) - 200).max() <= 1


def test_grey_and_colour_rules(tmp_path: Path) -> None:
    colour = RNG.integers(0, 256, (6, 4, 4, 3), np.uint8)
    path = write_npz(tmp_path / "own.npz", train_images=colour)
    assert np.array_equal(train("npz", path, channels=3).images, colour.transpose(0, 3, 1, 2))
    luminance = colour @ np.array([0.299, 0.587, 0.114])
    assert np.abs(train("npz", path).images[:, 0] - luminance).max() <= 0.5 + 1e-9
    grey = train("npz", write_npz(tmp_path / "grey.npz"), channels=3).images
    assert np.array_equal(grey, np.repeat(PIXELS[:, None], 3, axis=1))


def test_resize_is_bilinear_and_antialiased(tmp_path: Path) -> None:
    import torch

    images = RNG.integers(0, 256, (6, 12, 10), np.uint8)
    path = write_npz(tmp_path / "own.npz", train_images=images)
    for size in (5, 16):
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(images[:, None].astype(np.float32)), (size, size), mode="bilinear", antialias=True
        )
        # Pillow rounds after each of its two passes.
        assert np.abs(train("npz", path, size=size).images - expected.numpy()).max() <= 1.1


def test_each_record_is_processed_alone(tmp_path: Path) -> None:
    whole = train("npz", write_npz(tmp_path / "a.npz"), size=7)
    changed = PIXELS.copy()
    changed[1:] = 255
    assert np.array_equal(
        train("npz", write_npz(tmp_path / "b.npz", train_images=changed), size=7).images[0], whole.images[0]
    )


def test_to_tensor_range() -> None:
    import torch

    tensor = to_tensor(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16))
    assert tensor.dtype == torch.float32 and tensor.shape == (1, 1, 16, 16)
    assert np.allclose(tensor.numpy().ravel(), np.linspace(-1, 1, 256), atol=1e-6)
    assert tensor.min() == -1 and tensor.max() == 1


def test_subset() -> None:
    data = ImageData(PIXELS[:, None], LABELS.astype(np.int64), tuple("0123456789"))
    part = data.subset([5, 0])
    assert len(part) == 2 and part.labels.tolist() == [9, 0] and part.classes == data.classes
    assert np.array_equal(part.images, PIXELS[[5, 0], None])
    assert len(data.subset([])) == 0
    for index in (6, -1):
        with pytest.raises(DataError, match=rf"index {index} is outside 0\.\.5"):
            data.subset([index])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"source": "cifar"}, "'cifar' is unknown; use one of digits, mnist"),
        ({"split": "val"}, "split 'val' is unknown"),
        ({"size": 0}, "size 0"),
        ({"channels": 2}, "2 channels"),
    ],
)
def test_bad_settings(options: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"source": "digits", "split": "train", "size": 8, "channels": 1} | options
    with pytest.raises(ConfigError, match=says):
        load(arguments.pop("source"), **arguments)


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "digits"])
def test_missing_data_dir(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match="needs data_dir"):
        train(source, None)
    with pytest.raises(DataError, match=r"nowhere.* is not an existing"):
        train(source, tmp_path / "nowhere")


@pytest.mark.parametrize("source", ["mnist", "fashion-mnist", "retinamnist"])
def test_missing_file(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=r"was not found in .*; copy it there"):
        train(source, tmp_path)


HUGE = idx(PIXELS, shape=(2**32 - 1, 2**31, 2**31))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"images": idx(LABELS)}, r"train-images.*magic is 0x00000801, expected 0x00000803"),
        ({"labels": idx(PIXELS)}, r"train-labels.*magic is 0x00000803, expected 0x00000801"),
        ({"images": b""}, "magic is 0x00000000"),
        ({"images": idx(PIXELS)[:10]}, "header ends after 10 bytes"),
        ({"images": HUGE}, f"claims {(2**32 - 1) * 2**62} bytes of data, the file holds 96"),
        ({"images": idx(PIXELS)[:-1]}, "claims 96 bytes of data, the file holds 95"),
        ({"images": idx(PIXELS) + b"x"}, "holds more than the 96 bytes"),
        ({"images": idx(PIXELS[:5])}, "holds 6 labels for 5 images"),
        ({"labels": idx(LABELS + 1)}, r"label 10 is outside 0\.\.9"),
        ({"images": idx(PIXELS[:0]), "labels": idx(LABELS[:0])}, "holds no record"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_idx(tmp_path: Path, files: dict[str, bytes], says: str, suffix: str) -> None:
    check_error("mnist", write_mnist(tmp_path, suffix=suffix, **files), says)


def check_error(source: str, data_dir: Path, says: str) -> None:
    """Check that loading fails with a DataError of one line that names the place and ends in a remedy."""
    with pytest.raises(DataError, match=says) as caught:
        train(source, data_dir)
    assert str(data_dir) in str(caught.value)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_claimed_size_is_not_allocated(tmp_path: Path) -> None:
    write_mnist(tmp_path, images=idx(PIXELS, shape=(2**20, 32, 32)))
    tracemalloc.start()
    check_error("mnist", tmp_path, "claims 1073741824 bytes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    "content",
    [b"not gzip at all", gzip.compress(idx(PIXELS))[:-20], gzip.compress(b"")[:10] + b"\xff" * 40],
    ids=["another format", "cut short", "no stream"],  # a stream holds the time, which two processes do not share
)
def test_corrupt_gzip(tmp_path: Path, content: bytes) -> None:
    write_mnist(tmp_path, suffix=".gz")
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    check_error("mnist", tmp_path, r"train-images-idx3-ubyte\.gz: cannot be read")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_images": None}, "has no array 'train_images'"),
        ({"train_labels": None}, "has no array 'train_labels'"),
        ({"train_images": np.array([{}] * 6, object)}, "dtype object"),
        ({"train_labels": np.array(["a"] * 6)}, "dtype <U1"),
        ({"train_images": np.where(PIXELS[0, 0, 0] == PIXELS, np.nan, PIXELS)}, "pixel value nan"),
        ({"train_images": PIXELS / 255.0}, r"pixel value 0\.\d+"),
        ({"train_images": PIXELS * 1.0 + 256}, r"pixel value \d{3}\.0"),
        ({"train_images": np.full((6, 4, 4), -1)}, "pixel value -1"),
        ({"train_images": np.full((6, 4, 4), np.inf)}, "pixel value inf"),
        ({"train_images": np.zeros((6, 4, 4, 4), np.uint8)}, r"has shape \(6, 4, 4, 4\)"),
        ({"train_images": np.zeros((6, 0, 4), np.uint8)}, "holds no image"),
        ({"train_images": PIXELS[:5]}, "holds 6 labels for 5 images"),
        ({"train_labels": np.zeros((6, 2), int)}, r"labels have shape \(6, 2\)"),
        ({"train_labels": np.zeros(6)}, "dtype float64"),
        ({"train_labels": np.array([0, 0, 0, 0, 0, -1])}, r"label -1 is outside 0\.\.1"),
        ({"train_labels": np.array([0, 0, 0, 0, 0, 10**12])}, r"label 1000000000000 is outside 0\.\.999"),
    ],
)
def test_bad_npz(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    check_error("npz", write_npz(tmp_path / "own.npz", **changes), says)


def test_medmnist_label_outside_its_classes(tmp_path: Path) -> None:
    write_npz(tmp_path / "breastmnist.npz", train_labels=np.array([0, 1, 2, 0, 0, 0]))
    check_error("breastmnist", tmp_path, r"label 2 is outside 0\.\.1")


def npy_with_shape(shape: str) -> bytes:
    """Encode a version 1.0 NPY file whose header claims `shape` over 96 bytes of data."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + PIXELS.tobytes()


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (npy_with_shape("(1099511627776, 4, 4)"), "claims 17592186044416 bytes of data, the file holds 96"),
        (npy_with_shape("(-6, -4, 4)"), "negative shape"),
        (b"garbage", "is not a NumPy array"),
        (b"\x93NUMPY\x09\x00" + bytes(80), "is not a NumPy array"),
    ],
)
def test_bad_npz_member(tmp_path: Path, member: bytes, says: str) -> None:
    path = write_npz(tmp_path / "own.npz", train_images=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("train_images.npy", member)
    check_error("npz", path, says)


def test_npz_that_is_no_zip_or_damaged(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    content = bytearray(path.read_bytes())
    start = content.index(PIXELS.tobytes())
    content[start] ^= 0xFF  # the check sum in the zip no longer fits
    npy = io.BytesIO()
    np.save(npy, PIXELS)
    for broken in (b"plain text", npy.getvalue(), bytes(content), path.read_bytes()[:-30]):
        path.write_bytes(broken)
        check_error("npz", path, r"own\.npz: is not a readable NPZ")


def remove(path: Path) -> None:
    for child in path.iterdir():
        remove(child) if child.is_dir() else child.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda root: remove(root / "train"), "train: the folder is missing"),
        (lambda root: [remove(root / "train" / name) for name in ("benign", "malignant")], "holds no class folder"),
        (lambda root: [p.unlink() for p in (root / "train/benign").iterdir()], "benign: the class folder holds no PNG"),
        (lambda root: (root / "train/benign/0.png").write_bytes(b"no png"), r"0\.png: is not a readable image"),
        (
            lambda root: (root / "train/benign/0.png").write_bytes((root / "train/benign/1.png").read_bytes()[:50]),
            r"0\.png: is not a readable image",
        ),
    ],
)
def test_bad_folder(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(write_folder(tmp_path))
    check_error("folder", tmp_path, says)


def test_a_16_bit_image_is_scaled_by_its_type(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "train/benign/0.png")
    assert (train("folder", tmp_path).images[0] == round(4000 * 255 / 65535)).all()


def test_folder_classes_differ_between_splits(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "test/other").mkdir()
    with pytest.raises(DataError, match="other: is a class that the train folder lacks"):
        load("folder", split="test", size=4, channels=1, data_dir=tmp_path)
    (tmp_path / "test/other").rmdir()
    remove(tmp_path / "test/benign")
    with pytest.raises(DataError, match="benign: the class folder is missing"):
        load("folder", split="test", size=4, channels=1, data_dir=tmp_path)


def test_unreadable_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    write_folder(tmp_path)
    monkeypatch.setattr(Path, "iterdir", deny)
    check_error("folder", tmp_path, "cannot be read .*Permission denied")


def test_download_fetches_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    calls: list[dict[str, Any]] = []

    def fake(**options: Any) -> None:
        calls.append(options)
        write_mnist(Path(options["root"]) / "MNIST/raw")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    for _ in range(2):
        assert len(train("mnist", tmp_path / "new", download=True)) == 6
    assert calls == [{"root": str(tmp_path / "new"), "download": True, "train": True}]


def test_download_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def fail(**options: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", fail)
    with pytest.raises(DataError, match=r"download of FashionMNIST failed \(no route to host\)"):
        train("fashion-mnist", tmp_path, download=True)


def test_download_without_medmnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(DataError, match="pip install medmnist"):
        train("breastmnist", tmp_path, download=True)


@pytest.fixture
def official() -> Path:
    folder = os.environ.get("FL_DPGAN_DATA")
    if not folder:
        pytest.skip("FL_DPGAN_DATA is not set to a folder with the official data sets")
    return Path(folder)


def test_official_mnist(official: Path) -> None:
    data = train("mnist", official, size=28)
    assert len(data) == 60000 and data.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    # The published mean of the MNIST training pixels.
    assert data.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert len(load("mnist", split="test", size=28, channels=1, data_dir=official)) == 10000


def test_official_fashion_mnist(official: Path) -> None:
    data = train("fashion-mnist", official, size=28)
    assert np.bincount(data.labels).tolist() == [6000] * 10
    assert data.classes[data.labels[0]] == "Ankle boot"


def test_official_medmnist(official: Path) -> None:
    data = train("pneumoniamnist", official, size=28)
    assert np.bincount(data.labels).tolist() == [1214, 3494]
    assert len(load("pneumoniamnist", split="test", size=28, channels=1, data_dir=official)) == 624
    assert len(train("breastmnist", official, size=28)) == 546
    retina = train("retinamnist", official, size=32, channels=3)
    assert retina.images.shape == (1080, 3, 32, 32) and len(retina.classes) == 5
