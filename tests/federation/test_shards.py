"""A simulation's records in the run's folder: what is read is what was written, shared, and gone afterwards."""

import numpy as np
import pytest

from fl_dpgan.data import ImageData
from fl_dpgan.errors import RunFolderError
from fl_dpgan.federation import shards

PARTS = [np.array([4, 0]), np.array([], dtype=np.int64), np.array([1, 3, 2])]


def data(patients=None):
    random = np.random.default_rng(0)
    return ImageData(random.integers(0, 256, (5, 1, 6, 6), np.uint8), np.arange(5) % 3, ("a", "b", "ü"), patients)


@pytest.mark.parametrize("patients", [None, ("p1", "p0", "", "p00", "p1")])
def test_each_site_reads_its_own_records_in_order(tmp_path, patients):
    images = data(patients)
    shards.write(tmp_path / "shards", images, PARTS)
    for index, part in enumerate(PARTS):
        found, expected = shards.read(tmp_path / "shards", index), images.subset(part)
        assert np.array_equal(found.images, expected.images) and np.array_equal(found.labels, expected.labels)
        assert (found.classes, found.patients) == (expected.classes, expected.patients)
        assert found.images.dtype == np.uint8 and found.labels.dtype == np.int64


def test_the_pixels_are_mapped_and_not_read(tmp_path):
    shards.write(tmp_path / "shards", data(), PARTS)
    assert isinstance(shards.read(tmp_path / "shards", 2).images.base, np.memmap)


def test_nothing_is_left_and_what_is_open_stays_readable(tmp_path):
    shards.write(tmp_path / "shards", data(), PARTS)
    found = shards.read(tmp_path / "shards", 0)
    shards.remove(tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
    assert np.array_equal(found.images, data().images[PARTS[0]])
    with pytest.raises(RunFolderError, match="holds no records"):
        shards.read(tmp_path / "shards", 0)


def test_a_file_cut_short_is_a_typed_error(tmp_path):
    shards.write(tmp_path / "shards", data(), PARTS)
    file = tmp_path / "shards" / "images.npy"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RunFolderError, match="is damaged"):
        shards.read(tmp_path / "shards", 0)


def test_a_disk_that_cannot_be_written_is_a_typed_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunFolderError, match="No space left"):
        shards.write(tmp_path / "shards", data(), PARTS)
    assert not (tmp_path / "shards").exists()
