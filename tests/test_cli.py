"""Bad input gets one line, exit code 2, and nothing is overwritten; good input does what the README says."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import run_cli as run
from PIL import Image

from fl_dpgan import cli
from fl_dpgan.config import load_scenario
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.networks import from_config
from fl_dpgan.runs import RunFolder


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint, made without training."""
    scenario = load_scenario("digits", ["evaluation.images=100", "evaluation.epochs=1"])
    folder = RunFolder.create(tmp_path / "run", scenario)
    FedDPGAN(scenario, *from_config(scenario.model, scenario.seed), folder=folder, run="test")._checkpoint(1)
    return folder.path


def idx(path: Path, content: bytes) -> None:
    path.mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (path / name).write_bytes(content)


BAD = {
    "unknown scenario": (["nope"], "no scenario 'nope'"),
    "unknown key": (["digits", "--set", "training.round=3"], "unknown key 'training.round'"),
    "unknown section": (["digits", "--set", "foo.bar=3"], "unknown key 'foo'"),
    "not an assignment": (["digits", "--set", "seed"], "section.key=value"),
    "NaN": (["digits", "--set", "privacy.eps_max=nan"], "privacy.eps_max"),
    "negative": (["digits", "--set", "privacy.delta=-1"], "privacy.delta"),
    "batch too large": (
        ["digits", "--set", "privacy.batch_size=480"],
        "batch size 480 is larger than the site's declared",
    ),
    "delta too large": (["digits", "--set", "privacy.delta=0.001"], "is more than 1/(10 N^)"),
    "too many sites": (["digits", "--set", "federation.sites=2000"], "2000 sites"),
    "quorum": (["digits", "--set", "federation.quorum=4"], "quorum = 4"),
    "classes missing": (
        ["digits", "--set", "data.partition=pathological", "--set", "data.classes_per_site=2"],
        "has no record of class",
    ),
    "declared too much": (["digits", "--set", "data.declared_size=1000"], "too few for the declared size 1000"),
    "no data folder": (["mnist", "--data-dir", ""], "data_dir"),
    "clipping": (["digits", "--set", "privacy.clipping={rule='epsilon_adaptive', c_min=2.0, c_max=1.0}"], "c_min = 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2_and_makes_no_folder(case, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FL_DPGAN_DATA", raising=False)
    arguments, says = BAD[case]
    arguments = [a for a in arguments if a not in ("--data-dir", "")]
    assert run(monkeypatch, "simulate", *arguments, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x00\x00\x08\x03" + b"\xff" * 12])
def test_a_corrupt_data_file_is_one_line_and_exit_2(content, tmp_path, monkeypatch, capsys):
    idx(tmp_path / "data", content)
    assert run(monkeypatch, "simulate", "mnist", "--data-dir", tmp_path / "data", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "train-images-idx3-ubyte" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_data_file_is_named(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "simulate", "mnist", "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert "train-images-idx3-ubyte" in capsys.readouterr().err


def test_an_out_that_holds_another_run_is_refused_and_untouched(finished, monkeypatch, capsys):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert run(monkeypatch, "simulate", "digits", "--out", finished) == 2
    assert "is not empty" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}


def test_a_full_disk_is_one_line_and_exit_2_whatever_is_written(monkeypatch, capsys):
    def full():
        with open("/dev/full", "w") as disk:
            disk.write("images")

    monkeypatch.setattr(cli, "app", full)
    assert run(monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "No space left on device" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["report"], ["evaluate"], ["generate", "--out", "x"]])
def test_a_folder_without_a_run_is_named(command, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, command[0], tmp_path / "nowhere", *command[1:]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_resume_refuses_new_settings(finished, monkeypatch, capsys):
    assert run(monkeypatch, "simulate", "--resume", "--out", finished, "--set", "seed=1") == 2
    assert "cannot change a run" in capsys.readouterr().err


def test_a_truncated_checkpoint_is_one_line_and_exit_2(finished, monkeypatch, capsys):
    file = finished / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert run(monkeypatch, "generate", finished, "--out", finished / "images") == 2
    assert "is damaged" in capsys.readouterr().err


def test_generate_writes_png_files_by_class_and_a_card(finished, tmp_path, monkeypatch):
    assert run(monkeypatch, "generate", finished, "--count", 6, "--labels", "3,7", "--out", tmp_path / "png") == 0
    files = sorted(p.relative_to(tmp_path / "png").as_posix() for p in (tmp_path / "png").rglob("*.png"))
    assert files == [f"{c}/{i:06d}.png" for c, start in ((3, 0), (7, 1)) for i in range(start, 6, 2)]
    assert Image.open(tmp_path / "png" / files[0]).size == (28, 28)
    card = json.loads((tmp_path / "png" / "card.json").read_text())
    assert card["round"] == 1
    assert "adding or removing one privacy unit" in card["statement"]


def test_generate_writes_an_npz_that_needs_no_pickle(finished, tmp_path, monkeypatch):
    assert run(monkeypatch, "generate", finished, "--count", 20, "--npz", "--out", tmp_path / "npz") == 0
    with np.load(tmp_path / "npz" / "synthetic.npz", allow_pickle=False) as stored:
        assert stored["images"].shape == (20, 28, 28)
        assert stored["images"].dtype == np.uint8
        assert stored["labels"].tolist() == list(range(10)) * 2


@pytest.mark.parametrize("labels", ["11", "-1", "a,b"])
def test_generate_refuses_labels_that_the_run_does_not_have(labels, finished, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "generate", finished, "--labels", labels, "--out", tmp_path / "png") == 2
    assert "label" in capsys.readouterr().err


def test_evaluate_prints_and_keeps_the_accuracy_of_the_last_round(finished, monkeypatch, capsys):
    assert run(monkeypatch, "evaluate", finished) == 0
    result = json.loads((finished / "evaluation.json").read_text())
    assert 0 <= result["cnn_accuracy"] <= 1
    assert result["real_test_images"] == 360
    assert f"{result['cnn_accuracy']:.4f}" in capsys.readouterr().out
