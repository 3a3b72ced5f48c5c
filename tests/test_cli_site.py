"""`fl-dpgan site init` and `site ledger`: a file that loads, its ledger, and never one over another."""

import re
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from conftest import run_cli

from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Charge
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.privacy.verify import verify
from fl_dpgan.site_file import load_site


def init(monkeypatch, path: Path, *, name: object = "north", size: object = 480) -> int:
    return run(monkeypatch, "init", "--name", str(name), f"--declared-size={size}", str(path))


def run(monkeypatch, *arguments: str) -> int:
    return run_cli(monkeypatch, "site", *arguments)


def test_the_file_loads_with_every_key_at_its_default(tmp_path, monkeypatch, capsys):
    path = tmp_path / "site.toml"
    assert init(monkeypatch, path) == 0
    assert capsys.readouterr().err == ""
    site = load_site(path)
    assert (site.name, site.ledger, site.budget) == ("north", tmp_path / "ledger.sqlite", "main")
    defaults = Policy(declared_size=480)
    assert site.policy == defaults.model_copy(update={"order": defaults.ledger_order})
    written = tomllib.loads(path.read_text())
    assert set(written["policy"]) == set(Policy.model_fields)


def test_delta_follows_a_large_declared_size(tmp_path, monkeypatch):
    assert init(monkeypatch, tmp_path / "site.toml", size=10**6) == 0
    assert load_site(tmp_path / "site.toml").policy.delta == pytest.approx(1e-7)


def test_every_key_is_explained(tmp_path, monkeypatch):
    assert init(monkeypatch, tmp_path / "site.toml") == 0
    lines = (tmp_path / "site.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) > len(Policy.model_fields) + 3
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


def test_the_ledger_is_made_on_the_terms_of_the_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "site.toml"
    assert init(monkeypatch, path) == 0
    changes = {"order": "7.0", "eps_max": "4.5", "delta": "2e-06", "unit": '"patient"', "eps_per_run": "2.0"}
    text = path.read_text()
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        assert found == 1
    path.write_text(text)
    capsys.readouterr()
    assert run(monkeypatch, "ledger", str(path)) == 0
    out, err = capsys.readouterr()
    made = tmp_path / "ledger.sqlite"
    account = LedgerReader(made).account
    assert (account.site, account.declared_size, account.unit) == ("north", 480, "patient")
    assert (account.eps_max, account.delta, account.order) == (4.5, 2e-6, 7.0)
    assert account == load_site(path).policy.account("north")
    found = verify(made)
    assert (found.entries, found.budgets[0].epsilon) == (1, 0.0)
    assert err == "" and str(made) in out and found.head in out and "order 7" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.sqlite", "site.toml"]


def test_without_a_path_the_file_is_site_toml_here_and_its_ledger_lies_where_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    least = 'name = "clinic"\nledger = "deep/er/l.sqlite"\n[policy]\ndeclared_size = 900\n'
    Path("site.toml").write_text(least)
    assert run(monkeypatch, "ledger") == 0
    account = LedgerReader(tmp_path / "deep" / "er" / "l.sqlite").account
    assert account == Policy(declared_size=900).account("clinic")


@pytest.mark.parametrize("kind", ["ledger", "spent", "text", "empty", "folder"])
def test_a_ledger_that_is_there_is_left_alone(tmp_path, monkeypatch, capsys, kind):
    path, made = tmp_path / "site.toml", tmp_path / "ledger.sqlite"
    assert init(monkeypatch, path) == 0
    if kind in ("ledger", "spent"):
        assert run(monkeypatch, "ledger", str(path)) == 0
        if kind == "spent":
            with closing(Ledger(made)) as opened:
                opened.charge(Charge(Event(0.1, 1.5, 5), 1.0, "one", 1, "q1", 6.0, "plan"))
    elif kind == "folder":
        made.mkdir()
    else:
        made.write_text("dear officer" if kind == "text" else "")
    before = made.read_bytes() if made.is_file() else None
    capsys.readouterr()
    assert run(monkeypatch, "ledger", str(path)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and str(made) in err and "is there already" in err
    assert (made.read_bytes() if made.is_file() else None) == before


@pytest.mark.parametrize(
    ("text", "says"), [(None, "site init"), ("name = ", "TOML"), ('name = "x"\n[policy]\ndeclared_size = 0\n', "size")]
)
def test_a_site_file_that_is_missing_or_faulty_makes_no_ledger(tmp_path, monkeypatch, capsys, text, says):
    path = tmp_path / "site.toml"
    if text is not None:
        path.write_text(text)
    assert run(monkeypatch, "ledger", str(path)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and says in err
    assert [p.name for p in tmp_path.iterdir()] == ([] if text is None else ["site.toml"])


def test_a_ledger_that_cannot_be_written_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    path = tmp_path / "site.toml"
    path.write_text('name = "x"\nledger = "file/l.sqlite"\n[policy]\ndeclared_size = 9\n')
    assert run(monkeypatch, "ledger", str(path)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["init", "ledger"])
@pytest.mark.parametrize(
    "module",
    [
        "ray",
        "flwr",
        # site_file -> config, privacy.policy -> privacy.plan -> torch
        "torch",
    ],
)
def test_it_does_not_import(module, command, tmp_path, monkeypatch):
    script = (
        f"import sys\nfrom fl_dpgan import cli\ntry:\n    cli.main()\nfinally:\n    print({module!r} in sys.modules)"
    )
    path = tmp_path / "site.toml"
    arguments = ["site", "init", "--name", "north", "--declared-size", "480", str(path)]
    if command == "ledger":
        assert init(monkeypatch, path) == 0
        arguments = ["site", "ledger", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False"
