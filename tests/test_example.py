"""The example of another app runs on Flower's engine, and keeps within forty lines of code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_dpgan.privacy.ledger import Ledger

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_app.py"

# `flwr run` on a bundle ends in this call; here it is made on the example's apps as they are
ENGINE = """
import sys; sys.path.insert(0, {folder!r})
import own_app
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType
_run_simulation(num_supernodes=2, exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE, client_app=own_app.client,
                server_app=own_app.server, backend_config={{"init_args": {{"log_to_driver": False}},
                "client_resources": {{"num_cpus": 1, "num_gpus": 0}}}})
"""


def test_the_example_has_at_most_forty_lines_of_code():
    lines = EXAMPLE.read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40


@pytest.mark.slow
def test_the_example_trains_and_charges(tmp_path):
    environment = {
        **os.environ,
        "OWN_APP_OUT": str(tmp_path),
        "PYTHONPATH": str(EXAMPLE.parent),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    code = ENGINE.format(folder=str(EXAMPLE.parent))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for number in (0, 1):
        ledger = Ledger(tmp_path / f"lab-{number}.sqlite")
        assert ledger.steps() == 10
        assert 0 < ledger.epsilon() <= 10
