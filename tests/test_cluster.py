"""The same scenario on a Ray cluster: RAY_ADDRESS names it, its nodes hold the sites, the result is the same."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from fl_dpgan.errors import ConfigError
from fl_dpgan.federation.cluster import address, lacks

SITES, ROUNDS = 4, 2
SETTINGS = [
    f"--set={setting}"
    for setting in (
        f"federation.sites={SITES}",
        "data.declared_size=340",
        "privacy.batch_size=16",
        "privacy.noise_multiplier=2.0",
        "training.d_steps=2",
        "training.g_steps=2",
    )
]


class Nodes:
    """Two Ray nodes in processes of their own, and what they say of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("two_ray_nodes.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(RAY_TMPDIR=str(folder)),
        )  # fmt: skip

    def start(self) -> None:
        self.address = self.process.stdout.readline().strip()

    def ask(self) -> dict:
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Close its stdin, which ends it; then what is left of it."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # a short path, since the names of Unix sockets may have 107 characters
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        started = Nodes(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.end()


def environment(**variables: str) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return own | {"RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "300"} | variables


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "fl_dpgan.cli", "simulate", "digits", *SETTINGS, *arguments, "--out", str(out)]


def run(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(out, *arguments), capture_output=True, text=True, timeout=300, env=environment(**variables)
    )


def until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(condition())


@pytest.mark.slow
def test_a_cluster_s_nodes_hold_the_sites_and_the_result_is_that_of_one_machine(nodes, tmp_path):
    rounds = f"--set=training.rounds={ROUNDS}"
    done = run(tmp_path / "cluster", rounds, RAY_ADDRESS=nodes.address)
    assert done.returncode == 0, done.stderr
    assert until(lambda: sum(nodes.ask()["calls"].values()) == SITES * (1 + ROUNDS), 10)  # each says hello, and trains
    assert until(lambda: not nodes.ask()["processes"], 10)
    said = nodes.ask()
    assert said["alive"] and len(said["calls"]) == 2

    # without RAY_ADDRESS a run has a Ray of its own, though RAY_TMPDIR's note names the cluster as the newest here
    assert (nodes.folder / "ray" / "ray_current_cluster").read_text() == nodes.address
    assert run(tmp_path / "alone", rounds, RAY_TMPDIR=str(nodes.folder)).returncode == 0
    assert nodes.ask() == said
    one, two = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("cluster", "alone"))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_none_of_its_processes_on_the_cluster_and_all_of_the_cluster_s(nodes, tmp_path):
    log = tmp_path / "out" / "rounds.jsonl"
    running = subprocess.Popen(
        command(tmp_path / "out", "--set=training.rounds=500"),
        stdout=subprocess.DEVNULL, env=environment(RAY_ADDRESS=nodes.address),
    )  # fmt: skip
    try:
        assert until(lambda: log.exists() and log.read_text() != "", 240)
        actors = [psutil.Process(pid) for pid in nodes.ask()["processes"]]
        assert len(actors) == 2
        running.send_signal(signal.SIGKILL)
        assert running.wait(60) == -9
    finally:
        running.kill()
    assert psutil.wait_procs(actors, timeout=60)[1] == []
    assert nodes.ask()["alive"]


@pytest.mark.slow
def test_a_node_that_cannot_see_the_data_ends_the_run_with_one_line(nodes, tmp_path):
    missing = tmp_path / "not-mounted"
    failed = run(tmp_path / "out", "--data-dir", str(missing), RAY_ADDRESS=nodes.address)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: the Ray node ") and failed.stderr.count("\n") == 1
    assert f"cannot use {missing}" in failed.stderr
    assert nodes.ask()["alive"]


@pytest.mark.slow
def test_an_address_without_a_cluster_ends_at_once_with_one_line_and_makes_nothing(tmp_path):
    began = time.monotonic()
    failed = run(tmp_path / "out", RAY_ADDRESS="127.0.0.1:1")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: RAY_ADDRESS = 127.0.0.1:1 cannot be reached")
    assert failed.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("given", ["http://127.0.0.1:8265", "auto", "ray://host:1", "host", "host:99999", ":6379"])
def test_an_address_that_is_not_host_and_port_is_a_config_error(monkeypatch, given):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ConfigError, match="is not host:port"):
        address()


def test_a_node_lacks_a_folder_that_is_missing_or_holds_another_run(tmp_path):
    out, data = tmp_path / "out", tmp_path / "data"
    out.mkdir()
    assert lacks(out, b"{}", None) == out
    (out / "scenario.json").write_bytes(b"{}")
    assert lacks(out, b"{}", None) is None
    assert lacks(out, b"[]", None) == out
    assert lacks(out, b"{}", data) == data
    data.mkdir()
    assert lacks(out, b"{}", data) is None
