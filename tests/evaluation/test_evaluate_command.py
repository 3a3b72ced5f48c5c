"""`fl-dpgan evaluate` on a run's folder that was made without training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fl_dpgan import cli
from fl_dpgan.config import load_scenario
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.networks import from_config
from fl_dpgan.runs import RunFolder

QUICK = {"cnn_accuracy", "round", "synthetic_images", "real_test_images"}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    scenario = load_scenario("digits", ["evaluation.images=200", "evaluation.epochs=1"])
    folder = RunFolder.create(tmp_path / "run", scenario)
    FedDPGAN(scenario, *from_config(scenario.model, scenario.seed), folder=folder, run="test")._checkpoint(1)
    return folder.path


def evaluate(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["fl-dpgan", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def test_quick_is_the_default_and_keeps_its_keys(finished, monkeypatch):
    evaluate(monkeypatch, finished)
    first = (finished / "evaluation.json").read_bytes()
    assert set(json.loads(first)) == QUICK
    evaluate(monkeypatch, finished, "--suite", "quick")
    assert (finished / "evaluation.json").read_bytes() == first


def test_full_adds_every_figure_and_prints_what_each_is(finished, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    evaluate(monkeypatch, finished, "--suite", "full")
    result = json.loads((finished / "evaluation.json").read_text())
    full = result["full"]
    assert set(result) == QUICK | {"full"}
    assert set(full) == {"utility", "fidelity", "robustness", "real", "settings", "membership"}
    assert result["cnn_accuracy"] == full["utility"]["cnn_accuracy"]
    assert full["real"]["utility"]["images"] == full["utility"]["images"] == 200
    # an untrained generator draws grey: no digit, and far less varied than digits
    assert full["utility"]["mean_accuracy"] < 0.5 < full["real"]["utility"]["mean_accuracy"]
    assert full["fidelity"]["diversity_mean"] < 0.5
    assert len(full["fidelity"]["per_class"]) == 10
    printed = capsys.readouterr()
    assert "arXiv 1904.06991" in printed.out
    assert "comparable within this project only" in " ".join(printed.out.split())
    assert f"{full['fidelity']['kid']:.4f}" in printed.out
    assert "Membership inference" in printed.out
    assert "warning" not in printed.err.lower()


def test_the_command_line_starts_without_torch():
    check = "import sys, fl_dpgan.cli; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
