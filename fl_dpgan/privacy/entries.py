"""The ledger's format: what an entry says, how it is written as text, and how each is chained to the one before.

A ledger is one SQLite file. Its table `entries` has a row per entry: `seq` (1, 2, 3, ...), `kind`, `payload`,
`previous` and `hash`. The payload is a JSON object, keys sorted, without spaces. `hash` is the SHA-256, in hex, of
`SEQ\\nKIND\\nPAYLOAD\\nPREVIOUS`; `previous` is the hash of the row before, and 64 zeros in the first. Kinds:

- `account`, the first entry: the ledger's terms.
- `disjoint`: an officer's declaration that other data, disjoint from the rest, are charged to a budget of their own.
- `charge`: one event, a mechanism and a count, with its circumstances.
- `release`: the answer that charge `event` (its seq) paid for has been handed out, or may have been.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fl_dpgan.privacy.accountant import Event

FORMAT = 1
#: The budget that every ledger opens with; `disjoint` entries open others.
MAIN = "main"
#: What a site or a budget may be called: names go to logs and terminals.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
FIRST_PREVIOUS = "0" * 64

Unit = Literal["image", "patient"]


@dataclass(frozen=True)
class Account:
    """A ledger's terms, fixed when it is created.

    Attributes:
        site: the site's own name. unit: the privacy unit. relation: the neighbouring relation.
        declared_size: N^, counted in privacy units. eps_max, delta: the cap of each budget.
        order: the RDP order at which the filter runs.
    """

    site: str
    declared_size: int
    eps_max: float
    delta: float
    order: float
    unit: str = "image"
    relation: str = "add/remove one"


@dataclass(frozen=True)
class Declaration:
    """An officer's word that the data charged to budget `name` share no privacy unit with any other budget's."""

    name: str
    declared_size: int
    reason: str


@dataclass(frozen=True)
class Charge:
    """One event with its circumstances.

    Attributes:
        event: mechanism, q, sigma and count. clipping_norm: C at the event's first step (0 where nothing is clipped).
        run, round, request: who asked. share: the run's share of the budget (eps_max of its plan).
        plan: digest of the plan. budget: which of the ledger's budgets pays.
    """

    event: Event
    clipping_norm: float
    run: str
    round: int
    request: str
    share: float
    plan: str
    budget: str = MAIN


def account_payload(account: Account, *, time: float) -> dict[str, Any]:
    """The account as a flat JSON object; `time` in seconds since 1970."""
    numbers = {key: float(getattr(account, key)) for key in ("eps_max", "delta", "order")}
    return {"format": FORMAT, **asdict(account), **numbers, "time": time}


def charge_payload(charge: Charge, *, delta: float, time: float) -> dict[str, Any]:
    """The charge as a flat JSON object; `time` in seconds since 1970."""
    fields = asdict(charge)
    return {**fields.pop("event"), **fields, "delta": delta, "time": time}


def charge_of(payload: dict[str, Any]) -> Charge:
    """The charge that `charge_payload` wrote.

    Raises:
        KeyError, ConfigError: a field is missing or out of its range.
    """
    event = Event(payload["sample_rate"], payload["noise_multiplier"], payload["count"], payload["mechanism"])
    keys = ("clipping_norm", "run", "round", "request", "share", "plan", "budget")
    return Charge(event, **{key: payload[key] for key in keys})


def text_of(payload: dict[str, Any]) -> str:
    """The payload's canonical text."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_of(seq: int, kind: str, payload: str, previous: str) -> str:
    """The entry's place in the chain."""
    return hashlib.sha256(f"{seq}\n{kind}\n{payload}\n{previous}".encode()).hexdigest()
