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
from collections.abc import Callable
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


def account_of(payload: dict[str, Any]) -> Account:
    """The account that `account_payload` wrote.

    Raises:
        ValueError: it is another entry, or a field is missing, unknown or out of its range.
    """
    check("account", payload)
    return Account(**{key: value for key, value in payload.items() if key not in ("format", "time")})


def declaration_of(payload: dict[str, Any]) -> Declaration:
    """The declaration of a `disjoint` entry; ValueError as for `account_of`."""
    check("disjoint", payload)
    return Declaration(payload["name"], payload["declared_size"], payload["reason"])


def charge_of(payload: dict[str, Any]) -> Charge:
    """The charge that `charge_payload` wrote; ValueError as for `account_of`.

    Raises:
        ConfigError: its event is out of the accountant's range.
    """
    check("charge", payload)
    keys = ("clipping_norm", "run", "round", "request", "share", "plan", "budget")
    return Charge(event_of(payload), **{key: payload[key] for key in keys})


def event_of(payload: dict[str, Any]) -> Event:
    """The event in a charge's payload, of which the types were checked; ConfigError as for `charge_of`."""
    return Event(payload["sample_rate"], payload["noise_multiplier"], payload["count"], payload["mechanism"])


def check(kind: str, payload: object) -> None:
    """Whether a payload has the fields of its kind, each of its type: a file may hold anything.

    Raises:
        ValueError: names the first field that is not as written here.
    """
    fields = _FIELDS[kind]
    if not isinstance(payload, dict) or payload.keys() != fields.keys():
        raise ValueError(f"an entry that has not the fields of {kind!r}")
    for key, fits in fields.items():
        if not fits(payload[key]):
            raise ValueError(f"an entry {kind!r} with an impossible {key}")


def _text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def _number(value: object) -> bool:
    # what is added up, or divided by the least cost of a step, must stay within a float
    return type(value) in (int, float) and 0 <= value <= 1e15  # type: ignore[operator]


_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "account": {
        "format": lambda value: value == FORMAT,
        "site": _text,
        "unit": _text,
        "relation": _text,
        "declared_size": lambda value: _count(value) and value > 0,
        "eps_max": _number,
        "delta": lambda value: _number(value) and 0 < value < 1,
        "order": lambda value: _number(value) and 2 <= value <= 1024 and value == int(value),
        "time": _number,
    },
    "disjoint": {
        "name": _text,
        "declared_size": _count,
        "reason": lambda value: isinstance(value, str),
        "time": _number,
    },
    "charge": {
        **dict.fromkeys(("mechanism", "run", "request", "plan", "budget"), _text),
        **dict.fromkeys(("sample_rate", "noise_multiplier", "clipping_norm", "share", "delta", "time"), _number),
        **dict.fromkeys(("count", "round"), _count),
    },
    "release": {"event": _count, "digest": _text, "time": _number},
}


def text_of(payload: dict[str, Any]) -> str:
    """The payload's canonical text."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_of(seq: int, kind: str, payload: str, previous: str) -> str:
    """The entry's place in the chain."""
    return hashlib.sha256(f"{seq}\n{kind}\n{payload}\n{previous}".encode()).hexdigest()
