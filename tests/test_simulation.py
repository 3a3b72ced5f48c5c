"""The whole path on Flower's engine and Ray, as a user starts it: run, killed, resumed, run again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.privacy.verify import verify

pytestmark = pytest.mark.slow
SETTINGS = [
    f"--set={setting}"
    for setting in (
        "federation.sites=2",
        "federation.quorum=1",
        "data.declared_size=700",
        "privacy.batch_size=16",
        "privacy.noise_multiplier=2.0",
        "training.d_steps=2",
        "training.g_steps=2",
    )
]


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "fl_dpgan.cli", "simulate", *arguments, "--out", str(out)]


def rounds(out: Path) -> list[int]:
    log = out / "rounds.jsonl"
    return [json.loads(line)["round"] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_run_that_is_killed_is_continued_on_the_same_ledgers_and_leaves_no_process(tmp_path):
    out = tmp_path / "killed"
    running = subprocess.Popen(command(out, "digits", *SETTINGS, "--set=training.rounds=60"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(rounds(out)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    running.send_signal(signal.SIGKILL)
    running.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [p.name() for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

    before = {p.name: len(LedgerReader(p).charges()) for p in (out / "ledgers").glob("*.sqlite")}
    assert min(before.values()) >= 2
    done = subprocess.run(command(out, "--resume"), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert rounds(out) == list(range(1, 61))
    for path in (out / "ledgers").glob("*.sqlite"):
        events = LedgerReader(path).charges()
        assert 60 <= len(events) <= 61  # a round that the kill cut between charge and answer is charged twice
        assert len(events) > before[path.name]
    assert (out / "samples.png").is_file()
    assert len(json.loads((out / "budgets.json").read_text())) == 2


def actors(run: int) -> list[psutil.Process]:
    """The processes that hold sites."""
    found = []
    for process in psutil.Process(run).children(recursive=True):
        with suppress(psutil.Error):  # one that ends while it is looked at
            if "ClientAppActor" in "".join(process.cmdline()):
                found.append(process)
    return found


def test_a_dead_actor_costs_its_sites_one_round_and_the_run_goes_on_with_all_of_them(tmp_path, thorough):
    number, kills = (60, 4) if thorough else (12, 2)
    out = tmp_path / "out"
    settings = ["federation.sites=3", "data.declared_size=400", f"training.rounds={number}"]
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(
            command(out, "digits", *SETTINGS, *(f"--set={setting}" for setting in settings)),
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    source, killed = random.Random(6), set()
    for _ in range(kills):
        began, deadline = len(rounds(out)), time.monotonic() + 240
        while len(rounds(out)) < began + 2 and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(source.uniform(0, 0.2))  # somewhere within a round
        actor = source.choice([actor for actor in actors(running.pid) if actor not in killed])
        actor.kill()
        killed.add(actor)
    assert running.wait(400) == 0, (tmp_path / "said").read_text()
    records = [json.loads(line)["sites"].values() for line in (out / "rounds.jsonl").read_text().splitlines()]
    lost = [site for record in records for site in record if site["status"] != "trained"]
    # the message that an actor has when it is killed, or the first that it is given afterwards
    assert len(records) == number and 1 <= len(lost) <= kills, lost
    assert all("a new one takes its place" in site["reason"] for site in lost)
    for path in (out / "ledgers").glob("*.sqlite"):
        verify(path)
        assert number - len(lost) <= len(LedgerReader(path).charges()) <= number


def test_the_same_seed_gives_the_same_generator_bit_for_bit_and_ctrl_c_says_how_to_go_on(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ["digits", *SETTINGS, "--set=training.rounds=2"]
    assert subprocess.run(command(first, *arguments), capture_output=True, timeout=300).returncode == 0
    assert subprocess.run(command(second, *arguments), capture_output=True, timeout=300).returncode == 0
    one, two = (load_file(out / "checkpoint.safetensors") for out in (first, second))
    assert all(one[name].equal(two[name]) for name in one)

    third = tmp_path / "third"
    running = subprocess.Popen(
        command(third, "digits", *SETTINGS, "--set=training.rounds=500"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    while len(rounds(third)) < 1 and running.poll() is None:
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "continue with: fl-dpgan simulate --resume" in said


def test_a_failed_run_exits_with_2_and_one_line(tmp_path):
    arguments = ["digits", *SETTINGS, "--set=training.rounds=1", "--set=federation.round_timeout=0.01"]
    failed = subprocess.run(command(tmp_path / "out", *arguments), capture_output=True, text=True, timeout=300)
    assert failed.returncode == 2, failed.stdout
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("error: ")
    assert "quorum" in failed.stderr
