"""Privacy units: which records form one, and which record a sampled unit contributes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_dpgan.errors import DataError
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.units import Units

ids = st.lists(st.text("abc01", min_size=1, max_size=3), min_size=1, max_size=30)


def plan(declared_size, batch_size):
    return SitePlan(
        declared_size=declared_size, batch_size=batch_size, d_steps=1, rounds=1, noise_multiplier=1.0, eps_max=10.0,
        delta=1e-6, order=3.0, clipping=Fixed(), unit="patient",
    )  # fmt: skip


def every(units):
    return np.arange(len(units))


def test_without_patients_each_image_is_a_unit():
    units = Units(5)
    assert (units.name, len(units)) == ("image", 5)
    assert units.records(np.array([4, 0, 2]), KeyedGenerator.from_seed(0)).tolist() == [4, 0, 2]


@given(patients=ids, seed=st.integers(0, 999))
def test_invariant_11_a_patient_is_a_unit_and_contributes_one_of_their_own_images(patients, seed):
    units = Units(len(patients), patients)
    assert (units.name, len(units)) == ("patient", len(set(patients)))
    drawn = units.records(every(units), KeyedGenerator.from_seed(seed))
    assert sorted(patients[i] for i in drawn) == sorted(set(patients))  # each patient once


def test_invariant_11_the_image_of_a_patient_is_drawn_uniformly():
    patients = ["b", "a", "b", "c", "b", "a"]
    units, random = Units(6, patients), KeyedGenerator.from_seed(2)
    counts = np.zeros(6)
    for _ in range(6000):
        counts[units.records(every(units), random)] += 1
    share = {"a": 1 / 2, "b": 1 / 3, "c": 1.0}
    for count, patient in zip(counts, patients, strict=True):
        p = share[patient]
        assert count == pytest.approx(6000 * p, abs=5 * (6000 * p * (1 - p)) ** 0.5)


def test_invariant_11_a_patient_is_sampled_with_rate_q_however_many_images_there_are_of_them():
    patients = ["many"] * 90 + [f"one-{n}" for n in range(9)]
    units, random = Units(99, patients), KeyedGenerator.from_seed(3)
    made = plan(declared_size=10, batch_size=3)  # q = 0.3
    times = {patient: 0 for patient in set(patients)}
    for _ in range(4000):
        for record in made.sample(units, random):
            times[patients[record]] += 1
    for patient, count in times.items():
        assert count == pytest.approx(1200, abs=5 * (4000 * 0.3 * 0.7) ** 0.5), patient


def test_two_patients_are_sampled_independently():
    units, random, made = Units(4, ["a", "a", "b", "b"]), KeyedGenerator.from_seed(4), plan(2, 1)
    both = sum(len(made.sample(units, random)) == 2 for _ in range(4000))
    assert both == pytest.approx(1000, abs=5 * (4000 * 0.25 * 0.75) ** 0.5)


def test_invariant_11_ids_are_text_and_leading_zeros_count():
    assert len(Units(4, ["7", "07", "007", "7"])) == 3
    assert len(Units(2, ["a", "A"])) == 2


@pytest.mark.parametrize("missing", ["", "  ", "\t", None, float("nan")], ids=repr)
def test_invariant_11_a_missing_id_is_an_error_that_names_no_id_and_no_row(missing):
    with pytest.raises(DataError, match="1 records have no patient id") as caught:
        Units(3, ["secret-4711", missing, "secret-4712"])
    assert "secret" not in str(caught.value) and "4711" not in str(caught.value)


def test_another_number_of_ids_than_of_records_is_an_error():
    with pytest.raises(DataError, match="2 patient ids for 3 records"):
        Units(3, ["a", "b"])


def test_no_records_are_no_units():
    assert len(Units(0, [])) == 0
    assert Units(0, []).records(np.array([], np.int64), KeyedGenerator.from_seed(0)).tolist() == []


class AllOnes:
    def update(self, zeros):
        return b"\xff" * len(zeros)


def test_the_largest_draw_still_gives_an_image_of_the_same_patient():
    random = KeyedGenerator.from_seed(0)
    random._stream = AllOnes()
    units = Units(4, ["a", "b", "b", "c"])
    assert units.records(np.array([0, 1]), random).tolist() == [0, 2]
    assert torch.from_numpy(random.uniform(3)).max() < 1
