"""The CSV manifest: what it gives, and how each fault in it is named."""

import numpy as np
import pytest
from PIL import Image

from fl_dpgan.data import load
from fl_dpgan.data.manifest import read_manifest
from fl_dpgan.errors import DataError


def images(folder, *names, mode="L"):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (28, 28), number * 10 if mode == "L" else (number * 10,) * 3).save(folder / name)


def manifest(folder, text, encoding="utf-8"):
    path = folder / "manifest.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


def loaded(folder, split="train"):
    return load("manifest", split=split, size=28, channels=1, data_dir=folder)


def test_a_manifest_gives_images_labels_and_classes_in_the_order_of_its_rows(tmp_path):
    images(tmp_path, "a.png", "sub/b.png", "c.png")
    manifest(tmp_path, "path,label\nc.png,sick\na.png,healthy\nsub/b.png,sick\n")
    data = loaded(tmp_path)
    assert data.images[:, 0, 0, 0].tolist() == [20, 0, 10]
    assert data.classes == ("healthy", "sick")
    assert data.labels.tolist() == [1, 0, 1]
    assert data.patients is None


def test_columns_may_stand_in_any_order_and_cells_may_have_blanks_around_them(tmp_path):
    images(tmp_path, "a.png", "b.png")
    manifest(tmp_path, 'label,patient,path\n x , 007 , a.png\ny,"07",b.png\n')
    data = loaded(tmp_path)
    assert data.patients == ("007", "07")
    assert data.classes == ("x", "y")


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_a_byte_order_mark_makes_no_difference(tmp_path, start):
    images(tmp_path, "a.png")
    manifest(tmp_path, f"{start}path,label\r\na.png,ü\r\n")
    assert loaded(tmp_path).classes == ("ü",)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_first_line_says_what_parts_the_cells(tmp_path, mark, end):
    images(tmp_path, "a.png", "b,;.png")
    rows = [["path", "label", "patient"], ["a.png", "x,y;z", "007"], ["b,;.png", "w", "1,5"]]
    cells = [mark.join(f'"{cell}"' if number else cell for cell in row) for number, row in enumerate(rows)]
    manifest(tmp_path, "\ufeff" + end.join(cells) + end)
    data = loaded(tmp_path)
    assert (data.classes, data.patients) == (("w", "x,y;z"), ("007", "1,5"))


def test_an_absolute_path_may_lead_anywhere(tmp_path):
    images(tmp_path, "a.png", "lists/b.png")
    manifest(tmp_path / "lists", f"path,label\n{tmp_path / 'a.png'},x\nb.png,y\n")
    assert loaded(tmp_path / "lists").images[:, 0, 0, 0].tolist() == [0, 10]


def test_the_split_column_separates_training_and_test_rows(tmp_path):
    images(tmp_path, "a.png", "b.png", "c.png")
    manifest(tmp_path, "path,label,split\na.png,x,train\nb.png,y,train\nc.png,y,test\n")
    assert loaded(tmp_path).images[:, 0, 0, 0].tolist() == [0, 10]
    test = loaded(tmp_path, "test")
    assert (test.labels.tolist(), test.classes) == ([1], ("x", "y"))
    assert test.images[0, 0, 0, 0] == 20


def test_a_missing_patient_is_kept_as_empty_for_the_unit_to_refuse(tmp_path):
    images(tmp_path, "a.png", "b.png")
    manifest(tmp_path, "path,label,patient\na.png,x,1\nb.png,x,\n")
    assert loaded(tmp_path).patients == ("1", "")


def test_a_subset_keeps_each_records_patient(tmp_path):
    images(tmp_path, "a.png", "b.png", "c.png")
    manifest(tmp_path, "path,label,patient\na.png,x,p\nb.png,x,q\nc.png,x,r\n")
    assert loaded(tmp_path).subset(np.array([2, 0])).patients == ("r", "p")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "columns none"),
        ("path,label\n", "has no row"),
        ("path,label,age\na.png,x,40\n", "columns path, label, and 1 other"),
        ("path\na.png\n", "columns path;"),
        ("path,label,label\na.png,x,y\n", "columns path, label, label"),
        ("path, label\na.png,x\n", "columns path,"),
        ("path:label\na.png:x\n", "names no columns"),
        ("a.png,x,patient-1\n", "names no columns"),
        ("path,label,frame\na.png,x,0\n", "line 2 has a frame that is not a number from 1"),
        ("path,label,frame\na.png,x,1.0\n", "line 2 has a frame that is not a number from 1"),
        ("path,label,frame\na.png,x,\u0661\n", "line 2 has a frame that is not a number from 1"),
        ("path,label,frame\na.png,x,2\n", "a.png: has no frame 2"),
        ("path,label,frame\na.png,x,1\na.png,x,1\n", "a.png more than once"),
        ("path,label,frame\na.png,x,1\na.png,x,\n", "a.png more than once"),
        ("path,label\n../a.png,x\n", "line 2 has a path that leaves the manifest's folder"),
        ("path,label\nsub/../../a.png,x\n", "line 2 has a path that leaves the manifest's folder"),
        ("path,label\n,x\n", "line 2 has no path"),
        ("path,label\na.png,x\nb.png,  \n", "line 3 has no label"),
        ("path,label\n\n\na.png,\n", "line 4 has no label"),
        ("path,label,split\na.png,x,\n", "line 2 has no split"),
        ("path,label,split\na.png,x,val\n", "line 2 has a split that is neither"),
        ("path,label\na.png\n", "line 2 has another number of cells"),
        ("path,label\na.png,x,y\n", "line 2 has another number of cells"),
        ('path,label\n"a.png,x\n', "not a CSV file"),
        ("path,label\na.png,x\na.png,y\n", "a.png more than once"),
        ("path,label\na.png,x\n./a.png,x\n", "a.png more than once"),
        ("path,label\na.png,x\nsub/../a.png,x\n", "a.png more than once"),
        ("path,label,split\na.png,x,train\na.png,x,test\n", "a.png more than once"),
        ("path,label,split\na.png,x,test\n", "no row of split 'train'"),
        ("path,label\na.png,\xfc\n".encode("latin-1"), "not a CSV file in UTF-8"),
        ("path,label\na.png,x\n".encode("utf-16"), "not a CSV file in UTF-8"),
        ("path,label\nnone.png,x\n", "none.png: is not a readable image"),
        ("path,label\nmanifest.csv,x\n", "is not a readable image"),
        ("path,label\n.,x\n", "is not a readable image"),
        ("path,label\na\0.png,x\n", "is not a readable image"),
    ],
)
def test_a_faulty_manifest_is_an_error_in_one_line_that_says_what_and_where(tmp_path, text, reason):
    images(tmp_path, "a.png", "b.png")
    manifest(tmp_path, text)
    with pytest.raises(DataError) as caught:
        loaded(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_label_of_test_rows_alone_is_refused(tmp_path):
    images(tmp_path, "a.png", "b.png")
    manifest(tmp_path, "path,label,split\na.png,x,train\nb.png,z,test\n")
    with pytest.raises(DataError, match="label 'z' has no training row"):
        loaded(tmp_path, "test")


def test_no_test_rows_are_an_error_where_they_are_asked_for(tmp_path):
    images(tmp_path, "a.png")
    manifest(tmp_path, "path,label\na.png,x\n")
    with pytest.raises(DataError, match="no row of split 'test'"):
        loaded(tmp_path, "test")


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(DataError, match=r"manifest\.csv: the manifest is missing"):
        loaded(tmp_path)


def test_images_are_decoded_one_at_a_time(tmp_path):
    images(tmp_path, "a.png")
    path = manifest(tmp_path, "path,label\na.png,x\nnone.png,x\n")
    found = iter(read_manifest(path, "train").images)
    assert next(found).shape == (28, 28)
    with pytest.raises(DataError):
        next(found)


def test_no_error_quotes_a_patient_id(tmp_path):
    images(tmp_path, "a.png")
    for row in ("a.png,,secret-1", "a.png,x,secret-1,more", "none.png,x,secret-1", None):
        manifest(tmp_path, f"path,label,patient\n{row}\n" if row else "a.png,x,secret-1\nb.png,x,secret-2\n")
        with pytest.raises(DataError) as caught:
            loaded(tmp_path)
        assert "secret" not in str(caught.value)
