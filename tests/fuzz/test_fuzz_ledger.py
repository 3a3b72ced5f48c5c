"""Whatever a ledger's file holds is shown or is a typed error, to those who show it and to the verifier."""

import json
import sqlite3
from contextlib import closing
from random import Random

import pytest
from mangle import changed_json, mangled, survey

from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger, LedgerReader, StoredAnswer
from fl_dpgan.privacy.verify import verify
from fl_dpgan.report.budgets import budget_rows, budget_table, events_of, events_table
from fl_dpgan.report.export import as_csv, as_json

#: An event beyond the accountant's range is an error of its own.
WORDS = {"read", "LedgerError", "ConfigError"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> bytes:
    """A ledger's file with an entry of each kind."""
    path = tmp_path_factory.mktemp("ledger") / "l.sqlite"
    with closing(Ledger(path, Account("north", 500, 10.0, 1e-5, 8.0))) as ledger:
        ledger.declare_disjoint(Declaration("2027", 300, "patients first seen in 2027"))
        for number, budget in enumerate(("main", "2027", "main")):
            charge = Charge(Event(0.1, 2.0, 5), 1.0, "run", number, f"run/{number}", 10.0, "plan", budget)
            head = ledger.charge(charge)
            ledger.store_answer("run", StoredAnswer(f"run/{number}", "d", "{}", b"body", b"state"), head)
    return path.read_bytes()


def shown(path) -> None:
    """All that is shown of a ledger without verifying it first."""
    budget_table(budget_rows(path))
    events_table(events_of(path), "events")
    as_json(path)
    as_csv(path)
    with closing(LedgerReader(path)) as ledger:
        ledger.last_answer("run")
        ledger.holds("a" * 64)


def changed_entry(random: Random, content: bytes) -> bytes:
    """The file with another payload or kind in an entry, as one who edits it with SQLite would have it."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        # as a file without a log, which a database in memory cannot have
        db.deserialize(content[:18] + b"\x01\x01" + content[20:])
        for name in ("entries_no_update", "entries_no_delete", "entries_no_replace"):
            db.execute(f"DROP TRIGGER {name}")
        entries = db.execute("SELECT seq, payload FROM entries").fetchall()
        seq, payload = random.choice(entries)
        text = changed_json(random, json.loads(payload)).decode("utf-8", "replace")
        try:
            if random.random() < 0.8:
                db.execute("UPDATE entries SET payload = ? WHERE seq = ?", (text, seq))
            else:
                kind = random.choice(["account", "charge", "release", "disjoint", "", "x"])
                db.execute("UPDATE entries SET kind = ? WHERE seq = ?", (kind, seq))
        except sqlite3.Error:  # its computed columns refuse what is not JSON
            db.execute("DELETE FROM entries WHERE seq = ?", (seq,))
        return db.serialize()


@pytest.mark.parametrize(
    "read", [shown, verify, lambda path: Ledger(path).close()], ids=["shown", "verified", "opened"]
)
def test_a_malformed_ledger_is_read_or_refused(kept, tmp_path, read, thorough):
    path = tmp_path / "l.sqlite"

    def parse(content):
        path.write_bytes(content)
        try:
            read(path)
        finally:
            for end in ("-wal", "-shm", "-journal"):
                path.with_name(path.name + end).unlink(missing_ok=True)

    def make(random):
        if random.random() < 0.5:
            return changed_entry(random, kept)
        if random.random() < 0.5:  # the last page with the entries' text, else anywhere
            at = kept.rindex(b'"mechanism"') // 4096 * 4096
            return kept[:at] + mangled(random, [kept[at : at + 4096]], head=4096)[:4096] + kept[at + 4096 :]
        return mangled(random, [kept], head=200)

    parse(kept)
    tally = survey(parse, make, thorough)
    assert tally["LedgerError"] and set(tally) <= WORDS
