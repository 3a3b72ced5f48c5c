import dataclasses
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time

import dp_accounting
import pytest
import torch
from dp_accounting import rdp

from fl_dpgan.errors import BudgetError, LedgerError
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.ledger import Account, Ledger, LedgerRow, StoredAnswer

torch.set_num_threads(1)

ACCOUNT = Account(site="north", declared_size=500, eps_max=8.0, delta=1e-5, order=6.0)

_CHARGE = """
import sys, time, os, signal
from pathlib import Path
from fl_dpgan.errors import BudgetError
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.ledger import Account, Ledger, LedgerRow
path, name, charges = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ledger = Ledger(path)
ledger.steps_left(Event(0.1, 1.5, 1))  # imports what accounting needs
(path.parent / name).touch()
while not (path.parent / "go").exists():
    time.sleep(0.005)
for i in range(charges):
    try:
        ledger.charge(LedgerRow(Event(0.1, 1.5, 10), 1.0, "run", i, f"{name}-{i}", "plan"))
        print(f"{name}-{i}", flush=True)
    except BudgetError:
        pass
os.kill(os.getpid(), signal.SIGKILL)  # nothing is left to a clean end
"""


def row(count=5, *, run="run", sigma=1.5, request="request"):
    return LedgerRow(Event(0.1, sigma, count), 1.0, run, 1, request, "plan")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site.sqlite"


@pytest.fixture
def ledger(path):
    opened = Ledger(path, ACCOUNT)
    yield opened
    opened.close()


def expected_epsilon(events):
    accountant = rdp.RdpAccountant(orders=[ACCOUNT.order])
    for e in events:
        gaussian = dp_accounting.GaussianDpEvent(e.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(e.sample_rate, gaussian), e.count)
    return accountant.get_epsilon(ACCOUNT.delta)


def raw_events(path):
    with sqlite3.connect(path) as other:
        return other.execute("SELECT sample_rate, noise_multiplier, count FROM events ORDER BY seq").fetchall()


def test_invariant_2_an_event_is_seen_by_another_connection_when_charge_returns(path, ledger):
    ledger.charge(row(5))
    assert raw_events(path) == [(0.1, 1.5, 5)]
    other = Ledger(path)
    assert other.rows() == [row(5)]
    other.close()


def test_invariant_2_the_file_is_synced_at_every_commit(ledger):
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_invariant_2_and_6_two_killed_processes_lose_no_event_and_never_pass_the_cap(path, ledger):
    fits = ledger.steps_left(Event(0.1, 1.5, 1)) // 10
    assert 3 <= fits <= 60
    charges = fits // 2 + 3  # together more than fit
    command = [sys.executable, "-c", _CHARGE, str(path)]
    workers = [
        subprocess.Popen([*command, name, str(charges)], stdout=subprocess.PIPE, text=True) for name in ("one", "two")
    ]
    try:
        deadline = time.monotonic() + 120
        while not all((path.parent / name).exists() for name in ("one", "two")):
            assert time.monotonic() < deadline and all(w.poll() is None for w in workers)
            time.sleep(0.01)
        (path.parent / "go").touch()
        acknowledged = [w.communicate(timeout=120)[0].split() for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [-signal.SIGKILL] * 2
    assert sorted(r.request for r in ledger.rows()) == sorted(acknowledged[0] + acknowledged[1])
    assert len(ledger.rows()) == fits
    assert ledger.epsilon() <= ACCOUNT.eps_max
    assert ledger.steps_left(Event(0.1, 1.5, 1)) < 10


def test_invariant_3_epsilon_is_recomputed_from_the_events_as_dp_accounting_does(path, ledger):
    assert ledger.epsilon() == 0
    rows = [row(5), row(20, run="other", sigma=3.0), row(2, sigma=1.1)]
    for r in rows:
        ledger.charge(r)
    assert ledger.epsilon() == pytest.approx(expected_epsilon([r.event for r in rows]), rel=1e-3)
    assert ledger.epsilon("other") == pytest.approx(expected_epsilon([rows[1].event]), rel=1e-3)
    with sqlite3.connect(path) as other:
        columns = {c[1] for table in ("account", "events") for c in other.execute(f"PRAGMA table_info({table})")}
    assert not any("epsilon" in c for c in columns)


def test_invariant_6_a_charge_past_the_cap_says_how_many_steps_fit_and_writes_nothing(path, ledger):
    ledger.charge(row(7))
    fits = ledger.steps_left(row().event)
    before = raw_events(path)
    with pytest.raises(BudgetError, match=rf"{fits + 1} D steps .* north .*; {fits} would still fit"):
        ledger.charge(row(fits + 1))
    assert raw_events(path) == before
    assert expected_epsilon([row(7 + fits + 1).event]) > ACCOUNT.eps_max

    ledger.charge(row(fits))
    assert ledger.epsilon() <= ACCOUNT.eps_max
    with pytest.raises(BudgetError, match="0 would still fit"):
        ledger.charge(row(1))


def test_invariant_6_the_cap_counts_all_runs_together(ledger):
    fits = ledger.steps_left(row().event)
    ledger.charge(row(fits, run="first"))
    with pytest.raises(BudgetError):
        ledger.charge(row(1, run="second"))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET count = 1",
        "DELETE FROM events",
        "UPDATE account SET eps_max = 1000",
        "DELETE FROM account",
    ],
)
def test_events_and_account_can_be_neither_changed_nor_deleted(path, ledger, statement):
    ledger.charge(row(5))
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.IntegrityError, match=r"append-only|fixed"):
        other.execute(statement)
    assert raw_events(path) == [(0.1, 1.5, 5)]
    assert Ledger(path).account == ACCOUNT


@pytest.mark.parametrize(("table", "column"), [("events", "count"), ("account", "eps_max")])
def test_events_and_account_cannot_be_replaced(path, ledger, table, column):
    ledger.charge(row(5))
    with sqlite3.connect(path) as other:
        columns = [c[1] for c in other.execute(f"PRAGMA table_info({table})")]
        changed = ", ".join("1" if c == column else c for c in columns)
        with pytest.raises(sqlite3.IntegrityError):
            other.execute(f"INSERT OR REPLACE INTO {table} SELECT {changed} FROM {table}")


def test_every_event_is_chained_to_the_one_before(path, ledger):
    heads = [ledger.head()]
    for count in (1, 2):
        ledger.charge(row(count))
        heads.append(ledger.head())
    with sqlite3.connect(path) as other:
        chain = other.execute("SELECT previous, hash FROM events ORDER BY seq").fetchall()
    assert chain == [(heads[0], heads[1]), (heads[1], heads[2])]
    assert len(set(heads)) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in heads)


@pytest.mark.parametrize(
    "changes",
    [
        {"site": "south"},
        {"declared_size": 501},
        {"eps_max": 9.0},
        {"delta": 1e-6},
        {"order": 7.0},
        {"unit": "patient"},
        {"relation": "replace one"},
    ],
)
def test_reopening_with_other_terms_is_refused_and_keeps_the_terms(path, ledger, changes):
    with pytest.raises(LedgerError, match="created for other terms"):
        Ledger(path, dataclasses.replace(ACCOUNT, **changes))
    assert Ledger(path).account == ACCOUNT


def test_reopening_with_the_same_terms_keeps_the_events(path, ledger):
    ledger.charge(row(5))
    assert Ledger(path, ACCOUNT).rows() == [row(5)]


@pytest.mark.parametrize("account", [None, ACCOUNT])
def test_a_corrupt_file_is_a_ledger_error(path, account):
    path.write_bytes(b"this is not a database " * 400)
    with pytest.raises(LedgerError, match=re.escape(str(path))):
        Ledger(path, account)


def test_a_ledger_whose_pages_are_overwritten_is_a_ledger_error(path, ledger):
    ledger.charge(row(5))
    ledger.close()  # folds the write-ahead log into the file
    whole = path.read_bytes()
    assert len(whole) > 8192
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(LedgerError, match=re.escape(str(path))):
        Ledger(path, ACCOUNT).epsilon()


def test_another_database_is_a_ledger_error(path):
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE patients (id INTEGER)")
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger(path)


def test_a_ledger_without_its_account_is_a_ledger_error(path, ledger):
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER account_no_delete")
        other.execute("DELETE FROM account")
    other.close()
    with pytest.raises(LedgerError):
        Ledger(path)


@pytest.mark.parametrize("account", [None, ACCOUNT])
def test_a_directory_as_path_is_a_ledger_error(tmp_path, account):
    with pytest.raises(LedgerError):
        Ledger(tmp_path, account)


def test_a_file_as_parent_folder_is_a_ledger_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError):
        Ledger(tmp_path / "file" / "site.sqlite", ACCOUNT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_is_a_ledger_error(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(LedgerError):
        Ledger(folder / "site.sqlite", ACCOUNT)


def test_a_missing_ledger_is_not_created_without_an_account(path):
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(path)
    assert not path.exists()


def test_a_charge_that_cannot_be_written_is_a_ledger_error_and_leaves_no_event(path, ledger):
    ledger._db.execute("PRAGMA query_only = ON")  # as a file system turned read-only would
    with pytest.raises(LedgerError, match="nothing is trained without it"):
        ledger.charge(row(5))
    assert raw_events(path) == []


def test_a_runs_last_answer_is_kept_byte_for_byte_until_the_next(path, ledger):
    assert ledger.last_answer("run") is None
    first = StoredAnswer("a", "digest a", b"\x00body", b"state\xff")
    second = StoredAnswer("b", "digest b", b"", b"")
    ledger.store_answer("run", first)
    ledger.store_answer("other", second)
    assert Ledger(path).last_answer("run") == first
    ledger.store_answer("run", second)
    assert Ledger(path).last_answer("run") == second


def test_rows_and_steps_are_those_of_the_run_asked_for_in_order(ledger):
    for count, run in ((1, "a"), (2, "b"), (3, "a")):
        ledger.charge(row(count, run=run))
    assert [r.event.count for r in ledger.rows()] == [1, 2, 3]
    assert [r.event.count for r in ledger.rows("a")] == [1, 3]
    assert (ledger.steps(), ledger.steps("a"), ledger.steps("none")) == (6, 4, 0)
