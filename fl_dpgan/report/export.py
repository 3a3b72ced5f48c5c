"""A ledger as JSON or CSV, with all that is needed to recompute every figure elsewhere.

JSON: `format` (1), `account` (the ledger's terms), `disjoint` (declarations), `charges`, `releases` and `head` (hash of
the newest entry). A charge is its stored payload with its `seq`: `mechanism`, `sample_rate` q, `noise_multiplier`
sigma, `count`, `clipping_norm` C, `delta`, `run`, `round`, `request`, `share`, `plan` (digest), `budget` and `time`
(seconds since 1970). A budget's epsilon is that of all its charges together, each `count` Poisson-subsampled Gaussian
steps, by Renyi accounting at `account.order`, converted at `account.delta` (arXiv 2004.00010, Proposition 12).

CSV: a row per charge, with the same columns and the account's `site`, `unit`, `order` and `eps_max` in each.
"""

import csv
import io
import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from fl_dpgan.privacy.entries import FORMAT
from fl_dpgan.privacy.ledger import LedgerReader

_CHARGE = (
    "seq", "mechanism", "sample_rate", "noise_multiplier", "count", "clipping_norm", "delta", "run", "round", "request",
    "share", "plan", "budget", "time",
)  # fmt: skip
_ACCOUNT = ("site", "unit", "order", "eps_max")


def as_json(path: Path) -> str:
    """The whole ledger.

    Raises:
        LedgerError: there is none at `path`, or it is damaged.
    """
    with closing(LedgerReader(path)) as ledger:
        kinds = {"disjoint": "disjoint", "charges": "charge", "releases": "release"}
        content = {"format": FORMAT, "account": asdict(ledger.account)}
        content |= {name: list(ledger.payloads(kind)) for name, kind in kinds.items()}
        return json.dumps(content | {"head": ledger.head()}, indent=2, allow_nan=False) + "\n"


def as_csv(path: Path) -> str:
    """The charges.

    Raises:
        LedgerError: there is no ledger at `path`, or it is damaged.
    """
    with closing(LedgerReader(path)) as ledger:
        terms = {key: asdict(ledger.account)[key] for key in _ACCOUNT}
        text = io.StringIO()
        writer = csv.DictWriter(text, (*_CHARGE, *_ACCOUNT), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**payload, **terms} for payload in ledger.payloads("charge"))
        return text.getvalue()
