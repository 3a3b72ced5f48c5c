"""A site's durable, append-only account of what was spent on its data, in one SQLite file (format: `entries`).

The order is: `charge` (durable when it returns), train, `store_answer` (durable), release. A crash at any instant may
over-count, never under-count. Epsilon is not stored; it is recomputed from the events.
"""

import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl_dpgan.errors import BudgetError, ConfigError, LedgerError
from fl_dpgan.files import sync
from fl_dpgan.privacy.accountant import Event, epsilon_from_rdp, steps_that_fit, total_rdp
from fl_dpgan.privacy.entries import (
    FIRST_PREVIOUS,
    FORMAT,
    MAIN,
    NAME,
    Account,
    Charge,
    Declaration,
    account_of,
    account_payload,
    charge_of,
    charge_payload,
    check,
    declaration_of,
    hash_of,
    text_of,
)
from fl_dpgan.text import printable

_SCHEMA = """
CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, payload TEXT NOT NULL, previous TEXT NOT NULL,
  hash TEXT NOT NULL UNIQUE,
  budget TEXT AS (payload ->> '$.budget'), run TEXT AS (payload ->> '$.run'),
  mechanism TEXT AS (payload ->> '$.mechanism'), sample_rate TEXT AS (payload -> '$.sample_rate'),
  noise_multiplier TEXT AS (payload -> '$.noise_multiplier'), count INTEGER AS (payload ->> '$.count')) STRICT;
CREATE TABLE answers (run TEXT NOT NULL, mechanism TEXT NOT NULL, request TEXT NOT NULL, digest TEXT NOT NULL,
  header TEXT NOT NULL, body BLOB NOT NULL, state BLOB NOT NULL, PRIMARY KEY (run, mechanism)) STRICT;
CREATE INDEX entries_kinds ON entries (kind);
CREATE INDEX entries_costs ON entries (budget, run, mechanism, sample_rate, noise_multiplier, count);
CREATE TRIGGER entries_no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER entries_no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER entries_no_replace BEFORE INSERT ON entries WHEN EXISTS (SELECT 1 FROM entries WHERE seq >= NEW.seq)
BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
"""

# the rates come out as JSON text, which Python reads exactly; SQLite's own reading may be off in the last bit
_COSTS = """SELECT mechanism, sample_rate, noise_multiplier, sum(count) FROM entries WHERE budget = ?"""


@dataclass(frozen=True)
class StoredAnswer:
    """The last answer of a run to one kind of request, kept until the next.

    Attributes:
        request, digest: the request it answers, and that request's digest.
        header, body: the answer, byte for byte. state: what the site needs for the next request.
    """

    request: str
    digest: str
    header: str
    body: bytes
    state: bytes


class LedgerReader:
    """Opens a site's ledger for reading; the file is not touched.

    Raises:
        LedgerError: the file is not a ledger, is damaged, or cannot be read.
    """

    #: The file's state when it was opened as one that nobody writes to.
    _stamp: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}; give the path of a site's .sqlite file")
        # a write-ahead log beside the file holds its newest entries; a lone copy may be on a disk that is read-only
        alone = not path.with_name(path.name + "-wal").exists()
        self._stamp = _state_of(path) if alone else None
        self._open(path, f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}")
        self._read_account()

    def _open(self, path: Path, uri: str) -> None:
        self.path = path
        with self._errors():
            self._db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)

    def _read_account(self) -> None:
        with self._errors():
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone():
                raise LedgerError(f"{self.path} is a database but not a ledger; give another path")
            first = self._db.execute("SELECT payload FROM entries WHERE seq = 1 AND kind = 'account'").fetchone()
        if first is None:
            raise LedgerError(f"{self.path} has lost its account; put back a copy of it: nothing is trained without it")
        with self._errors():
            terms = json.loads(first[0])
            if isinstance(terms, dict) and terms.get("format") != FORMAT:
                raise LedgerError(f"{self.path} has another format than {FORMAT}; use the version that wrote it")
            self.account = account_of(terms)

    def close(self) -> None:
        """Close the file; everything charged or stored is already durable.

        Raises:
            LedgerError: somebody wrote to the file while it was read as one that nobody writes to.
        """
        self._db.close()
        if self._stamp is not None and self._stamp != _state_of(self.path):
            raise LedgerError(f"{self.path} was written to while it was read; read it again")

    def charges(self, run: str | None = None) -> list[Charge]:
        """All charges in order, or those of one run."""
        with self._errors():
            found = [charge_of(payload) for _, payload in self._entries("charge")]
        return [charge for charge in found if run is None or charge.run == run]

    def payloads(self, kind: str) -> Iterator[dict[str, Any]]:
        """The entries of one kind in order, each with its `seq`."""
        with self._errors():
            for seq, payload in self._entries(kind):
                check(kind, payload)
                yield {"seq": seq, **payload}

    def _entries(self, kind: str) -> Iterator[tuple[int, Any]]:
        for seq, payload in self._db.execute("SELECT seq, payload FROM entries WHERE kind = ? ORDER BY seq", (kind,)):
            yield seq, json.loads(payload)

    def last_charge(self, budget: str = MAIN) -> Charge | None:
        """The newest charge to a budget of a round's update; of other mechanisms where it has paid for no update."""
        with self._errors():
            for updates in ("AND mechanism IN ('discriminator_update', 'image_gradient')", ""):
                found = self._db.execute(
                    f"SELECT payload FROM entries WHERE kind = 'charge' AND budget = ? {updates} "
                    "ORDER BY seq DESC LIMIT 1",
                    (budget,),
                ).fetchone()
                if found:
                    return charge_of(json.loads(found[0]))
        return None

    def counts(self, budget: str = MAIN) -> tuple[int, int]:
        """How many charges a budget has paid, and of how many of them no answer was stored, so none may have left."""
        with self._errors():
            events, unknown = self._db.execute(
                "SELECT count(*), count(*) FILTER (WHERE seq NOT IN "
                "(SELECT payload ->> '$.event' FROM entries WHERE kind = 'release')) FROM entries WHERE budget = ?",
                (budget,),
            ).fetchone()
        return int(events), int(unknown)

    def last_answer(self, run: str, mechanism: str = "discriminator_update") -> StoredAnswer | None:
        """The run's last stored answer to this kind of request."""
        with self._errors():
            row = self._db.execute(
                "SELECT request, digest, header, body, state FROM answers WHERE run = ? AND mechanism = ?",
                (run, mechanism),
            ).fetchone()
        return StoredAnswer(*row) if row else None

    def declarations(self) -> list[Declaration]:
        """The budgets opened beside the first, in order."""
        with self._errors():
            return [declaration_of(payload) for _, payload in self._entries("disjoint")]

    @property
    def budgets(self) -> dict[str, int]:
        """Each budget's declared size, by name."""
        return {MAIN: self.account.declared_size, **{d.name: d.declared_size for d in self.declarations()}}

    def totals(self, run: str | None = None, budget: str = MAIN) -> list[Event]:
        """The events of a budget, or of one run of it, those of a kind added up into one."""
        with self._errors():
            of_run, names = ("", (budget,)) if run is None else (" AND run = ?", (budget, run))
            found = self._db.execute(f"{_COSTS}{of_run} GROUP BY 1, 2, 3", names).fetchall()
            if any(type(count) is not int for *_, count in found):
                raise ValueError("an entry 'charge' with an impossible count")
            return [Event(json.loads(q), json.loads(sigma), count, mechanism) for mechanism, q, sigma, count in found]

    def epsilon(self, run: str | None = None, budget: str = MAIN) -> float:
        """Epsilon spent, recomputed from the events, at the account's order and delta."""
        return epsilon_from_rdp(self._rdp(run, budget), self.account.order, self.account.delta)

    def steps_left(self, event: Event, budget: str = MAIN, *, run: str | None = None, cap: float | None = None) -> int:
        """How many steps of this event's kind still fit the budget, or a run's share `cap` of it."""
        return self._fitting(event, self._rdp(run, budget), self.account.eps_max if cap is None else cap)

    def steps(self, run: str | None = None, mechanism: str = "discriminator_update", budget: str = MAIN) -> int:
        """Steps of one mechanism charged."""
        return sum(event.count for event in self.totals(run, budget) if event.mechanism == mechanism)

    def head(self) -> str:
        """Hash of the newest entry."""
        with self._errors():
            return str(self._db.execute("SELECT hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()[0])

    def holds(self, anchor: str) -> bool:
        """Whether an entry of this ledger has this hash."""
        with self._errors():
            return self._db.execute("SELECT 1 FROM entries WHERE hash = ?", (anchor,)).fetchone() is not None

    def _rdp(self, run: str | None, budget: str) -> float:
        return total_rdp(self.totals(run, budget), self.account.order)

    def _fitting(self, event: Event, spent_rdp: float, cap: float) -> int:
        account = self.account
        return steps_that_fit(spent_rdp=spent_rdp, event=event, order=account.order, delta=account.delta, cap=cap)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be used: {printable(str(error), 300)}; nothing is trained without it"
            ) from error


class Ledger(LedgerReader):
    """Opens a site's ledger for charging, or creates it with the given account.

    Raises:
        LedgerError: the file is not a ledger, is damaged, cannot be written, or belongs to another account.
    """

    def __init__(self, path: Path, account: Account | None = None) -> None:
        if account is None and not path.is_file():
            raise LedgerError(f"no ledger at {path}; give the path of a site's .sqlite file")
        if account is not None and not path.exists():
            self._create(path, account)
        self._open(path, f"{path.absolute().as_uri()}?mode=rw")
        with self._errors():
            self._db.execute("PRAGMA synchronous=FULL")
        self._read_account()
        if account is not None and account != self.account:
            raise LedgerError(
                f"{path} was created for other terms ({self.account}) than the ones asked for ({account}); "
                "a site keeps one budget: use the terms of the ledger"
            )

    def _create(self, path: Path, account: Account) -> None:
        """Build the file under another name, so that a file at `path` is always a whole ledger."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        self.path = path
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            os.close(
                os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            )  # its owner's alone, as all beside it
            self._open(temporary, f"{temporary.absolute().as_uri()}?mode=rwc")
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._transaction():
                for statement in _SCHEMA.strip().split(";\n"):
                    self._db.execute(statement)
                self._append("account", account_payload(account, time=time.time()))
            self._db.close()
            sync(temporary)
            with suppress(FileExistsError):  # another process was first; its ledger is the one
                os.link(temporary, path)
            temporary.unlink()
            sync(path.parent)

    def charge(self, charge: Charge) -> str:
        """Append one event; it is on disk when this returns. Gives the entry's hash.

        Raises:
            BudgetError: epsilon would pass the budget's cap, or the run's share of it; nothing is written.
            LedgerError: the event could not be made durable; nothing may be released.
        """
        account, event = self.account, charge.event
        with self._errors(), self._transaction():
            if charge.budget not in self.budgets:
                raise LedgerError(
                    f"{self.path} has no budget {charge.budget!r}; open it with `budget declare-disjoint`"
                )
            in_all = self.steps_left(event, charge.budget)
            in_share = self.steps_left(event, charge.budget, run=charge.run, cap=charge.share)
            for rule, of, cap, fits in (
                ("eps_max", "budget", account.eps_max, in_all),
                ("share", f"share of run {charge.run}", charge.share, in_share),
            ):
                if event.count > fits:
                    raise BudgetError(
                        rule,
                        f"{event.count} steps of {event.mechanism} would pass the {of} at site {account.site} "
                        f"(eps_max = {cap:g}); {min(in_all, in_share)} would still fit",
                    )
            head = self._append("charge", charge_payload(charge, delta=account.delta, time=time.time()))
        if not self.holds(head):  # a trigger of someone else's, say
            raise LedgerError(f"the ledger {self.path} did not keep a charge; nothing is trained without it: verify it")
        return head

    def store_answer(
        self, run: str, answer: StoredAnswer, charged: str, mechanism: str = "discriminator_update"
    ) -> None:
        """Keep the answer in place of the run's previous one, and note that charge `charged` (its hash) is released."""
        with self._errors(), self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO answers (run, mechanism, request, digest, header, body, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (run, mechanism, answer.request, answer.digest, answer.header, answer.body, answer.state),
            )
            event = self._db.execute("SELECT seq FROM entries WHERE hash = ?", (charged,)).fetchone()[0]
            digest = hashlib.sha256(answer.header.encode() + b"\0" + answer.body).hexdigest()
            self._append("release", {"event": event, "digest": digest, "time": time.time()})

    def declare_disjoint(self, declaration: Declaration) -> None:
        """Open a budget of its own for data that an officer declares disjoint from those of every other budget.

        Raises:
            LedgerError: the name is taken or empty, there is no reason, or the size does not suit the delta.
        """
        with self._errors(), self._transaction():
            named = re.fullmatch(NAME, declaration.name)
            if not named or declaration.name in self.budgets or not declaration.reason.strip():
                taken = ", ".join(self.budgets)
                raise LedgerError(
                    "a declaration needs a reason, and a name of letters, digits, '.', '_' and '-' that is not taken "
                    f"(taken: {taken})"
                )
            if declaration.declared_size < 1 or self.account.delta > 1 / (10 * declaration.declared_size):
                raise LedgerError(
                    f"declared size {declaration.declared_size} is not possible with the ledger's delta = "
                    f"{self.account.delta:g}, which may be at most 1/(10 N^)"
                )
            self._append("disjoint", {**asdict(declaration), "time": time.time()})

    def _append(self, kind: str, payload: dict[str, Any]) -> str:
        last = self._db.execute("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        seq, previous = (last[0] + 1, last[1]) if last else (1, FIRST_PREVIOUS)
        text = text_of(payload)
        head = hash_of(seq, kind, text, previous)
        self._db.execute(
            "INSERT INTO entries (seq, kind, payload, previous, hash) VALUES (?, ?, ?, ?, ?)",
            (seq, kind, text, previous, head),
        )
        return head

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")  # serialises two processes from the first read on
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _state_of(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size
