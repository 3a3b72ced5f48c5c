"""Patients from a manifest to the ledger: read, split with all images at one site, trained, accounted."""

import numpy as np
import pytest
from PIL import Image

from fl_dpgan.config import parse_scenario
from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.federation import FedDPGAN, shards, simulation, wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.privacy.verify import verify
from fl_dpgan.runs import RunFolder
from tests.conftest import LocalGrid, handler

PATIENTS = 40  # of 1, 2, 3 or 4 images: 100 images


def write(folder, rows, columns="path,label,patient"):
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for name, *_ in rows:
        Image.fromarray(random.integers(0, 256, (28, 28), np.uint8)).save(folder / name)
    lines = [",".join(row) for row in rows]
    (folder / "manifest.csv").write_text("\n".join([columns, *lines]) + "\n", encoding="utf-8")
    return folder


def patients_rows():
    rows = []
    for patient in range(PATIENTS):
        for number in range(1 + patient % 4):
            # "007" and "7" are two patients
            name = f"{patient // 2:03d}" if patient % 2 else f"{patient // 2}x"
            rows.append((f"{patient}-{number}.png", "ab"[(patient // 4) % 2], name))
    np.random.default_rng(1).shuffle(rows)
    return [tuple(row) for row in rows]


def scenario(sites=2, declared=15, **changes):
    return parse_scenario(
        {
            "name": "patients", "data": {"source": "manifest", "declared_size": declared},
            "privacy": {"unit": "patient", "batch_size": 4, "noise_multiplier": 2.0},
            "model": {"num_classes": 2, "latent_dim": 4, "g_width": 2, "d_width": 2},
            "training": {"rounds": 2, "d_steps": 2, "g_steps": 1, "g_batch_size": 4},
            "federation": {"sites": sites, "quorum": 1, "round_timeout": 1.0}, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "images", patients_rows())


def job(tmp_path, chosen, folder):
    made = simulation.Job(RunFolder.create(tmp_path / "run", chosen).path, folder)
    shards.write(made.folder.shards, *simulation.split_data(chosen, folder))
    return made


@pytest.mark.parametrize("sites", [1, 2, 5])
def test_invariant_11_all_images_of_a_patient_go_to_one_site_and_every_image_to_some(folder, sites):
    images, parts = simulation.split_data(scenario(sites, 4), folder)
    of_site = [{images.patients[i] for i in part} for part in parts]
    assert sum(map(len, of_site)) == len(set().union(*of_site)) == PATIENTS
    assert sorted(i for part in parts for i in part) == list(range(100))
    sizes = [len(found) for found in of_site]
    assert max(sizes) - min(sizes) <= 1  # patients are dealt out evenly, not images


def test_invariant_11_the_declared_size_counts_patients(folder):
    simulation.check(scenario(declared=20), folder)
    with pytest.raises(DataError, match="site-0: 20 patients, too few for the declared size 23"):
        simulation.check(scenario(declared=23), folder)  # though 50 images are there


def test_invariant_11_patients_from_the_manifest_to_the_ledgers_account(tmp_path, folder):
    chosen = scenario()
    made = job(tmp_path, chosen, folder)
    simulation.check(chosen, folder)
    sites = [simulation.simulated_site(made, index) for index in (0, 1)]
    assert [len(site._data.units) for site in sites] == [20, 20]
    grid = LocalGrid({n: handler(site) for n, site in enumerate(sites, start=10)})
    strategy = FedDPGAN(chosen, *from_config(chosen.model, 0), folder=RunFolder(made.out), run="patients")
    strategy.start(grid)
    for name in ("site-0", "site-1"):
        ledger = LedgerReader(made.folder.ledger(name))
        assert (ledger.account.unit, ledger.account.declared_size) == ("patient", 15)
        assert ledger.account.order == chosen.site_plan(15).order
        assert [charge.event.sample_rate for charge in ledger.charges()] == [4 / 15, 4 / 15]
        assert verify(made.folder.ledger(name)).unit == "patient"
        assert strategy.sites[name].epsilon == pytest.approx(ledger.epsilon(), rel=1e-9)


def test_a_simulated_site_says_that_it_protects_patients(tmp_path, folder, federation):
    site = simulation.simulated_site(job(tmp_path, scenario(), folder), 0)
    hello, _ = wire.unpack(Pack([site]).hello(federation("other").request()), wire.Hello)
    assert (hello.unit, hello.declared_size, hello.order) == ("patient", 15, scenario().site_plan(15).order)


def test_a_missing_id_is_an_error_that_names_no_patient(tmp_path):
    rows = patients_rows()
    rows[5] = (*rows[5][:2], "")
    folder = write(tmp_path / "images", rows)
    with pytest.raises(DataError, match="1 records have no patient id") as caught:
        simulation.check(scenario(sites=1, declared=30), folder)
    assert not any(f" {row[2]}" in str(caught.value) for row in rows if row[2])


def test_a_source_without_patients_cannot_protect_them(tmp_path):
    folder = write(tmp_path / "images", [row[:2] for row in patients_rows()], "path,label")
    with pytest.raises(ConfigError, match="has no patient ids"):
        simulation.check(scenario(), folder)


def test_a_manifest_with_patients_may_still_protect_images(tmp_path, folder):
    chosen = scenario(privacy={"unit": "image", "batch_size": 4}, data={"source": "manifest", "declared_size": 45})
    simulation.check(chosen, folder)
    site = simulation.simulated_site(job(tmp_path, chosen, folder), 1)
    assert (site._data.units.name, len(site._data.units)) == ("image", 50)


def test_a_scenario_of_another_number_of_classes_than_the_data_is_refused(folder):
    wrong = scenario(model={"num_classes": 3, "latent_dim": 4, "g_width": 2, "d_width": 2})
    with pytest.raises(ConfigError, match=r"model.num_classes = 3, but manifest has 2"):
        simulation.check(wrong, folder)


def test_a_site_without_a_class_is_named_unless_that_is_allowed(tmp_path):
    rows = [(f"{n}.png", "b" if n < 2 else "a", f"p{n}") for n in range(30)]
    folder = write(tmp_path / "few", rows)
    sizes = {"source": "manifest", "declared_size": 5, "partition": "size", "sizes": [5, 20, 5]}
    with pytest.raises(DataError, match=r"site-\d has no record of class b; .*allow_missing_classes"):
        simulation.check(scenario(3, data=sizes), folder)
    simulation.check(scenario(3, data={**sizes, "allow_missing_classes": True}), folder)
