"""The check of a GPU, tried on the CPU with tiny work; Ray is left out there."""

import json

import pytest
import torch
import typer

from simulations import gpu_check


def test_every_section_is_printed_and_written(tmp_path, capsys):
    file = tmp_path / "report.json"
    with pytest.raises(typer.Exit) as ended:
        gpu_check.main("cpu", 60.0, file)
    printed, report = capsys.readouterr().out, json.loads(file.read_text())
    assert ended.value.exit_code == 0
    assert all(title in printed for title, _, _ in gpu_check.SECTIONS.values())
    assert list(report) == list(gpu_check.SECTIONS)
    assert [row["agree"] for row in report["agreement"]] == [True, True]
    assert {row["a site takes"] for row in report["agreement"]} == {"LayerEngine"}
    assert {"plain", "ours", "hooks", "ew", "functorch", "ghost"} <= {row["step"] for row in report["steps"]}
    assert report["steps"][0]["ms"] > 0
    assert report["simulation"] == [{"note": "skipped: no GPU to share"}]


def test_what_no_time_is_left_for_is_said(tmp_path, capsys):
    file = tmp_path / "report.json"
    with pytest.raises(typer.Exit):
        gpu_check.main("cpu", 0.0, file)
    report = json.loads(file.read_text())
    assert {row["note"] for key in ("steps", "sites", "training") for row in report[key]} == {gpu_check.NO_TIME}


def test_a_section_that_fails_costs_no_other(monkeypatch, capsys):
    def broken(run):
        raise RuntimeError("out of memory\nand more")

    sections = {"broken": ("A broken one", 0.0, broken), "machine": gpu_check.SECTIONS["machine"]}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    assert gpu_check.check(torch.device("cpu"), 1.0, None) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: out of memory" in printed
    assert "torch threads" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    with pytest.raises(typer.Exit) as ended:
        gpu_check.main()
    assert ended.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--device cpu" in said
