"""What a site's file names, read: every source, the mapping of labels, and what is counted, left out or refused."""

import gzip

import numpy as np
import pytest
from PIL import Image
from test_dicom import header, save, shipped
from test_sources import idx

from fl_dpgan.data.site import missing_classes, read_site
from fl_dpgan.errors import DataError
from fl_dpgan.site_file import SiteData

CLASSES = ("normal", "pneumonia")


def png(path, value, shape=(4, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)
    return path


def read(path, source="folder", labels=None, classes=CLASSES, size=4, channels=1, **options):
    data = SiteData(source=source, path=path, cache=path.parent / "cache")
    return read_site(data, labels or {}, classes, size=size, channels=channels, **options)


def first(images):
    return images.images[:, 0, 0, 0].tolist()


def refusal(*args, **options):
    with pytest.raises(DataError) as caught:
        read(*args, **options)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)
    return str(caught.value)


def test_a_folder_for_each_label_with_images_of_every_kind(tmp_path):
    root = tmp_path / "images"
    png(root / "normal/b.PNG", 20)
    png(root / "normal/a.png", 10)
    png(root / "sick/c.jpeg", 30)
    save(root / "sick/d.dcm", header(np.full((4, 4), 40), stored=8))
    save(root / "sick/IM0001", header(np.full((4, 4), 50), stored=8))
    (root / "sick/notes.txt").write_text("no image")
    (root / "sick/README").write_text("no image")
    (root / "sick/.DS_Store").write_text("no image")
    (root / "list.csv").write_text("no image")
    images = read(root, labels={"sick": "pneumonia"})
    # in the order of names, capitals first
    assert first(images) == [10, 20, 50, 30, 40] and images.labels.tolist() == [0, 0, 1, 1, 1]
    assert images.images.dtype == np.uint8 and images.labels.dtype == np.int64 and images.patients is None
    assert images.conversions == {
        "files that are no images, left out": 3,
        "DICOM without a window: full range of its bits": 2,
    }


def test_conversions_are_counted_by_record(tmp_path):
    root = tmp_path / "images"
    png(root / "normal/a.png", 10, (4, 4, 3))
    png(root / "normal/b.png", 10, (5, 4, 3))
    Image.fromarray(np.full((4, 4), 65535, np.uint16)).save(root / "normal/c.png")
    images = read(root)
    assert images.conversions == {"colour to grey (BT.601)": 2, "resized": 1, "16-bit grey scaled by its type": 1}
    assert first(images) == [10, 10, 255]
    assert read(root, channels=3).images.shape == (3, 3, 4, 4)


def test_a_folder_in_a_labels_folder_is_refused_and_not_left_out(tmp_path):
    png(tmp_path / "images/normal/patient-1/a.png", 1)
    png(tmp_path / "images/normal/a.png", 1)
    assert "patient-1: is a folder in a label's folder" in refusal(tmp_path / "images")


@pytest.mark.parametrize("source", ["folder", "manifest", "npz", "idx"])
def test_what_is_missing_or_empty_is_named(tmp_path, source):
    assert str(tmp_path / "none") in refusal(tmp_path / "none", source)
    (tmp_path / "images/normal").mkdir(parents=True)
    assert str(tmp_path / "images") in refusal(tmp_path / "images", source)


def test_a_manifest_with_patients_frames_and_rows_for_tests(tmp_path):
    png(tmp_path / "d/a.png", 10)
    png(tmp_path / "d/test.png", 10)
    (tmp_path / "d/list.csv").write_bytes(
        b"\xef\xbb\xbfpatient;path;frame;label;split\r\n"
        b"007;a.png;;gesund;train\r\n"
        + f"7;{shipped('examples_ybr_color')};30;pneumonia;train\r\n".encode()
        + f"7;{shipped('examples_ybr_color')};1;pneumonia;train\r\n0;test.png;;unknown;test\r\n".encode()
    )
    images = read(tmp_path / "d/list.csv", "manifest", {"gesund": "normal"})
    assert images.patients == ("007", "7", "7") and images.labels.tolist() == [0, 1, 1]
    assert not np.array_equal(images.images[1], images.images[2])
    assert images.conversions["rows of split test, left out"] == 1 and images.conversions["YBR to RGB"] == 2


def test_a_manifest_of_test_rows_alone_is_refused(tmp_path):
    png(tmp_path / "d/a.png", 10)
    (tmp_path / "d/list.csv").write_text("path,label,split\na.png,normal,test\n")
    assert "only rows of split test" in refusal(tmp_path / "d/list.csv", "manifest")


def test_all_missing_files_of_a_manifest_are_counted_before_any_is_read(tmp_path):
    png(tmp_path / "d/a.png", 10)
    (tmp_path / "d/list.csv").write_text("path,label\na.png,normal\nb.png,normal\nc.png,normal\n")
    seen = []
    said = refusal(tmp_path / "d/list.csv", "manifest", on_progress=lambda *at: seen.append(at))
    assert "b.png: is not a file, nor are 1 more" in said and not seen


@pytest.mark.parametrize("prefix", ["", "train_"])
def test_an_npz_file(tmp_path, prefix):
    pixels = np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    arrays = {f"{prefix}images": pixels, f"{prefix}labels": np.array([[1], [0], [1]])}
    np.savez(tmp_path / "a.npz", **arrays, test_images=pixels, test_labels=np.array([9, 9, 9]))
    images = read(tmp_path / "a.npz", "npz", {"0": "normal", "1": "pneumonia"})
    assert first(images) == [0, 1, 2] and images.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_folder_of_idx_files_prefers_the_training_part(tmp_path, suffix):
    pack = gzip.compress if suffix else bytes
    (tmp_path / "d").mkdir()
    for number, part in enumerate(("train", "t10k")):
        pixels = np.full((2, 4, 4), number, np.uint8)
        (tmp_path / f"d/{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(pixels)))
        (tmp_path / f"d/{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(np.array([7, 8], np.uint8))))
    images = read(tmp_path / "d", "idx", {"7": "pneumonia", "8": "normal"})
    assert first(images) == [0, 0] and images.labels.tolist() == [1, 0]
    (tmp_path / f"d/train-images-idx3-ubyte{suffix}").unlink()
    (tmp_path / f"d/other-images-idx3-ubyte{suffix}").write_bytes(pack(idx(pixels)))
    assert "exactly one file *images-idx3-ubyte" in refusal(tmp_path / "d", "idx", {"7": "pneumonia", "8": "normal"})


def test_a_label_without_a_class_is_named_with_the_remedy(tmp_path):
    png(tmp_path / "images/normal/a.png", 1)
    png(tmp_path / "images/sick/a.png", 1)
    said = refusal(tmp_path / "images")
    assert "has the labels 'sick'" in said and "[labels]" in said and "'normal', 'pneumonia'" in said
    assert "'normal'," not in said.split(";")[0]


def test_a_mapping_to_a_class_that_the_federation_has_not_is_refused(tmp_path):
    png(tmp_path / "images/normal/a.png", 1)
    assert "maps to 'Normal'" in refusal(tmp_path / "images", labels={"unused": "Normal"})


def test_a_mapping_goes_before_a_class_of_the_same_name(tmp_path):
    png(tmp_path / "images/normal/a.png", 1)
    assert read(tmp_path / "images", labels={"normal": "pneumonia"}).labels.tolist() == [1]


def test_missing_classes_are_reported_and_do_not_stop_the_reading(tmp_path):
    png(tmp_path / "images/normal/a.png", 1)
    (tmp_path / "images/pneumonia").mkdir()
    assert missing_classes(read(tmp_path / "images"), CLASSES) == ["pneumonia"]
    png(tmp_path / "images/pneumonia/a.png", 1)
    assert missing_classes(read(tmp_path / "images"), CLASSES) == []


def test_an_unreadable_image_is_named_and_no_patient_is(tmp_path):
    png(tmp_path / "d/a.png", 1)
    (tmp_path / "d/b.png").write_bytes(b"no image")
    (tmp_path / "d/list.csv").write_text("path,label,patient\na.png,normal,secret-1\nb.png,normal,secret-2\n")
    said = refusal(tmp_path / "d/list.csv", "manifest")
    assert "b.png: is not a readable image" in said and "secret" not in said


def test_invariant_7_a_record_does_not_change_another_and_equal_records_stay(tmp_path):
    for name in ("a", "b"):
        png(tmp_path / f"images/normal/{name}.png", 77)
    Image.fromarray(np.array([[100, 200]], np.uint16)).save(tmp_path / "images/normal/c.png")
    alone = read(tmp_path / "images").images[2].copy()
    Image.fromarray(np.array([[0, 65535]], np.uint16)).save(tmp_path / "images/normal/d.png")
    images = read(tmp_path / "images")
    assert np.array_equal(images.images[2], alone) and first(images)[:2] == [77, 77] and len(images.labels) == 4


def test_progress_counts_to_the_number_of_records_whether_read_or_cached(tmp_path):
    for number in range(20):
        png(tmp_path / f"images/normal/{number:02}.png", number)
    fresh, again = [], []
    assert first(read(tmp_path / "images", on_progress=lambda *at: fresh.append(at))) == list(range(20))
    assert fresh[:20] == [(done, 20) for done in range(1, 21)]
    read(tmp_path / "images", on_progress=lambda *at: again.append(at))
    assert again == [(20, 20)]
