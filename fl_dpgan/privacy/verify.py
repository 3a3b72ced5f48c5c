"""Checks a site's ledger and recomputes what it says was spent, sharing no code with the writer.

It is for whoever must not take the writer's word: it knows the format (`entries.py` describes it) and the published
formulas, and uses Python's standard library alone. An entry that was changed, removed, moved or inserted breaks the
chain of hashes; a chain that holds is then read as the account of a filter, which must never have passed its cap.

What nobody can see in the file alone: that its *newest* entries were cut off, that the *whole* chain was computed
again with other content, or that an older copy was put back. Whoever noted the hash of an entry before (the `anchor`)
sees all three. Nor does a ledger show mechanisms that ran without being charged.
"""

import hashlib
import json
import math
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fl_dpgan.errors import LedgerError


@dataclass(frozen=True)
class BudgetFigures:
    """What one budget of the ledger has paid for; `d_steps` counts the steps of discriminator updates alone."""

    name: str
    declared_size: int
    events: int
    d_steps: int
    epsilon: float


@dataclass(frozen=True)
class Verified:
    """What a ledger that holds says.

    Attributes:
        site, unit, relation, eps_max, delta, order: the account. head: hash of the newest entry.
        releases_unknown: charges without a release entry (their answers were not handed out, or a crash came between).
        notes: oddities that are no evidence of an edit.
    """

    site: str
    unit: str
    relation: str
    eps_max: float
    delta: float
    order: float
    entries: int
    head: str
    budgets: tuple[BudgetFigures, ...]
    releases_unknown: int
    notes: tuple[str, ...]


def verify(path: Path, anchor: str | None = None) -> Verified:
    """Check every entry of the ledger and recompute its figures; writes nothing beside or into the file.

    Args:
        path: the ledger. anchor: the hash of one of its entries (its head, say), noted at an earlier time.

    Raises:
        LedgerError: the file is not an intact ledger, or not the one that the anchor was taken from.
    """
    if anchor is not None and not re.fullmatch("[0-9a-f]{64}", anchor):
        raise LedgerError(f"{path}: the anchor {anchor!r:.80} is not a hash; give the 64 hex digits noted earlier")
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}; give the path of a site's .sqlite file")
    books = _Books(anchor)
    try:
        with _opened(path.resolve()) as db:
            _check_schema(db)
            for row in db.execute("SELECT seq, kind, payload, previous, hash FROM entries ORDER BY seq"):
                books.add(row)
            return books.closed()
    except (_FaultError, sqlite3.Error, OSError, UnicodeError) as error:
        said = "".join(c if c.isprintable() else " " for c in str(error))  # it may quote the file
        raise LedgerError(f"{path}{books.place}: {said:.300}") from error


class _FaultError(Exception):
    """What is wrong; `verify` adds where."""


# --- the file


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, on one snapshot of the file."""
    wal, index = Path(f"{path}-wal"), Path(f"{path}-shm")
    with ExitStack() as stack:
        if wal.exists() and not index.exists():
            # nobody has the ledger open (it is a copy with its log); SQLite would leave an index beside it, or fail
            scratch = stack.enter_context(TemporaryDirectory())
            path, wal = (Path(shutil.copy(file, scratch)) for file in (path, wal))
        # opened for reading, a ledger without a log would get one, unless it is declared immutable
        still = not wal.exists() and not Path(f"{path}-journal").exists()
        before = _stamp(path)
        options = "mode=ro&immutable=1" if still else "mode=ro"
        db = stack.enter_context(closing(sqlite3.connect(f"{path.as_uri()}?{options}", uri=True, isolation_level=None)))
        db.execute("BEGIN")
        try:
            yield db
        finally:
            if still and (wal.exists() or _stamp(path) != before):  # what was read may be a mixture of old and new
                raise _FaultError("was written to while it was read; verify it again")


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


_COLUMNS = [("seq", "INTEGER", 1, 0), *((name, "TEXT", 0, 0) for name in ("kind", "payload", "previous", "hash"))]
_COMPUTED = 2  # SQLite's mark of a virtual generated column
# word by word: a trigger that only looks like one of these could let a charge vanish
_ABORT = "BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END"
_TRIGGERS = {
    "entries_no_update": f"CREATE TRIGGER entries_no_update BEFORE UPDATE ON entries {_ABORT}",
    "entries_no_delete": f"CREATE TRIGGER entries_no_delete BEFORE DELETE ON entries {_ABORT}",
    "entries_no_replace": "CREATE TRIGGER entries_no_replace BEFORE INSERT ON entries "
    f"WHEN EXISTS (SELECT 1 FROM entries WHERE seq >= NEW.seq) {_ABORT}",
}


def _check_schema(db: sqlite3.Connection) -> None:
    (state,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if state != "ok":
        raise _FaultError(f"the file is damaged: {state}")
    table = db.execute("SELECT type, strict FROM pragma_table_list WHERE schema = 'main' AND name = 'entries'")
    if table.fetchone() != ("table", 1):
        raise _FaultError("has no strict table of entries; it is not a ledger")
    columns = db.execute("SELECT name, type, pk, hidden FROM pragma_table_xinfo('entries') ORDER BY cid").fetchall()
    # what SQLite computes from these whenever it is read says nothing of its own; computed once and stored, it could be
    # edited, and no hash would tell
    if [column for column in columns if column[3] != _COMPUTED] != _COLUMNS:
        raise _FaultError(f"the columns of its entries are {columns}, not those of a ledger")
    found = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall())
    for name, wanted in _TRIGGERS.items():
        if " ".join(str(found.pop(name, "")).split()) != wanted:
            raise _FaultError(f"its trigger {name}, which keeps it append-only, is missing or changed")
    if found:
        raise _FaultError(f"it has triggers that no ledger has: {', '.join(map(str, found))}")


# --- one entry's form


_Rule = tuple[Callable[[Any], bool], str]


def _whole(low: int, high: int = 2**53) -> _Rule:
    return lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}"


def _real(test: Callable[[float], bool], words: str) -> _Rule:
    def holds(value: Any) -> bool:
        # a whole number is a real one too; beyond 2^53 it would not survive being one
        known = math.isfinite(value) if type(value) is float else type(value) is int and abs(value) <= 2**53
        return known and test(value)

    return holds, words


def _text(pattern: str, words: str) -> _Rule:
    match = re.compile(pattern, re.DOTALL).fullmatch
    return lambda value: type(value) is str and match(value) is not None, words


_ANY_TEXT: _Rule = (lambda value: type(value) is str, "text")
# names go to terminals and logs
_NAME = _text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of letters, digits, '.', '_' and '-'")
_POSITIVE = _real(lambda value: value > 0, "a positive number")
_NOT_NEGATIVE = _real(lambda value: value >= 0, "a number of at least 0")
_DELTA = _real(lambda value: 0 < value < 1, "a number between 0 and 1")
_TIME = _real(lambda value: True, "a finite number")

_MECHANISMS = ("discriminator_update", "evaluation_count", "moment_release", "image_gradient")

_RULES: dict[str, dict[str, _Rule]] = {
    "account": {
        "format": _whole(1, 1),
        "site": _NAME,
        "unit": _text("image|patient", "image or patient"),
        # the formula below is that of this relation and of no other
        "relation": _text("add/remove one", "add/remove one"),
        "declared_size": _whole(1),
        "eps_max": _POSITIVE,
        "delta": _DELTA,
        "order": _real(lambda value: 2 <= value <= 1024 and value == int(value), "a whole number from 2 to 1024"),
        "time": _TIME,
    },
    "disjoint": {"name": _NAME, "declared_size": _whole(1), "reason": _text(r".*\S.*", "a reason"), "time": _TIME},
    "charge": {
        "mechanism": _text("|".join(_MECHANISMS), "a mechanism known to this verifier"),
        "sample_rate": _real(lambda value: 0 < value <= 1, "a rate above 0 and up to 1"),
        "noise_multiplier": _real(lambda value: value >= 0.01, "a number of at least 0.01"),
        "count": _whole(1, 10**9),
        "clipping_norm": _NOT_NEGATIVE,
        "run": _ANY_TEXT,
        "round": _whole(0),
        "request": _ANY_TEXT,
        "share": _NOT_NEGATIVE,
        "plan": _ANY_TEXT,
        "budget": _ANY_TEXT,
        "delta": _DELTA,
        "time": _TIME,
    },
    "release": {"event": _whole(1), "digest": _text("[0-9a-f]{64}", "64 hex digits"), "time": _TIME},
}
_decode = json.JSONDecoder().raw_decode
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def _payload(kind: str, text: str) -> dict[str, Any]:
    """The payload, if it is written canonically and has the fields of its kind, each in its range."""
    try:
        payload, _ = _decode(text)  # what follows the object is lost here, and missed in the comparison
        canonical = _canonical(payload)  # refuses NaN and infinities, and drops repeated keys
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"its payload is not JSON: {error}") from error
    if not isinstance(payload, dict) or canonical != text:
        raise _FaultError("its payload is not a JSON object in canonical form")
    rules = _RULES[kind]
    if payload.keys() != rules.keys():
        raise _FaultError(
            f"the fields {sorted(payload.keys() ^ rules.keys())} are missing or do not belong in a {kind}"
        )
    for key, (holds, words) in rules.items():
        if not holds(payload[key]):
            raise _FaultError(f"{key} = {payload[key]!r:.80} is not {words}")
    return payload


# --- the entries together


@dataclass
class _Budget:
    declared_size: int
    events: int = 0
    d_steps: int = 0
    rdp: float = 0.0
    epsilon: float = 0.0


@dataclass
class _Books:
    """The ledger as read so far."""

    anchor: str | None
    place: str = ""
    entries: int = 0
    head: str = "0" * 64
    anchored: bool = False
    account: dict[str, Any] = field(default_factory=dict)
    budgets: dict[str, _Budget] = field(default_factory=dict)
    released: dict[int, bool] = field(default_factory=dict)  # by the seq of the charge
    order: int = 0
    offset: float = 0.0  # of epsilon from RDP
    time: float = -math.inf
    notes: list[str] = field(default_factory=list)

    def add(self, row: tuple[Any, ...]) -> None:
        """Check the next entry and enter it.

        Raises:
            _FaultError: it does not follow from those before, or is not what a writer would have written.
        """
        number = self.entries + 1
        self.place = f", entry {number}"
        if tuple(map(type, row)) != (int, str, str, str, str):
            raise _FaultError("a value is not of its column's type")
        seq, kind, text, previous, digest = row
        if seq != number:
            raise _FaultError(f"stands at seq {seq}: entries are missing, or were renumbered")
        if previous != self.head:
            raise _FaultError(
                "does not continue the entry before it: one of the two was changed, or one between removed"
            )
        if hashlib.sha256(f"{seq}\n{kind}\n{text}\n{previous}".encode()).hexdigest() != digest:
            raise _FaultError("does not match its own hash: it was changed after it was written")
        if kind not in _RULES:
            raise _FaultError(f"its kind {kind!r:.80} is none of {', '.join(_RULES)}")
        if (kind == "account") != (number == 1):
            raise _FaultError("a ledger has one account, and it is the first entry")
        payload = _payload(kind, text)
        getattr(self, f"_{kind}")(seq, payload)
        if payload["time"] < self.time:
            self.notes.append(f"clock went back at entry {seq}")
        self.entries, self.head, self.time = number, digest, payload["time"]
        self.anchored = self.anchored or digest == self.anchor
        self.place = f", after entry {number}"

    def closed(self) -> Verified:
        """The figures, once all entries are in."""
        self.place = ""
        if not self.entries:
            raise _FaultError("has no entries; its account is missing")
        if self.anchor is not None and not self.anchored:
            raise _FaultError("no entry has the anchor's hash: it is older than the ledger that had it, or another")
        account = self.account
        return Verified(
            site=account["site"],
            unit=account["unit"],
            relation=account["relation"],
            eps_max=float(account["eps_max"]),
            delta=account["delta"],
            order=float(account["order"]),
            entries=self.entries,
            head=self.head,
            budgets=tuple(
                BudgetFigures(name, b.declared_size, b.events, b.d_steps, b.epsilon) for name, b in self.budgets.items()
            ),
            releases_unknown=sum(not done for done in self.released.values()),
            notes=tuple(self.notes),
        )

    def _account(self, seq: int, account: dict[str, Any]) -> None:
        self.account, self.order = account, int(account["order"])
        self.offset = _offset(self.order, account["delta"])
        self.budgets["main"] = _Budget(account["declared_size"])

    def _disjoint(self, seq: int, declaration: dict[str, Any]) -> None:
        if declaration["name"] in self.budgets:
            raise _FaultError(f"declares the budget {declaration['name']!r:.80}, which exists already")
        self.budgets[declaration["name"]] = _Budget(declaration["declared_size"])

    def _charge(self, seq: int, charge: dict[str, Any]) -> None:
        delta, eps_max = self.account["delta"], self.account["eps_max"]
        if charge["delta"] != delta:
            raise _FaultError(f"delta = {charge['delta']!r} is not the account's, {delta!r}")
        budget = self.budgets.get(charge["budget"])
        if budget is None:
            raise _FaultError(f"charges the budget {charge['budget']!r:.80}, which was not declared before")
        budget.events += 1
        budget.d_steps += charge["count"] if charge["mechanism"] == "discriminator_update" else 0
        budget.rdp += charge["count"] * _step_rdp(charge["sample_rate"], charge["noise_multiplier"], self.order)
        budget.epsilon = max(0.0, budget.rdp + self.offset)
        if budget.epsilon > eps_max * (1 + 1e-6):
            raise _FaultError(
                f"takes {charge['budget']!r:.80} to epsilon = {budget.epsilon:.10g}, beyond eps_max = {eps_max}"
            )
        self.released[seq] = False

    def _release(self, seq: int, release: dict[str, Any]) -> None:
        event = release["event"]
        if self.released.get(event) is not False:
            wrong = "was released before" if event in self.released else "is no charge before it"
            raise _FaultError(f"releases entry {event}, which {wrong}")
        self.released[event] = True


# --- what an event costs


@lru_cache(maxsize=4096)
def _step_rdp(sample_rate: float, noise_multiplier: float, order: int) -> float:
    """RDP of one step of a Poisson-subsampled Gaussian (Mironov, Talwar, Zhang, arXiv 1908.10530, section 3.3).

    log(sum over k of C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 sigma^2))) / (a - 1), each summand from the one
    before, with 100 digits: the sum may lie a hair above 1, or have millions of digits.
    """
    with localcontext(Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN)):
        rate, variance = Decimal(sample_rate), Decimal(noise_multiplier) ** 2
        if rate == 1:  # only k = a is left of the sum
            return max(1e-12, float(order / (2 * variance)))
        gain = (1 / variance).exp()
        total = term = (1 - rate) ** order
        factor = rate / (1 - rate)
        for k in range(order):
            term *= factor * (order - k) / (k + 1)
            factor *= gain
            total += term
        return max(1e-12, float(total.ln() / (order - 1)))  # the writer counts no step for less


def _offset(order: int, delta: float) -> float:
    """What epsilon at `delta` is above the RDP (Canonne, Kamath, Steinke, arXiv 2004.00010, Proposition 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
