"""The images: what is there, under which labels, and against what was declared; no patient's id is ever shown."""

import csv

import numpy as np
import pytest
from expected import expect
from PIL import Image

from fl_dpgan.checks import data
from fl_dpgan.checks.finding import Finding, may_start, ok, refused
from fl_dpgan.config import Federation
from fl_dpgan.errors import DataError
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.site_file import SiteData, SiteFile

CLASSES = ("normal", "sick")
CANARY = "PATIENT-4711"


def federation(**options):
    model = {"num_classes": 2}
    return Federation(classes=CLASSES, address="localhost:1", model=model, **options)


def site(folder, *, declared_size=10, unit="image", source="manifest", **options):
    path = folder / ("list.csv" if source == "manifest" else "images")
    return SiteFile(
        name="north",
        policy=Policy(declared_size=declared_size, unit=unit),
        data=SiteData(source=source, path=path, cache=folder / "cache"),
        **options,
    )


def images(folder, labels=("normal",) * 6 + ("sick",) * 4, size=28, patients=True):
    """PNG files with a manifest, and the same by folders."""
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", *(["patient"] if patients else [])])
        for number, label in enumerate(labels):
            path = folder / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((size, size), number, np.uint8)).save(path)
            id_of = [f"{CANARY}-{number // 2}"] if patients else []
            rows.writerow([path.relative_to(folder), label, *id_of])


def check(file, **options):
    found, read = data.check_data(
        lambda: data.read(file, federation(), lambda done, total: None, **options),
        file.policy,
        CLASSES,
        may_lack=file.data.allow_missing_classes,
    )
    assert all(CANARY not in finding.found + finding.remedy for finding in found)
    return {finding.name: finding for finding in found}, read


def test_data_in_order(tmp_path):
    images(tmp_path)
    found, read = check(site(tmp_path))
    assert len(read.labels) == 10 and (tmp_path / "cache").is_dir()
    expect(found["data"], "ok", "10 images of 5 patients: normal 6, sick 4")
    expect(found["classes"], "ok", "2")
    expect(found["declared size"], "ok", "10 images declared, 10 there")


def test_what_is_not_to_be_kept_leaves_the_cache_alone(tmp_path):
    images(tmp_path)
    found, read = check(site(tmp_path), keep=False)
    assert len(read.labels) == 10 and not (tmp_path / "cache").exists()
    expect(found["data"], "ok")


def test_conversions_are_counted(tmp_path):
    images(tmp_path, size=40, patients=False)
    expect(check(site(tmp_path))[0]["data"], "ok", "10 images: ", "10: resized")


@pytest.mark.parametrize("source", ["folder", "manifest"])
def test_data_that_are_not_there(tmp_path, source):
    found, read = check(site(tmp_path, source=source))
    assert read is None and list(found) == ["data"]
    expect(found["data"], "failed", str(tmp_path))


def test_a_label_that_the_federation_does_not_have(tmp_path):
    images(tmp_path, ["normal", "sick", "odd"])
    expect(check(site(tmp_path))[0]["data"], "failed", "'odd'", "[labels]")


def test_a_damaged_image(tmp_path):
    images(tmp_path)
    (tmp_path / "images/sick/9.png").write_bytes(b"no image")
    expect(check(site(tmp_path))[0]["data"], "failed", "9.png")


def test_a_class_without_images(tmp_path):
    images(tmp_path, ["normal"] * 10)
    found, _ = check(site(tmp_path))
    expect(found["classes"], "failed", "no image of sick", "[labels]")
    assert not may_start(found.values())
    file = site(tmp_path)
    lacking = file.model_copy(update={"data": file.data.model_copy(update={"allow_missing_classes": True})})
    found, _ = check(lacking)
    expect(found["classes"], "warning", "no image of sick", "[labels]")
    assert may_start(found.values())


@pytest.mark.parametrize(
    ("declared_size", "unit", "status", "words"),
    [
        (11, "image", "ok", ["11 images declared, 10 there"]),
        (12, "image", "failed", ["10 images, too few", "declare at most 10"]),
        (7, "image", "ok", ["7 images declared"]),
        (6, "image", "warning", ["6 images declared, 10 there", "before the ledger"]),
        (5, "patient", "ok", ["5 patients declared, 5 there"]),
        (6, "patient", "failed", ["5 patients, too few"]),
    ],
)
def test_the_declared_size_against_the_real_one(tmp_path, declared_size, unit, status, words):
    images(tmp_path)
    found, _ = check(site(tmp_path, declared_size=declared_size, unit=unit))
    expect(found["declared size"], status, *words)


def test_patients_without_ids(tmp_path):
    images(tmp_path, patients=False)
    found, _ = check(site(tmp_path, unit="patient"))
    expect(found["declared size"], "failed", "no patient ids", "manifest")


def test_a_finding_has_a_remedy_if_and_only_if_it_is_not_ok():
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "failed", "broken")
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "ok", "fine", "nothing to mend")


def test_what_goes_to_the_terminal_is_one_printable_line():
    finding = refused("x", DataError("a\x1b[31m\nb: is odd; take \x07it away"))
    assert (finding.found, finding.remedy) == ("a [31m b: is odd", "take it away")
    assert refused("x", DataError("is odd"), "look").remedy == "look"
    assert ok("x", "a\nb").found == "a b"
