"""A federation of real processes: TLS, known nodes, guards, three kinds of data; killed, returned, refused, spent.

One SuperLink and three sites run a dozen rounds. Meanwhile a guard and a SuperNode are killed within a round and come
back, a node that nobody registered is turned away, and one site runs out of budget.
"""

import json
import random
import re
import signal
import struct
import subprocess
import time
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from fl_dpgan.config import load_federation
from fl_dpgan.federation.exchange import SiteRecord
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.privacy.verify import verify
from fl_dpgan.report.budgets import budget_rows
from fl_dpgan.report.synthetic import run_generator
from fl_dpgan.runs import RunFolder
from simulations.benchmarks.processes import FL_DPGAN, DeployedSite, Process, free_port, run, wait

pytestmark = pytest.mark.slow

CLASSES = ("healthy", "ill")
ROUNDS, STEPS = 9, 80
#: What is planted in what must not leave: header texts, a label's own name, the exact number of records, a pixel row.
CANARY = "Zq7CanaryX"
LABEL = "Kv3LabelY"
COUNT = 149
FEDERATION = {
    "federation": {"sites": 3, "quorum": 1, "round_timeout": 20.0, "join_timeout": 30.0},
    "model": {"num_classes": 2, "latent_dim": 8, "g_width": 4, "d_width": 4},
    "training": {"rounds": ROUNDS, "d_steps": STEPS, "g_steps": 5},
    "privacy": {"eps_max": 40.0, "delta": 1e-5, "unit": '"image"', "batch_size": 8},
}


def pictures(count: int, seed: int) -> np.ndarray:
    """Noise, with one row of pixels that no other place has: 28 values that rise and fall."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), np.uint8)
    images[:, 14] = row()
    return images


def row() -> np.ndarray:
    return (np.arange(28) * 37 % 256).astype(np.uint8)


def png_folder(home: Path) -> Path:
    for index, image in enumerate(pictures(COUNT, 1)):
        folder = home / "png" / (LABEL if index % 2 else "healthy")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{CANARY}-{index}.png")
    return home / "png"


def dicom_folder(home: Path) -> Path:
    for index, image in enumerate(pictures(120, 2)):
        folder = home / "dicom" / CLASSES[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
        file.PatientName, file.PatientID, file.InstitutionName = f"{CANARY}^A", f"{CANARY}-1", f"{CANARY} Hospital"
        file.Modality, file.PhotometricInterpretation = "OT", "MONOCHROME2"
        file.Rows, file.Columns, file.SamplesPerPixel, file.PixelRepresentation = 28, 28, 1, 0
        file.BitsAllocated, file.BitsStored, file.HighBit = 8, 8, 7
        file.PixelData = image.tobytes()
        file.save_as(folder / f"{index}.dcm", enforce_file_format=True)
    return home / "dicom"


def npz_file(home: Path) -> Path:
    np.savez(home / "site.npz", images=pictures(120, 3), labels=np.arange(120) % 2)
    return home / "site.npz"


def federation_file(path: Path) -> None:
    """Fill in the template that `server init` wrote."""
    lines, table, given = [], "", deepcopy(FEDERATION)
    for line in path.read_text().splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        key = line.partition(" = ")[0]
        lines.append(f"{key} = {given[table].pop(key)}" if key in given.get(table, {}) else line)
    text = "\n".join(lines) + "\n"
    for table, rest in given.items():
        more = "\n".join(f"{key} = {value}" for key, value in rest.items())
        text = text.replace(f"[{table}]", f"[{table}]\n{more}")
    path.write_text(text)


class Deployment:
    """The university's server and three hospitals, each in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.server, self.out = home / "server", home / "run"
        self.port = free_port()
        run(
            "server",
            "init",
            self.server,
            "--host",
            "127.0.0.1",
            "--port",
            self.port,
            *(f"--class={c}" for c in CLASSES),
        )
        federation_file(self.server / "federation.toml")
        self.processes: list[Process] = []
        self.superlink = self.start_superlink()
        federation = load_federation(self.server / "federation.toml")
        self.three_rounds = federation.site_plan(100, 3.0).epsilon_after(3 * STEPS, 0)
        kinds = {"north": (png_folder, "folder", 50.0), "east": (dicom_folder, "folder", 50.0),
                 "south": (npz_file, "npz", 1.01 * self.three_rounds)}  # fmt: skip
        self.sites = {}
        for name, (data, source, eps_max) in kinds.items():
            place = home / name
            place.mkdir()
            self.sites[name] = DeployedSite(place, name, 100, source, data(place), eps_max=eps_max)
            for file in ("federation.toml", "ca.crt"):
                (place / file).write_bytes((self.server / file).read_bytes())
        self.sites["north"].label(**{LABEL: "ill"})
        self.sites["south"].label(**{"0": "healthy", "1": "ill"})
        for name, site in self.sites.items():
            site.make_ledger()
            self._register(site.home / "node.key.pub", name)

    def _register(self, key: Path, name: str) -> None:
        """As soon as the SuperLink answers."""
        command = [FL_DPGAN, "server", "register", str(self.server), str(key), name]
        wait(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, 60, "a registration")

    def start_superlink(self) -> Process:
        return self.process(self.server.parent / "superlink.log", "server", "start", self.server, "--local")

    def process(self, log: Path, *arguments: object) -> Process:
        made = Process(log, *arguments)
        self.processes.append(made)
        return made

    def rounds(self) -> list[dict]:
        return [record for record in RunFolder(self.out).rounds() if "sites" in record and "stopped" not in record]

    def statuses(self, name: str) -> list[str]:
        return [record["sites"][name]["status"] for record in self.rounds() if name in record["sites"]]

    def stop(self) -> None:
        for site in self.sites.values():
            site.stop()
        for process in reversed(self.processes):
            process.stop()


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.timeout(400)
def test_a_federation_of_real_processes_survives_what_befalls_it(deployment, tmp_path):
    north, east = deployment.sites["north"], deployment.sites["east"]
    taps = {name: site.tap() for name, site in deployment.sites.items()}
    for site in deployment.sites.values():
        site.start_guard()
        site.start_node("tapped.toml")
    stranger_home = tmp_path / "stranger"
    stranger_home.mkdir()
    for file in ("federation.toml", "ca.crt"):
        (stranger_home / file).write_bytes((deployment.server / file).read_bytes())
    run("site", "init", "--name", "stranger", "--declared-size", 100, cwd=stranger_home)
    run("site", "key", cwd=stranger_home)
    stranger = Process(stranger_home / "node.log", "site", "node", "--port", free_port(), cwd=stranger_home)
    deployment.processes.append(stranger)
    for site in deployment.sites.values():
        wait(lambda site=site: site.guard and "listening on" in site.guard.said(), 60, "a guard listens")

    command = ("server", "run", deployment.server / "federation.toml", "--out", deployment.out)
    running = deployment.process(tmp_path / "run.log", *command)
    wait(lambda: len(deployment.rounds()) >= 1, 90, "the first round")

    wait(lambda: north.in_work(), 60, "north is within a round")
    assert north.node
    north.node.stop(signal.SIGKILL)  # Flower lets its successor in once the heartbeats have been missing for a minute
    wait(lambda: east.in_work(), 60, "east is within a round")
    assert east.guard
    east.guard.stop(signal.SIGKILL)
    east.lost += 1
    east.start_guard()

    assert running.process.wait(240) == 0, running.said()
    assert stranger.process.wait(10) != 0, stranger.said()

    assert [record["round"] for record in deployment.rounds()][-1] == ROUNDS
    for name in ("east", "north"):  # out for a while, and back
        assert re.search("trained .*(silent|left out|absent).* trained", " ".join(deployment.statuses(name)))
    generator, meta = run_generator(RunFolder.open(deployment.out))
    assert all(bool(tensor.isfinite().all()) for tensor in generator.state_dict().values())
    assert meta["round"] == ROUNDS and set(meta["sites"]) == {"north", "east", "south"}

    for name, site in deployment.sites.items():
        verify(site.ledger)
        (spent,) = budget_rows(site.ledger)
        with closing(LedgerReader(site.ledger)) as ledger:
            charged = ledger.steps()
            assert spent["spent"] == pytest.approx(ledger.epsilon())
        known = meta["sites"][name]
        record = SiteRecord.recalled(0, known)
        asked = [status for status in deployment.statuses(name) if status not in ("withdrawn", "absent")]
        assert record.steps >= charged and record.steps >= STEPS * len(asked)
        assert spent["spent"] <= record.epsilon + 1e-9
    south = deployment.statuses("south")
    assert "trained" in south and set(south[3:]) <= {"withdrawn"} and len(south) > 3  # its budget is three rounds
    with closing(LedgerReader(east.ledger)) as ledger:
        assert ledger.counts()[1] == 1  # the charge whose answer the kill took: it stays
    shown = run("watch", deployment.out, "--once")
    assert all(name in shown for name in deployment.sites)

    print(f"ClientApp, start to hand-over: {', '.join(f'{age:.2f}' for tap in taps.values() for age in tap.ages)} s")
    for name, tap in taps.items():
        assert sum(map(len, tap.said)) > 10_000, name
        for said in tap.said:
            leaves_nothing(bytes(said), name)
        headers = [header for said in tap.said for header in headers_in(bytes(said))]
        assert len(headers) > 2
        for header in headers:
            assert not {COUNT, 120, str(COUNT)} & set(json.loads(header).values()), (name, header)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("takes_minutes")
def test_a_serverapp_and_a_superlink_that_are_killed_lose_no_round_that_was_kept(deployment, tmp_path):
    for site in deployment.sites.values():
        site.start_guard()
        site.start_node()
    for site in deployment.sites.values():
        wait(lambda site=site: "listening on" in site.guard.said(), 60, "a guard listens")
    command = ("server", "run", deployment.server / "federation.toml", "--out", deployment.out)
    running = deployment.process(tmp_path / "run.log", *command)
    seed = random.randrange(2**32)
    source = random.Random(seed)
    print(f"seed {seed}")

    def within_a_round() -> None:
        began = len(deployment.rounds())
        wait(lambda: len(deployment.rounds()) > began, 240, f"a round after {began}, seed {seed}")
        time.sleep(source.uniform(0, 8))

    within_a_round()
    (app,) = serverapps(deployment)
    app.kill()
    within_a_round()
    kept = [record for record in deployment.rounds()][:-1]  # the last one may have been logged, and not kept yet
    family = psutil.Process(deployment.superlink.process.pid).children(recursive=True)
    deployment.superlink.process.kill()
    assert deployment.superlink.process.wait() == -signal.SIGKILL
    psutil.wait_procs(family, timeout=source.uniform(0, 20))
    deployment.superlink = deployment.start_superlink()

    assert running.process.wait(400) == 0, running.said()
    records = deployment.rounds()
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))
    assert records[: len(kept)] == kept
    assert "Traceback" not in running.said(), running.said()
    _, meta = run_generator(RunFolder.open(deployment.out))
    for name, site in deployment.sites.items():
        verify(site.ledger)
        with closing(LedgerReader(site.ledger)) as ledger:
            assert SiteRecord.recalled(0, meta["sites"][name]).steps >= ledger.steps() >= STEPS
            assert ledger.counts()[1] == 0  # no guard was disturbed: whatever was charged was answered
            requests = [charge.request for charge in ledger.charges()]
        assert len(set(requests)) == len(requests)  # a round that is asked again gets the stored answer


def serverapps(deployment: Deployment) -> list[psutil.Process]:
    family = psutil.Process(deployment.superlink.process.pid).children(recursive=True)
    return [process for process in family if any("flwr-serverapp" in word for word in process.cmdline())]


def leaves_nothing(said: bytes, name: str) -> None:
    """Search what a guard has said for what was planted: texts, and pixels in every form that is held."""
    for text in (CANARY, LABEL, "png", "dicom", "Hospital", str(Path.home()), ".sqlite"):
        assert text.encode() not in said, (name, text)
    pixels = row()[4:12]
    unit = pixels.astype(np.float32) / 127.5 - 1
    for form in (pixels.tobytes(), unit.tobytes(), unit.astype(np.float64).tobytes(), (unit / 2 + 0.5).tobytes()):
        assert form not in said, name


def headers_in(said: bytes):
    """The answers' JSON texts in the frames that a guard has sent."""
    place = 0
    while place + 12 <= len(said):
        header, body = struct.unpack_from(">IQ", said, place)
        text = said[place + 12 : place + 12 + header]
        if len(text) == header and "header" in (frame := json.loads(text)):  # else cut short by a kill
            yield frame["header"]
        place += 12 + header + body
