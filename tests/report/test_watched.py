"""What the coordinator sees of a run follows from the accepted plans and the round log, whatever the log's epsilon."""

import json
import os
from datetime import UTC, datetime, timedelta

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant
from flwr.app import Message
from rich.console import Console

from fl_dpgan.config import Federation
from fl_dpgan.errors import RunFolderError
from fl_dpgan.report.watched import overview, page
from fl_dpgan.runs import RunFolder

SETTINGS = Federation(classes=("a", "b"), address="x.org:1", model={"num_classes": 2}, training={"rounds": 3})


def finished(fed, tmp_path, grid=None) -> RunFolder:
    """The folder of a run of this federation, as a deployment leaves it at the server."""
    described = RunFolder.create(tmp_path / "described", SETTINGS)
    fed.strategy().start(grid or fed.grid())
    (described.path / "scenario.json").rename(fed.path / "scenario.json")
    return RunFolder.open(fed.path)


def printed(view) -> str:
    console = Console(width=120, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(page(view))
    return console.export_text()


def expected_epsilon(q: float, sigma: float, steps: int, order: float, delta: float) -> float:
    accountant = RdpAccountant([order])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(delta)


def test_epsilon_is_recomputed_from_the_plan_and_not_read_from_the_log(federation, tmp_path):
    folder = finished(federation(rounds=3), tmp_path)
    log = folder.path / "rounds.jsonl"
    log.write_text(log.read_text().replace('"epsilon"', '"epsilon_said"').replace('"epsilon_max"', '"no"'))
    meta = folder.load_checkpoint()[1]
    view = overview(folder)
    assert (view.round, view.rounds, list(view.sites)) == (3, 3, ["site-0", "site-1"])
    for name, site in view.sites.items():
        plan = meta["sites"][name]["plan"]
        wanted = expected_epsilon(4 / 40, plan["noise_multiplier"], 3 * 2, plan["order"], plan["delta"])
        assert site.epsilon == pytest.approx(wanted, rel=1e-6)
        assert (site.steps, site.status, site.seen_round, site.eps_max) == (6, "trained", 3, 10.0)
    text = printed(view)
    assert "round 3 of 3" in text and text.count("trained") == 2


def test_a_silent_site_was_last_seen_when_it_answered_and_stays_charged(federation, tmp_path):
    fed = federation(rounds=3)
    grid = fed.grid()
    answers, asked = grid.handlers[11], []

    def fading(message: Message) -> Message | None:
        asked.append(message)
        return answers(message) if len(asked) <= 2 else None  # the introduction and one round

    grid.handlers[11] = fading
    view = overview(finished(fed, tmp_path, grid))
    assert (view.sites["site-1"].status, view.sites["site-1"].seen_round) == ("silent", 1)
    assert view.sites["site-1"].steps == view.sites["site-0"].steps == 6
    assert view.refusals == [f"round {n}: site-1 silent: no answer in time" for n in (2, 3)]
    assert "round 3: site-1 silent: no answer in time" in printed(view)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", SETTINGS)


def record(number: int, status: str = "trained", reason: str = "", **more):
    return {"round": number, "sites": {"north": {"status": status, "reason": reason}}, **more}


def test_times_of_day_come_from_the_records_and_else_from_the_files_newest_line(folder):
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    folder.log_round(record(1, time=(now - timedelta(hours=2)).isoformat()))
    folder.log_round(record(2, "silent", "no answer in time", time="2026-05-01T11:58:00"))  # taken as UTC
    view = overview(folder, now)
    assert (view.sites["north"].seen_round, view.sites["north"].seen_ago, view.ago) == (1, 7200, 120)
    assert "round 1, 2 h ago" in printed(view) and "2 min ago" in printed(view)
    folder.log_round(record(3))
    os.utime(folder.path / "rounds.jsonl", (now.timestamp() - 5,) * 2)
    view = overview(folder, now)
    assert (view.sites["north"].seen_round, view.sites["north"].seen_ago) == (3, 5)
    folder.log_round(record(4, time="yesterday"))
    assert overview(folder, now).sites["north"].seen_round == 4


def test_refusals_those_who_did_not_join_and_the_end_are_shown(folder):
    folder.log_round({"round": 0, "not_joined": ["another node calls itself north too"]})
    folder.log_round(record(1, "refused", "eps_per_run is 2"))
    text = printed(overview(folder))
    assert "not joined: another node calls itself north too" in text
    assert "round 1: north refused: eps_per_run is 2" in text
    folder.log_round(record(2, "withdrawn", "the budget is spent", stopped="1 sites have budget left"))
    assert "stopped: 1 sites have budget left" in printed(overview(folder))


def test_a_run_before_its_first_round_has_a_page(folder):
    view = overview(folder)
    assert (view.round, view.sites, view.ago) == (0, {}, None)
    assert "round 0 of 3" in printed(view)


def test_nothing_that_a_site_says_acts_on_the_terminal(folder):
    folder.log_round(record(1, "refused", "\x1b]0;owned\x07[red]x[/red]\u202eabc"))
    text = printed(overview(folder))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "[red]x[/red]" in text


def test_a_damaged_checkpoint_is_named(folder):
    (folder.path / "checkpoint.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(RunFolderError, match="damaged"):
        overview(folder)
    assert json.loads((folder.path / "scenario.json").read_text())["federation"]["address"] == "x.org:1"
