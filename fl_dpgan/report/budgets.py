"""What each site has spent, recomputed from its ledger's events."""

import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fl_dpgan.errors import LedgerError
from fl_dpgan.privacy.accountant import epsilon, epsilon_from_rdp, step_rdp, steps_that_fit, total_rdp
from fl_dpgan.privacy.entries import MAIN, event_of
from fl_dpgan.privacy.ledger import LedgerReader

_SHORT = {
    "discriminator_update": "D", "evaluation_count": "count", "moment_release": "moments", "image_gradient": "gradient",
}  # fmt: skip


def ledgers_of(path: Path) -> list[Path]:
    """The ledger at `path`, or those of the run in folder `path`, in the order of the sites' names.

    Raises:
        LedgerError: the folder holds none.
    """
    if not path.is_dir():
        return [path]
    found = sorted((path / "ledgers").glob("*.sqlite"), key=lambda p: (len(p.name), p.name))
    if not found:
        raise LedgerError(f"{path} holds no ledgers; give a run's folder, or a site's .sqlite file")
    return found


def budget_rows(path: Path) -> list[dict[str, Any]]:
    """A row per budget of the ledger at `path`; every figure is recomputed from its events."""
    with closing(LedgerReader(path)) as ledger:
        return [_row(ledger, name, size) for name, size in ledger.budgets.items()]


def _row(ledger: LedgerReader, budget: str, declared_size: int) -> dict[str, Any]:
    account, last, totals = ledger.account, ledger.last_charge(budget), ledger.totals(budget=budget)
    order, delta = account.order, account.delta
    spent = epsilon(totals, order, delta)
    events, unknown = ledger.counts(budget)
    row: dict[str, Any] = {
        "site": account.site, "budget": budget, "unit": account.unit, "relation": account.relation,
        "declared_size": declared_size, "spent": spent, "remaining": max(0.0, account.eps_max - spent),
        "eps_max": account.eps_max, "delta": delta, "order": order, "events": events,
        "d_steps": sum(e.count for e in totals if e.mechanism == "discriminator_update"),
        "releases_unknown": unknown, "head": ledger.head(),
    }  # fmt: skip
    of_last_run = dict.fromkeys(("run", "run_spent", "share", "sigma", "q", "c", "rounds_left"))
    if last:
        of_run = ledger.totals(last.run, budget)
        fitting = min(
            steps_that_fit(spent_rdp=total_rdp(charged, order), event=last.event, order=order, delta=delta, cap=cap)
            for charged, cap in ((totals, account.eps_max), (of_run, last.share))
        )
        of_last_run |= {
            "run": last.run, "run_spent": epsilon(of_run, order, delta), "share": last.share,
            "sigma": last.event.noise_multiplier, "q": last.event.sample_rate, "c": last.clipping_norm,
            "rounds_left": fitting // last.event.count,
        }  # fmt: skip
    return row | of_last_run


def events_of(path: Path) -> list[dict[str, Any]]:
    """Every charge of the ledger at `path` as stored, with `released`, and `spent`: its budget's epsilon after it."""
    with closing(LedgerReader(path)) as ledger:
        order, delta = ledger.account.order, ledger.account.delta
        released = {payload["event"] for payload in ledger.payloads("release")}
        rdp: dict[str, float] = {}
        events = []
        for payload in ledger.payloads("charge"):
            event = event_of(payload)
            cost = event.count * step_rdp(event.sample_rate, event.noise_multiplier, order)
            total = rdp[payload["budget"]] = rdp.get(payload["budget"], 0.0) + cost
            spent = epsilon_from_rdp(total, order, delta)
            events.append({**payload, "released": payload["seq"] in released, "spent": spent})
        return events


def budget_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows as a table for the terminal; what is spent is rounded up, what is left down."""
    rows = list(rows)
    terms = sorted({f"eps_max = {row['eps_max']:g}, delta = {row['delta']:g}, unit: {row['unit']}" for row in rows})
    table = _table("Privacy budgets, recomputed from each site's ledger", "; ".join(terms))
    named = any(row["budget"] != MAIN for row in rows)
    headings = ["site", *(["budget"] if named else []), "spent", "left", "share", "events", "D\nsteps", "no\nanswer",
                "sigma", "q", "C", "rounds\nleft"]  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("site", "budget") else "right", overflow="fold")
    for row in rows:
        numbers = [_number(row[key], ".4g") for key in ("sigma", "q", "c")]
        table.add_row(
            escape(row["site"]), *([escape(row["budget"])] if named else []),
            f"{math.ceil(row['spent'] * 1e4) / 1e4:.4f}",
            f"{math.floor(row['remaining'] * 1e4) / 1e4:.4f}", _number(row["share"], "g"), str(row["events"]),
            str(row["d_steps"]), str(row["releases_unknown"]), *numbers,
            _number(row["rounds_left"], "d"),
        )  # fmt: skip
    return table


def events_table(events: Iterable[dict[str, Any]], title: str) -> Table:
    """A ledger's charges as a table for the terminal."""
    table = _table(title)
    for heading in ("entry", "run", "round", "what", "q", "sigma", "steps", "C", "spent", "answer"):
        left = heading in ("run", "what", "answer")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for e in events:
        numbers = [_number(e[key], ".4g") for key in ("sample_rate", "noise_multiplier")]
        table.add_row(
            str(e["seq"]), escape(e["run"]), str(e["round"]), _SHORT[e["mechanism"]], *numbers, str(e["count"]),
            _number(e["clipping_norm"], ".4g"), f"{math.ceil(e['spent'] * 1e4) / 1e4:.4f}",
            "stored" if e["released"] else "unknown",
        )  # fmt: skip
    return table


def _table(title: str, caption: str = "") -> Table:
    return Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
