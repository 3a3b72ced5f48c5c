"""`fl-dpgan budget ...` and `report`: what a data-protection officer types, and what they may get wrong."""

import csv
import dataclasses
import io
import json
import math
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from conftest import run_cli as run

from fl_dpgan.config import load_scenario
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge
from fl_dpgan.privacy.ledger import Ledger, StoredAnswer
from fl_dpgan.runs import RunFolder

ACCOUNT = Account(site="north", declared_size=500, eps_max=8.0, delta=1e-5, order=6.0)


def fill(path: Path, counts=(5, 3), *, site: str = "north", budget: str = "main") -> Path:
    with closing(Ledger(path, dataclasses.replace(ACCOUNT, site=site))) as ledger:
        for number, count in enumerate(counts, start=1):
            head = ledger.charge(Charge(Event(0.1, 1.5, count), 1.0, "one", number, f"q{number}", 6.0, "plan", budget))
        if counts:
            ledger.store_answer("one", StoredAnswer("a", "d", "h", b"", b""), head)
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return fill(tmp_path / "north.sqlite")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint and two sites' ledgers, made without training."""
    scenario = load_scenario("digits")
    folder = RunFolder.create(tmp_path / "run", scenario)
    FedDPGAN(scenario, *from_config(scenario.model, scenario.seed), folder=folder, run="test")._checkpoint(1)
    for number, counts in enumerate([(5,), (5, 7)]):
        fill(folder.ledger(f"site-{number}"), counts, site=f"site-{number}")
    return folder.path


def refused(capsys, *says: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for words in says:
        assert words in err


def test_a_runs_folder_is_shown_a_row_a_site(finished, monkeypatch, capsys):
    assert run(monkeypatch, "budget", finished) == 0
    out, err = capsys.readouterr()
    assert "site-0" in out and "site-1" in out and err == ""
    assert run(monkeypatch, "budget", finished, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["site"], row["d_steps"]) for row in rows] == [("site-0", 5), ("site-1", 12)]


def test_several_ledgers_are_shown_together_and_show_may_be_written_out(ledger, tmp_path, monkeypatch, capsys):
    other = fill(tmp_path / "south.sqlite", (9,), site="south")
    for command in (["budget"], ["budget", "show"]):
        assert run(monkeypatch, *command, ledger, other, "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["site"], row["d_steps"]) for row in rows] == [("north", 8), ("south", 9)]


def test_the_table_rounds_what_is_spent_up_and_is_not_cut_at_80_columns(ledger, monkeypatch, capsys):
    assert run(monkeypatch, "budget", ledger, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "budget", ledger) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    figures = next(line for line in out.splitlines() if "north" in line).split()
    assert row["spent"] <= float(figures[1]) < row["spent"] + 1.1e-4
    assert row["remaining"] - 1.1e-4 < float(figures[2]) <= row["remaining"]
    assert figures[4:7] == ["2", "8", "1"]
    assert figures[-1] == str(row["rounds_left"])


def test_events_are_listed_as_a_table_and_as_json(ledger, monkeypatch, capsys):
    assert run(monkeypatch, "budget", ledger, "--events") == 0
    out = capsys.readouterr().out
    assert "stored" in out and "unknown" in out
    assert run(monkeypatch, "budget", ledger, "--events", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    events = found["events"][str(ledger)]
    assert [(e["count"], e["released"]) for e in events] == [(5, False), (3, True)]
    assert events[-1]["spent"] == pytest.approx(found["budgets"][0]["spent"], rel=1e-12)


def test_a_lone_copy_that_cannot_be_written_is_shown_and_verified_and_left_alone(ledger, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "copy"
    folder.mkdir()
    copy = Path(shutil.copy(ledger, folder))
    copy.chmod(0o400)
    folder.chmod(0o500)
    try:
        before = copy.read_bytes()
        for command in (["budget"], ["budget", "verify"], ["budget", "export"]):
            assert run(monkeypatch, *command, copy) == 0
        assert capsys.readouterr().err == ""
        assert [p.name for p in folder.iterdir()] == ["north.sqlite"]
        assert copy.read_bytes() == before
    finally:
        folder.chmod(0o700)


def test_a_ledger_in_use_is_shown_with_its_newest_entry(ledger, monkeypatch, capsys):
    with closing(Ledger(ledger)) as opened:
        opened.charge(Charge(Event(0.1, 1.5, 4), 1.0, "one", 3, "q3", 6.0, "plan"))
        assert ledger.with_name(ledger.name + "-wal").exists()
        assert run(monkeypatch, "budget", ledger, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["d_steps"] == 12


@pytest.mark.parametrize("command", ["show", "verify", "export", "declare-disjoint"])
@pytest.mark.parametrize("kind", ["missing", "text", "folder", "other database", "cut short"])
def test_what_is_no_ledger_is_one_line_and_exit_2(command, kind, ledger, tmp_path, monkeypatch, capsys):
    path = tmp_path / "it"
    if kind == "text":
        path.write_text("dear officer, " * 400)
    elif kind == "folder":
        path.mkdir()
    elif kind == "other database":
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE patients (id INTEGER)")
    elif kind == "cut short":
        path.write_bytes(ledger.read_bytes()[:5000])
    more = ["--name", "x", "--reason", "x", "--declared-size", 9] if command == "declare-disjoint" else []
    assert run(monkeypatch, "budget", command, path, *more) == 2
    refused(capsys, str(path))
    assert path.exists() == (kind != "missing")


def test_one_bad_path_among_good_ones_shows_nothing(ledger, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "budget", ledger, tmp_path / "gone.sqlite") == 2
    refused(capsys, "gone.sqlite")


def test_verify_prints_the_figures_that_budget_shows_and_the_head(ledger, monkeypatch, capsys):
    assert run(monkeypatch, "budget", ledger, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "budget", "verify", ledger) == 0
    out = capsys.readouterr().out
    assert "verifies: 4 entries" in out
    shown = math.ceil(row["spent"] * 1e6) / 1e6  # rounded up: what is spent is never shown as less
    assert row["spent"] <= shown < row["spent"] + 1e-6
    assert f"epsilon {shown:.6f} from 2 events, 8 D steps" in out
    assert row["head"] in out and "--anchor" in out


def test_verify_accepts_an_earlier_head_and_refuses_that_of_a_newer_copy(ledger, tmp_path, monkeypatch, capsys):
    older = Path(shutil.copy(ledger, tmp_path / "older.sqlite"))
    with closing(Ledger(ledger)) as opened:
        earlier = opened.head()
        newer = opened.charge(Charge(Event(0.1, 1.5, 1), 1.0, "one", 3, "q3", 6.0, "plan"))
    for anchor in (earlier, newer):
        assert run(monkeypatch, "budget", "verify", ledger, "--anchor", anchor) == 0
    assert "without --anchor" not in capsys.readouterr().out
    assert run(monkeypatch, "budget", "verify", older, "--anchor", newer) == 2
    refused(capsys, "anchor")
    assert run(monkeypatch, "budget", "verify", older, "--anchor", "not a hash") == 2
    refused(capsys, "64 hex digits")


def test_verify_refuses_an_edited_ledger(ledger, monkeypatch, capsys):
    with closing(sqlite3.connect(ledger)) as other:
        (trigger,) = other.execute("SELECT sql FROM sqlite_master WHERE name = 'entries_no_update'").fetchone()
        other.execute("DROP TRIGGER entries_no_update")
        other.execute("""UPDATE entries SET payload = replace(payload, '"count":5', '"count":4') WHERE seq = 2""")
        other.execute(trigger)
        other.commit()
    assert run(monkeypatch, "budget", "verify", ledger) == 2
    refused(capsys, "entry 2", "own hash")


def test_export_prints_json_or_csv_and_nothing_else(ledger, monkeypatch, capsys):
    assert run(monkeypatch, "budget", "export", ledger) == 0
    assert [c["count"] for c in json.loads(capsys.readouterr().out)["charges"]] == [5, 3]
    assert run(monkeypatch, "budget", "export", ledger, "--format", "csv") == 0
    out, err = capsys.readouterr()
    assert [row["count"] for row in csv.DictReader(io.StringIO(out))] == ["5", "3"]
    assert err == ""


def test_plan_prints_a_table_or_json(monkeypatch, capsys):
    options = ["--records", 1000, "--rate", 0.05, "--rounds", 2, "--d-steps", 5, "--eps", 2]
    assert run(monkeypatch, "budget", "plan", *options) == 0
    out, err = capsys.readouterr()
    assert "sigma = " in out and "…" not in out and err == ""
    assert run(monkeypatch, "budget", "plan", *options, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert f"sigma = {plan['noise_multiplier']:.4f}" in out
    assert 1.99 <= plan["tenths"][-1]["epsilon"] <= 2
    assert run(monkeypatch, "budget", "plan", *options, "--moments", 4) == 0
    assert "moment release with sigma = 4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "extra", [[], ["--eps", 1, "--sigma", 1], ["--sigma", 1, "--delta", 0.1], ["--eps", "nan"], ["--sigma", "-1"]]
)
def test_an_impossible_plan_is_one_line_and_exit_2(extra, monkeypatch, capsys):
    options = ["--records", 1000, "--rate", 0.05, "--rounds", 2, "--d-steps", 5, *extra]
    assert run(monkeypatch, "budget", "plan", *options) == 2
    refused(capsys)


def declare(monkeypatch, ledger: Path, *, name="archive", reason="born after 2020", size=300) -> int:
    options = ["--name", name, "--reason", reason, "--declared-size", size]
    return run(monkeypatch, "budget", "declare-disjoint", ledger, *options)


def test_a_declared_budget_has_a_row_of_its_own(ledger, monkeypatch, capsys):
    assert declare(monkeypatch, ledger) == 0
    fill(ledger, (2,), budget="archive")
    capsys.readouterr()
    assert run(monkeypatch, "budget", ledger, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["budget"], r["declared_size"], r["d_steps"]) for r in rows] == [("main", 500, 8), ("archive", 300, 2)]
    assert run(monkeypatch, "budget", ledger) == 0
    assert "archive" in capsys.readouterr().out
    assert run(monkeypatch, "budget", "verify", ledger) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"reason": " "}, {"reason": ""}, {"name": ""}, {"name": "main"}, {"size": 10**6}]
    + [{"name": name} for name in ("a b", "n" * 65, ".a", "\u00e4", "a\n", "a/b", "\x1b[31m", "\u202ea")],
)
def test_a_declaration_without_reason_name_or_possible_size_changes_nothing(wrong, ledger, monkeypatch, capsys):
    assert declare(monkeypatch, ledger, **wrong) == 2
    refused(capsys)
    with closing(Ledger(ledger)) as opened:
        assert opened.budgets == {"main": 500}


def test_a_declared_name_may_have_64_letters_digits_points_and_dashes(ledger, monkeypatch, capsys):
    name = "A-2_b.c" + "9" * 57
    assert declare(monkeypatch, ledger, name=name) == 0
    assert run(monkeypatch, "budget", "verify", ledger) == 0
    assert f"budget {name}: epsilon 0.000000 from 0 events" in capsys.readouterr().out


def test_report_writes_one_file_with_every_site(finished, monkeypatch, capsys):
    assert run(monkeypatch, "report", finished) == 0
    assert "report.html" in capsys.readouterr().out
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "site-0" in page and "site-1" in page


_WATCH = """
import sys
from fl_dpgan import cli
try:
    cli.main()
finally:
    print(sorted({"torch", "ray", "flwr"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], ["--events"], ["verify"], ["export"], ["export", "--format", "csv"]])
def test_reading_a_ledger_imports_neither_torch_nor_ray_nor_flower(command, ledger):
    arguments = [sys.executable, "-c", _WATCH, "budget", *command, str(ledger)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"
