"""Rows and events of ledgers, against dp-accounting and against what can really be charged."""

from contextlib import closing
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import rdp

from fl_dpgan.errors import BudgetError, LedgerError
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger, StoredAnswer
from fl_dpgan.report.budgets import budget_rows, events_of, ledgers_of

ACCOUNT = Account(site="north", declared_size=500, eps_max=8.0, delta=1e-5, order=6.0)


def charge(count=5, *, run="one", sigma=1.5, rate=0.1, share=100.0, budget="main", what="discriminator_update", c=1.0):
    return Charge(Event(rate, sigma, count, what), c, run, 1, "request", share, "plan", budget)


def fill(path: Path, *charges: Charge, account: Account = ACCOUNT, released=()) -> Path:
    with closing(Ledger(path, account)) as ledger:
        for number, each in enumerate(charges):
            if each.budget not in ledger.budgets:
                ledger.declare_disjoint(Declaration(each.budget, 300, "born later"))
            head = ledger.charge(each)
            if number in released:
                ledger.store_answer(each.run, StoredAnswer("a", "d", "h", b"", b""), head, each.event.mechanism)
    return path


def expected(*charges: Charge, account: Account = ACCOUNT) -> float:
    accountant = rdp.RdpAccountant(orders=[account.order])
    for each in charges:
        step = dp_accounting.GaussianDpEvent(each.event.noise_multiplier)
        if each.event.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(each.event.sample_rate, step)
        accountant.compose(step, each.event.count)
    return accountant.get_epsilon(account.delta)


MIXED = (
    charge(3, run="one", c=0.5),
    charge(1, run="one", rate=1.0, sigma=20.0, what="evaluation_count", c=0.0),
    charge(7, run="two", sigma=2.5, rate=0.05, share=5.0, c=0.75),
    charge(1, run="two", rate=1.0, sigma=30.0, what="evaluation_count", share=5.0, c=0.0),
)


def test_a_rows_figures_are_those_of_dp_accounting(tmp_path):
    (row,) = budget_rows(fill(tmp_path / "a.sqlite", *MIXED, released=(0, 2)))
    assert row["spent"] == pytest.approx(expected(*MIXED), rel=1e-6)
    assert row["remaining"] == pytest.approx(8.0 - expected(*MIXED), rel=1e-6)
    assert row["run_spent"] == pytest.approx(expected(*MIXED[2:]), rel=1e-6)
    given = {"site": "north", "budget": "main", "unit": "image", "declared_size": 500, "eps_max": 8.0, "delta": 1e-5,
             "order": 6.0, "events": 4, "d_steps": 10, "releases_unknown": 2, "run": "two", "share": 5.0,
             "sigma": 2.5, "q": 0.05, "c": 0.75}  # fmt: skip
    assert {key: row[key] for key in given} == given


def test_a_ledger_without_charges_has_spent_nothing_and_has_no_last_run(tmp_path):
    (row,) = budget_rows(fill(tmp_path / "a.sqlite"))
    assert (row["spent"], row["remaining"], row["events"], row["d_steps"]) == (0.0, 8.0, 0, 0)
    assert all(row[key] is None for key in ("run", "run_spent", "share", "sigma", "q", "c", "rounds_left"))


def test_each_budget_has_a_row_of_its_own(tmp_path):
    main, archive = charge(3), charge(7, sigma=2.0, budget="archive")
    rows = budget_rows(fill(tmp_path / "a.sqlite", main, archive, released=(1,)))
    assert [row["budget"] for row in rows] == ["main", "archive"]
    assert [row["spent"] for row in rows] == pytest.approx([expected(main), expected(archive)], rel=1e-6)
    assert [(row["declared_size"], row["d_steps"], row["releases_unknown"]) for row in rows] == [
        (500, 3, 1),
        (300, 7, 0),
    ]


@pytest.mark.parametrize("share", [4.0, 100.0], ids=["share binds", "cap binds"])
@pytest.mark.parametrize("other", [(), (charge(20, run="before", sigma=2.0),)], ids=["alone", "after another run"])
def test_the_rounds_left_fit_and_one_more_does_not(tmp_path, share, other):
    each = charge(5, run="now", share=share)
    path = fill(tmp_path / "a.sqlite", *other, each)
    left = budget_rows(path)[0]["rounds_left"]
    assert left > 0
    fill(path, *[each] * left)
    with pytest.raises(BudgetError):
        fill(path, each)
    assert budget_rows(path)[0]["rounds_left"] == 0
    of_run, in_all = expected(*[each] * (left + 1)), expected(*other, *[each] * (left + 1))
    assert of_run <= share and in_all <= 8.0
    assert expected(*[each] * (left + 2)) > share or expected(*other, *[each] * (left + 2)) > 8.0


def test_each_event_is_given_as_stored_with_what_its_budget_had_spent_after_it(tmp_path):
    charges = (*MIXED[:2], charge(4, budget="archive"), *MIXED[2:], charge(2, budget="archive"))
    events = events_of(fill(tmp_path / "a.sqlite", *charges, released=(1, 2)))
    assert [e["count"] for e in events] == [3, 1, 4, 7, 1, 2]
    assert [e["released"] for e in events] == [False, True, True, False, False, False]
    for number, event in enumerate(events):
        upto = [c for c in charges[: number + 1] if c.budget == event["budget"]]
        assert event["spent"] == pytest.approx(expected(*upto), rel=1e-6)
        wanted = charges[number]
        assert (event["sample_rate"], event["noise_multiplier"]) == (
            wanted.event.sample_rate,
            wanted.event.noise_multiplier,
        )
        assert (event["run"], event["clipping_norm"]) == (wanted.run, wanted.clipping_norm)


def test_the_ledgers_of_a_run_come_in_the_order_of_the_sites_numbers(tmp_path):
    for number in (10, 2, 1):
        fill(tmp_path / "ledgers" / f"site-{number}.sqlite", charge(number))
    (tmp_path / "ledgers" / "site-1.sqlite-old").touch()
    found = ledgers_of(tmp_path)
    assert [p.stem for p in found] == ["site-1", "site-2", "site-10"]
    assert [budget_rows(p)[0]["d_steps"] for p in found] == [1, 2, 10]


@pytest.mark.parametrize("inner", [None, "ledgers"])
def test_a_folder_without_ledgers_is_a_ledger_error(tmp_path, inner):
    if inner:
        (tmp_path / inner).mkdir()
    with pytest.raises(LedgerError, match="holds no ledgers"):
        ledgers_of(tmp_path)


def test_the_last_plan_shown_is_that_of_the_updates_and_of_a_release_where_there_were_none(tmp_path):
    account = Account("north", 1000, 10.0, 1e-5, 8.0)
    release, update = Event(1.0, 4.0, 1, "moment_release"), Event(0.02, 1.5, 5, "image_gradient")
    with closing(Ledger(tmp_path / "north.sqlite", account)) as ledger:
        ledger.charge(Charge(release, 0.0, "run", 1, "a", 10.0, "plan"))
        assert budget_rows(ledger.path)[0]["sigma"] == 4.0
        ledger.charge(Charge(update, 1.0, "run", 1, "b", 10.0, "plan"))
        ledger.charge(Charge(release, 0.0, "run", 2, "c", 10.0, "plan"))
        row = budget_rows(ledger.path)[0]
    assert (row["sigma"], row["q"], row["c"]) == (1.5, 0.02, 1.0)
