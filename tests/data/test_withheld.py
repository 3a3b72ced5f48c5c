import numpy as np
import pytest

from fl_dpgan.config import load_scenario
from fl_dpgan.data import ImageData, load, withhold
from fl_dpgan.errors import DataError
from fl_dpgan.federation.simulation import split_data


def numbered(count):
    """Records that can be told apart by their first pixel."""
    images = np.zeros((count, 1, 2, 2), np.uint8)
    images[:, 0, 0, 0] = np.arange(count)
    return ImageData(images, np.arange(count) % 3, ("a", "b", "c"), tuple(f"p{i}" for i in range(count)))


def test_every_record_is_on_one_side_and_keeps_its_label_and_patient():
    kept, withheld = withhold(numbered(200), 60)
    assert (len(kept), len(withheld)) == (140, 60)
    both = [int(image[0, 0, 0]) for data in (kept, withheld) for image in data.images]
    assert sorted(both) == list(range(200))
    for data in (kept, withheld):
        for image, label, patient in zip(data.images, data.labels, data.patients, strict=True):
            assert (label, patient) == (image[0, 0, 0] % 3, f"p{image[0, 0, 0]}")


def test_none_withheld_leaves_all():
    kept, withheld = withhold(numbered(10), 0)
    assert len(withheld) == 0 and np.array_equal(kept.images, numbered(10).images)


def test_nothing_left_for_the_sites_is_refused():
    with pytest.raises(DataError, match=r"10 of 10 images: set data\.withheld to fewer|data\.withheld"):
        withhold(numbered(10), 10)


def test_no_site_of_any_seed_has_a_withheld_record():
    _, withheld = withhold(load("digits", split="train", size=28, channels=1), 137)
    outside = {image.tobytes() for image in withheld.images}
    for seed in (0, 1):
        settings = ["data.withheld=137", "data.declared_size=400", f"seed={seed}"]
        images, parts = split_data(load_scenario("digits", settings), None)
        assert sum(map(len, parts)) == len(images) == 1300
        inside = {image.tobytes() for image in images.images}
        assert not inside & outside


def test_invariant_11_a_patients_images_stay_on_one_side():
    data = numbered(90)
    data = ImageData(data.images, data.labels, data.classes, tuple(f"p{i // 4}" for i in range(90)))
    kept, withheld = withhold(data, 30)
    assert 30 <= len(withheld) < 34 and len(kept) + len(withheld) == 90
    assert not set(kept.patients) & set(withheld.patients)
