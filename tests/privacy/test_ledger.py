import contextlib
import dataclasses
import hashlib
import json
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
from fl_dpgan.privacy.entries import Account, Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger, LedgerReader, StoredAnswer

torch.set_num_threads(1)

ACCOUNT = Account(site="north", declared_size=500, eps_max=8.0, delta=1e-5, order=6.0)

_CHARGE = """
import sys, time, os, signal
from pathlib import Path
from fl_dpgan.errors import BudgetError
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge
from fl_dpgan.privacy.ledger import Ledger
path, name, charges = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ledger = Ledger(path)
ledger.steps_left(Event(0.1, 1.5, 1))  # imports what accounting needs
(path.parent / name).touch()
while not (path.parent / "go").exists():
    time.sleep(0.005)
for i in range(charges):
    try:
        ledger.charge(Charge(Event(0.1, 1.5, 10), 1.0, "run", i, f"{name}-{i}", 100.0, "plan"))
        print(f"{name}-{i}", flush=True)
    except BudgetError:
        pass
os.kill(os.getpid(), signal.SIGKILL)  # nothing is left to a clean end
"""


def row(count=5, *, run="run", sigma=1.5, request="request", share=100.0, budget="main"):
    return Charge(Event(0.1, sigma, count), 1.0, run, 1, request, share, "plan", budget)


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
        found = other.execute("SELECT payload FROM entries WHERE kind = 'charge' ORDER BY seq").fetchall()
    payloads = [json.loads(text) for (text,) in found]
    return [(p["sample_rate"], p["noise_multiplier"], p["count"]) for p in payloads]


def test_invariant_2_an_event_is_seen_by_another_connection_when_charge_returns(path, ledger):
    ledger.charge(row(5))
    assert raw_events(path) == [(0.1, 1.5, 5)]
    other = Ledger(path)
    assert other.charges() == [row(5)]
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
    assert sorted(r.request for r in ledger.charges()) == sorted(acknowledged[0] + acknowledged[1])
    assert len(ledger.charges()) == fits
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
        payloads = [json.loads(text) for (text,) in other.execute("SELECT payload FROM entries")]
    assert not any("epsilon" in key or key == "spent" for payload in payloads for key in payload)


def test_invariant_6_a_charge_past_the_cap_says_how_many_steps_fit_and_writes_nothing(path, ledger):
    ledger.charge(row(7))
    fits = ledger.steps_left(row().event)
    before = raw_events(path)
    with pytest.raises(BudgetError, match=rf"{fits + 1} steps .* north .*; {fits} would still fit"):
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


def test_invariant_6_a_runs_share_is_enforced_beside_the_cap(ledger):
    fits = ledger.steps_left(row().event, run="first", cap=5.0)
    assert 0 < fits < ledger.steps_left(row().event)
    with pytest.raises(BudgetError, match="share of run first"):
        ledger.charge(row(fits + 1, run="first", share=5.0))
    ledger.charge(row(fits, run="first", share=5.0))
    with pytest.raises(BudgetError, match="0 would still fit"):
        ledger.charge(row(1, run="first", share=5.0))
    ledger.charge(row(1, run="second", share=5.0))


def test_invariant_12_a_second_run_continues_the_one_budget_whatever_the_file_is_called(tmp_path, ledger, path):
    ledger.charge(row(5, run="first"))
    ledger.close()
    moved = tmp_path / "renamed" / "anything.sqlite"
    moved.parent.mkdir()
    path.rename(moved)
    again = Ledger(moved, ACCOUNT)
    again.charge(row(5, run="second"))
    assert again.epsilon() == pytest.approx(expected_epsilon([row(10).event]), rel=1e-6)


def test_invariant_12_a_second_budget_is_opened_by_a_declaration_alone(ledger):
    with pytest.raises(LedgerError, match="declare-disjoint"):
        ledger.charge(row(5, budget="archive"))
    ledger.charge(row(5))
    ledger.declare_disjoint(Declaration("archive", 300, "other patients: born after 2020"))
    ledger.charge(row(7, budget="archive"))
    assert ledger.epsilon() == pytest.approx(expected_epsilon([row(5).event]), rel=1e-6)
    assert ledger.epsilon(budget="archive") == pytest.approx(expected_epsilon([row(7).event]), rel=1e-6)
    assert ledger.budgets == {"main": 500, "archive": 300}


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("main", 10, "x"), ("", 10, "x"), ("other", 10, "  "), ("other", 0, "x"), ("other", 10**6, "x")],
)
def test_a_declaration_without_a_name_a_reason_or_a_possible_size_is_refused(ledger, name, size, reason):
    head = ledger.head()
    with pytest.raises(LedgerError):
        ledger.declare_disjoint(Declaration(name, size, reason))
    assert ledger.head() == head


@pytest.mark.parametrize("statement", ["UPDATE entries SET payload = '{}'", "DELETE FROM entries",
                                       "UPDATE entries SET hash = 'x' WHERE seq = 1"])  # fmt: skip
def test_entries_can_be_neither_changed_nor_deleted(path, ledger, statement):
    ledger.charge(row(5))
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        other.execute(statement)
    assert raw_events(path) == [(0.1, 1.5, 5)]
    assert Ledger(path).account == ACCOUNT


@pytest.mark.parametrize("seq", [1, 2])
def test_entries_cannot_be_replaced(path, ledger, seq):
    ledger.charge(row(5))
    with sqlite3.connect(path) as other, pytest.raises(sqlite3.IntegrityError):
        other.execute("INSERT OR REPLACE INTO entries (seq, kind, payload, previous, hash) VALUES (?, 'charge', '{}', "
                      "'', 'new')", (seq,))  # fmt: skip


def test_every_entry_is_chained_to_the_one_before_as_the_format_says(path, ledger):
    for count in (1, 2):
        charged = ledger.charge(row(count))
        assert ledger.head() == charged and ledger.holds(charged)
    assert not ledger.holds("0" * 64)
    with sqlite3.connect(path) as other:
        chain = other.execute("SELECT seq, kind, payload, previous, hash FROM entries ORDER BY seq").fetchall()
    before = "0" * 64
    for number, (seq, kind, payload, previous, found) in enumerate(chain, start=1):
        assert (seq, previous) == (number, before)
        before = hashlib.sha256(f"{seq}\n{kind}\n{payload}\n{previous}".encode()).hexdigest()
        assert found == before
    assert [kind for _, kind, *_ in chain] == ["account", "charge", "charge"]


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
    assert Ledger(path, ACCOUNT).charges() == [row(5)]


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
        other.execute("DROP TRIGGER entries_no_delete")
        other.execute("DELETE FROM entries")
    other.close()
    with pytest.raises(LedgerError):
        Ledger(path)


@pytest.mark.parametrize("account", [None, ACCOUNT])
def test_an_emptied_file_is_a_ledger_error_and_not_a_new_budget(path, ledger, account):
    ledger.charge(row(5))
    ledger.close()
    path.write_bytes(b"")
    with pytest.raises(LedgerError):
        Ledger(path, account)


def test_a_process_killed_while_it_creates_a_ledger_leaves_none(path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            Ledger(path, ACCOUNT)
    assert not path.exists()
    assert Ledger(path, ACCOUNT).charges() == []


def test_a_lone_copy_is_read_and_left_as_it_was(tmp_path, path, ledger):
    ledger.charge(row(5))
    ledger.close()
    copy = tmp_path / "copy" / "site.sqlite"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    reader = LedgerReader(copy)
    assert reader.charges() == [row(5)]
    reader.close()
    assert [p.name for p in copy.parent.iterdir()] == ["site.sqlite"]


def test_a_locked_ledger_is_a_ledger_error_and_nothing_is_charged(path, ledger):
    ledger._db.execute("PRAGMA busy_timeout = 50")
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            ledger.charge(row(5))
        other.execute("ROLLBACK")
    assert raw_events(path) == []


def test_a_full_disk_is_a_ledger_error_and_nothing_is_charged(path, ledger):
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    outcomes = []
    for _ in range(200):
        try:
            outcomes.append(ledger.charge(row(1, sigma=50.0, request="r" * 200)))
        except LedgerError as error:
            outcomes.append(str(error))
            break
    assert "full" in outcomes[-1]
    assert len(raw_events(path)) == len(outcomes) - 1


def test_a_clock_that_goes_backwards_changes_nothing(path, ledger, monkeypatch):
    ledger.charge(row(5))
    monkeypatch.setattr(time, "time", lambda: 5.0)
    ledger.charge(row(7))
    assert ledger.epsilon() == pytest.approx(expected_epsilon([row(12).event]), rel=1e-6)
    assert [c.event.count for c in ledger.charges()] == [5, 7]


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
    first = StoredAnswer("a", "digest a", "header", b"\x00body", b"state\xff")
    second = StoredAnswer("b", "digest b", "", b"", b"")
    charged = [ledger.charge(row(1)) for _ in range(3)]
    ledger.store_answer("run", first, charged[0])
    ledger.store_answer("other", second, charged[1])
    assert Ledger(path).last_answer("run") == first
    assert Ledger(path).last_answer("run", "evaluation_count") is None
    ledger.store_answer("run", second, charged[2])
    assert Ledger(path).last_answer("run") == second


def test_a_charge_without_a_stored_answer_is_shown_as_unknown_and_stays_charged(ledger):
    charged = [ledger.charge(row(count)) for count in (1, 2, 3)]
    ledger.store_answer("run", StoredAnswer("a", "d", "h", b"b", b"s"), charged[1])
    assert ledger.counts() == (3, 2)
    assert ledger.steps() == 6
    (release,) = ledger.payloads("release")
    assert release["event"] == 3  # entry 1 is the account
    assert release["digest"] == hashlib.sha256(b"h\0b").hexdigest()


def test_rows_and_steps_are_those_of_the_run_asked_for_in_order(ledger):
    for count, run in ((1, "a"), (2, "b"), (3, "a")):
        ledger.charge(row(count, run=run))
    assert [r.event.count for r in ledger.charges()] == [1, 2, 3]
    assert [r.event.count for r in ledger.charges("a")] == [1, 3]
    assert (ledger.steps(), ledger.steps("a"), ledger.steps("none")) == (6, 4, 0)


def test_a_ledger_and_what_sqlite_puts_beside_it_are_for_the_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        with contextlib.closing(Ledger(tmp_path / "l.sqlite", ACCOUNT)) as ledger:
            ledger.charge(row())
            files = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert {"l.sqlite", "l.sqlite-wal"} <= files.keys() and set(files.values()) == {0o600}


def test_a_reader_makes_no_ledger(path):
    with pytest.raises(LedgerError, match="no ledger at"):
        LedgerReader(path)
    assert not path.exists()


def test_a_ledger_of_another_format_is_not_read_as_one_of_this(path, ledger):
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER entries_no_update")
        other.execute("UPDATE entries SET payload = json_set(payload, '$.format', 2)")
    for kind in (Ledger, LedgerReader):
        with pytest.raises(LedgerError, match="another format than 1"):
            kind(path)


def test_a_ledger_that_was_written_to_while_it_was_read_as_a_lone_copy_is_not_to_be_believed(path, ledger):
    ledger.charge(row(1))
    ledger.close()
    untouched, reader = LedgerReader(path), LedgerReader(path)
    assert reader.steps() == 1
    untouched.close()
    with contextlib.closing(Ledger(path)) as again:
        again.charge(row(2))
    with pytest.raises(LedgerError, match="was written to while it was read"):
        reader.close()


def test_the_last_charge_is_the_newest_of_an_update_and_of_others_only_where_there_is_none(ledger):
    assert ledger.last_charge() is None
    counts = [dataclasses.replace(row(1, request=str(n)), event=Event(1.0, 9.0, 1, "evaluation_count")) for n in (1, 2)]
    ledger.charge(counts[0])
    assert ledger.last_charge() == counts[0]
    ledger.charge(row(3, request="update"))
    ledger.charge(counts[1])
    assert ledger.last_charge() == row(3, request="update")
    ledger.charge(dataclasses.replace(row(1), event=Event(1.0, 9.0, 1, "image_gradient")))
    assert ledger.last_charge().event.mechanism == "image_gradient"
    assert ledger.last_charge("2027") is None


def test_a_declared_size_may_be_one_and_up_to_what_the_ledgers_delta_allows(ledger):
    ledger.declare_disjoint(Declaration("least", 1, "a single patient"))
    ledger.declare_disjoint(Declaration("most", 10_000, "delta = 1e-5 is 1/(10 N^)"))
    with pytest.raises(LedgerError, match="may be at most"):
        ledger.declare_disjoint(Declaration("more", 10_001, "x"))
    assert ledger.budgets == {"main": 500, "least": 1, "most": 10_000}


def test_of_two_processes_that_create_a_ledger_the_second_opens_the_firsts(path, monkeypatch):
    link = os.link

    def too_late(source, target):
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            patch.setattr(os, "getpid", lambda: 1)  # the first one's, whose file has another name until it is done
            Ledger(path, ACCOUNT).charge(row(3))
        link(source, target)

    monkeypatch.setattr(os, "link", too_late)
    with contextlib.closing(Ledger(path, ACCOUNT)) as second:
        assert second.steps() == 3
    assert not list(path.parent.glob("*.new"))


def test_a_charge_that_somebody_elses_trigger_takes_out_again_is_no_charge(path, ledger):
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER entries_no_delete")
        other.execute("CREATE TRIGGER gone AFTER INSERT ON entries BEGIN DELETE FROM entries WHERE seq = NEW.seq; END")
    with pytest.raises(LedgerError, match="did not keep a charge"):
        ledger.charge(row(1))


def test_a_ledger_in_folders_that_are_not_there_yet_makes_them(tmp_path):
    with contextlib.closing(Ledger(tmp_path / "a" / "b" / "l.sqlite", ACCOUNT)) as ledger:
        assert ledger.account == ACCOUNT


def test_steps_that_fit_a_share_are_counted_from_what_its_run_has_spent(ledger):
    event = Event(0.1, 1.5, 1)
    ledger.charge(row(20, run="other"))
    cap = expected_epsilon([Event(0.1, 1.5, 40)]) * (1 + 1e-9)
    assert ledger.steps_left(event, run="new", cap=cap) == 40
    assert ledger.steps_left(event, run="other", cap=cap) == 20
    assert ledger.steps_left(event, cap=cap) == 20
    ledger.charge(row(40, run="new", share=cap))  # all of its share, to the last step
    with pytest.raises(BudgetError, match=r"share of run new .* 0 would still fit"):
        ledger.charge(row(1, run="new", share=cap))


def test_opening_a_ledger_that_is_there_makes_no_other_first(path, ledger, monkeypatch):
    monkeypatch.setattr(Ledger, "_create", None)
    with contextlib.closing(Ledger(path, ACCOUNT)) as again:
        assert again.account == ACCOUNT


def test_a_stored_answer_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoredAnswer("request", "digest", "header", b"body", b"state").body = b"another"


def test_a_request_counts_as_answered_once_its_answer_is_stored_and_for_ever(ledger):
    heads = [ledger.charge(row(request=name)) for name in ("first", "second")]
    assert not ledger.answered("first") and not ledger.answered("second")
    for name, head in zip(("first", "second"), heads, strict=True):
        ledger.store_answer("run", StoredAnswer(name, "0" * 64, "header", b"body", b""), head)
        assert ledger.answered(name)
    assert ledger.answered("first") and not ledger.answered("third")
    ledger.charge(row(request="fourth"))
    assert not ledger.answered("fourth")  # charged: its answer may never have been made
