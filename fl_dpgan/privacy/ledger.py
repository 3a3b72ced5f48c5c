"""A site's durable, append-only account of what was spent on its data, in one SQLite file.

The order is: `charge` (durable when it returns), train, `store_answer` (durable), release. A crash at any instant may
over-count, never under-count. Epsilon is not stored; it is recomputed from the events.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_dpgan.errors import BudgetError, LedgerError
from fl_dpgan.privacy.accountant import Event, epsilon, steps_that_fit, total_rdp

_SCHEMA = """
CREATE TABLE account (id INTEGER PRIMARY KEY CHECK (id = 1), site TEXT NOT NULL, unit TEXT NOT NULL,
  relation TEXT NOT NULL, declared_size INTEGER NOT NULL, eps_max REAL NOT NULL, delta REAL NOT NULL,
  rdp_order REAL NOT NULL) STRICT;
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, mechanism TEXT NOT NULL, sample_rate REAL NOT NULL,
  noise_multiplier REAL NOT NULL, count INTEGER NOT NULL, clipping_norm REAL NOT NULL, run TEXT NOT NULL,
  round INTEGER NOT NULL, request TEXT NOT NULL, plan TEXT NOT NULL, time REAL NOT NULL, previous TEXT NOT NULL,
  hash TEXT NOT NULL) STRICT;
CREATE TABLE answers (run TEXT PRIMARY KEY, request TEXT NOT NULL, digest TEXT NOT NULL, body BLOB NOT NULL,
  state BLOB NOT NULL) STRICT;
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_replace BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE seq = NEW.seq)
BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER account_no_replace BEFORE INSERT ON account WHEN EXISTS (SELECT 1 FROM account)
BEGIN SELECT RAISE(ABORT, 'the account is fixed'); END;
CREATE TRIGGER account_no_update BEFORE UPDATE ON account BEGIN SELECT RAISE(ABORT, 'the account is fixed'); END;
CREATE TRIGGER account_no_delete BEFORE DELETE ON account BEGIN SELECT RAISE(ABORT, 'the account is fixed'); END;
"""


@dataclass(frozen=True)
class Account:
    """A ledger's terms, fixed when it is created.

    Attributes:
        site: the site's own name. unit: the privacy unit. relation: the neighbouring relation.
        declared_size: N^. eps_max, delta: the budget. order: the RDP order at which the filter runs.
    """

    site: str
    declared_size: int
    eps_max: float
    delta: float
    order: float
    unit: str = "image"
    relation: str = "add/remove one"


@dataclass(frozen=True)
class LedgerRow:
    """One event with its circumstances; `clipping_norm` is C at the event's last D step."""

    event: Event
    clipping_norm: float
    run: str
    round: int
    request: str
    plan: str


@dataclass(frozen=True)
class StoredAnswer:
    """The last answer of a run, kept until the next: the request it answers, that request's digest, and the bytes."""

    request: str
    digest: str
    body: bytes
    state: bytes


class Ledger:
    """Opens a site's ledger, or creates it with the given account.

    Raises:
        LedgerError: the file is not a ledger, cannot be opened, or belongs to another account.
    """

    def __init__(self, path: Path, account: Account | None = None) -> None:
        self.path = path
        if account is None and not path.is_file():
            raise LedgerError(f"no ledger at {path}; give the path of a site's .sqlite file")
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'account'").fetchone():
                    if account is None:
                        raise LedgerError(f"{path} is a database but not a ledger; give another path")
                    self._create(account)
            row = self._db.execute(
                "SELECT site, declared_size, eps_max, delta, rdp_order, unit, relation FROM account"
            ).fetchone()
        if row is None:
            raise LedgerError(f"{path} has lost its account; put back a copy of it")
        self.account = Account(*row)
        if account is not None and account != self.account:
            raise LedgerError(
                f"{path} was created for other terms ({self.account}) than the ones asked for ({account}); "
                "a site keeps one budget: use the terms of the ledger"
            )

    def _create(self, account: Account) -> None:
        for statement in _SCHEMA.strip().split(";\n"):
            self._db.execute(statement)
        self._db.execute(
            "INSERT INTO account (id, site, declared_size, eps_max, delta, rdp_order, unit, relation) "
            "VALUES (1, ?, ?, ?, ?, ?, ?, ?)",
            (account.site, account.declared_size, account.eps_max, account.delta, account.order, account.unit,
             account.relation),
        )  # fmt: skip

    def close(self) -> None:
        """Close the file; everything charged or stored is already durable."""
        self._db.close()

    def charge(self, row: LedgerRow) -> None:
        """Append one event; it is on disk when this returns.

        Raises:
            BudgetError: epsilon would pass the account's cap; nothing is written.
            LedgerError: the event could not be made durable; nothing may be released.
        """
        with self._errors(), self._transaction():
            fits = self.steps_left(row.event)
            if row.event.count > fits:
                raise BudgetError(
                    f"{row.event.count} D steps would pass the budget of site {self.account.site} "
                    f"(eps_max = {self.account.eps_max:g}); {fits} would still fit"
                )
            previous = self.head()
            values = (
                "poisson_gaussian", row.event.sample_rate, row.event.noise_multiplier, row.event.count,
                row.clipping_norm, row.run, row.round, row.request, row.plan, time.time(), previous,
            )  # fmt: skip
            self._db.execute(
                "INSERT INTO events (mechanism, sample_rate, noise_multiplier, count, clipping_norm, run, round, "
                "request, plan, time, previous, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, _chain(values)),
            )

    def store_answer(self, run: str, answer: StoredAnswer) -> None:
        """Keep the answer's bytes and the site's training state, in place of the run's previous ones."""
        with self._errors(), self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO answers (run, request, digest, body, state) VALUES (?, ?, ?, ?, ?)",
                (run, answer.request, answer.digest, answer.body, answer.state),
            )

    def last_answer(self, run: str) -> StoredAnswer | None:
        """The run's last stored answer."""
        with self._errors():
            row = self._db.execute("SELECT request, digest, body, state FROM answers WHERE run = ?", (run,)).fetchone()
        return StoredAnswer(*row) if row else None

    def rows(self, run: str | None = None) -> list[LedgerRow]:
        """All events in order, or those of one run."""
        with self._errors():
            found = self._db.execute(
                "SELECT sample_rate, noise_multiplier, count, clipping_norm, run, round, request, plan FROM events "
                "WHERE ?1 IS NULL OR run = ?1 ORDER BY seq",
                (run,),
            ).fetchall()
        return [LedgerRow(Event(*values[:3]), *values[3:]) for values in found]

    def epsilon(self, run: str | None = None) -> float:
        """Epsilon spent, recomputed from the events, at the account's order and delta."""
        return epsilon((row.event for row in self.rows(run)), self.account.order, self.account.delta)

    def steps_left(self, event: Event) -> int:
        """How many D steps of this event's kind still fit the budget."""
        account = self.account
        return steps_that_fit(
            spent_rdp=total_rdp((row.event for row in self.rows()), account.order),
            sample_rate=event.sample_rate,
            sigma=event.noise_multiplier,
            order=account.order,
            delta=account.delta,
            cap=account.eps_max,
        )

    def steps(self, run: str | None = None) -> int:
        """D steps charged."""
        return sum(row.event.count for row in self.rows(run))

    def head(self) -> str:
        """Hash of the newest event; of the account where there is none."""
        last = self._db.execute("SELECT hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return str(last[0]) if last else _chain(tuple(vars(self.account).values()))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")  # serialises two processes from the first read on
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be used: {error}; nothing is trained without it"
            ) from error


def _chain(values: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
