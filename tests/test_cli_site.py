"""`fl-dpgan site init`: it writes a file that loads, and never over another."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fl_dpgan import cli
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.site_file import load_site


def init(monkeypatch, path: Path, *, name: object = "north", size: object = 480) -> int:
    arguments = ["site", "init", "--name", str(name), f"--declared-size={size}", str(path)]
    monkeypatch.setattr(sys, "argv", ["fl-dpgan", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_file_loads_with_every_key_at_its_default(tmp_path, monkeypatch, capsys):
    path = tmp_path / "site.toml"
    assert init(monkeypatch, path) == 0
    assert capsys.readouterr().err == ""
    site = load_site(path)
    assert (site.name, site.ledger, site.budget) == ("north", tmp_path / "ledger.sqlite", "main")
    assert site.policy == Policy(declared_size=480)
    written = tomllib.loads(path.read_text())
    assert set(written["policy"]) == set(Policy.model_fields)


def test_delta_follows_a_large_declared_size(tmp_path, monkeypatch):
    assert init(monkeypatch, tmp_path / "site.toml", size=10**6) == 0
    assert load_site(tmp_path / "site.toml").policy.delta == pytest.approx(1e-7)


def test_every_key_is_explained(tmp_path, monkeypatch):
    assert init(monkeypatch, tmp_path / "site.toml") == 0
    lines = (tmp_path / "site.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) == len(Policy.model_fields) + 3
    assert all(lines[number - 1].startswith("# ") for number in keys)


@pytest.mark.parametrize("content", ["", "mine"])
def test_a_file_that_is_there_is_left_alone(tmp_path, monkeypatch, capsys, content):
    path = tmp_path / "site.toml"
    path.write_text(content)
    assert init(monkeypatch, path) == 2
    assert path.read_text() == content
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and "is there already" in err


@pytest.mark.parametrize(
    "changes",
    [{"name": name} for name in ("", "-north", "north west", "a/b", "n" * 65, 'x"\ny = 1')]
    + [{"size": size} for size in (0, -5, 10**10 + 1)],
)
def test_a_bad_name_or_size_is_one_line_and_exit_2_and_writes_nothing(tmp_path, monkeypatch, capsys, changes):
    path = tmp_path / "site.toml"
    assert init(monkeypatch, path, **changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not path.exists()


def test_a_folder_that_is_missing_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    assert init(monkeypatch, tmp_path / "nowhere" / "site.toml") == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "ray",
        "flwr",
        # site_file -> config, privacy.policy -> privacy.plan -> torch
        "torch",
    ],
)
def test_init_does_not_import(module, tmp_path):
    script = (
        f"import sys\nfrom fl_dpgan import cli\ntry:\n    cli.main()\nfinally:\n    print({module!r} in sys.modules)"
    )
    arguments = ["site", "init", "--name", "north", "--declared-size", "480", str(tmp_path / "site.toml")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False"
