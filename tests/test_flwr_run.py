"""`flwr run .` on a checkout works as Flower's users expect."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fl_dpgan.privacy.verify import verify

ROOT = Path(__file__).parents[1]
SETTINGS = "training.rounds=1 training.d_steps=1 training.g_steps=1 data.declared_size=700 federation.sites=2"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def flower(tmp_path):
    """Flower's environment for this test alone; what it leaves behind is ended afterwards."""
    yield {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(tmp_path / "flwr"):
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.slow
def test_flwr_run_completes_and_leaves_the_runs_folder(flower, tmp_path):
    out = tmp_path / "run"
    run = subprocess.run(
        ["flwr", "run", str(ROOT), "local", "--stream",
         "--federation-config", "num-supernodes=2 client-resources-num-cpus=1",
         "--run-config", f'scenario="digits" set="{SETTINGS}" out="{out}"'],
        env=flower, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    # the exit code is 0 for a failed run too: ask
    listed = subprocess.run(
        ["flwr", "ls", "local", "--format", "json"],
        env=flower, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert [one["status"] for one in json.loads(listed.stdout)["runs"]] == ["finished:completed"]
    assert [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()] == [1]
    assert [verify(ledger).budgets[0].d_steps for ledger in sorted((out / "ledgers").glob("*.sqlite"))] == [1, 1]
