"""What each site has spent, recomputed from its ledger's events."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.table import Table

from fl_dpgan.errors import LedgerError
from fl_dpgan.privacy.accountant import epsilon_from_rdp, step_rdp
from fl_dpgan.privacy.entries import charge_of
from fl_dpgan.privacy.ledger import LedgerReader


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
    account, last = ledger.account, ledger.last_charge(budget)
    spent = ledger.epsilon(budget=budget)
    events, unknown = ledger.counts(budget)
    row: dict[str, Any] = {
        "site": account.site, "budget": budget, "unit": account.unit, "relation": account.relation,
        "declared_size": declared_size, "spent": spent, "remaining": max(0.0, account.eps_max - spent),
        "eps_max": account.eps_max, "delta": account.delta, "order": account.order, "events": events,
        "d_steps": ledger.steps(budget=budget), "releases_unknown": unknown, "head": ledger.head(),
    }  # fmt: skip
    of_last_run = dict.fromkeys(("run", "run_spent", "share", "sigma", "q", "c", "rounds_left"))
    if last:
        in_share = ledger.steps_left(last.event, budget, run=last.run, cap=last.share)
        fitting = min(ledger.steps_left(last.event, budget), in_share)
        of_last_run |= {
            "run": last.run, "run_spent": ledger.epsilon(last.run, budget), "share": last.share,
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
            event = charge_of(payload).event
            cost = event.count * step_rdp(event.sample_rate, event.noise_multiplier, order)
            total = rdp[payload["budget"]] = rdp.get(payload["budget"], 0.0) + cost
            spent = epsilon_from_rdp(total, order, delta)
            events.append({**payload, "released": payload["seq"] in released, "spent": spent})
        return events


def budget_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows as a table for the terminal."""
    rows = list(rows)
    terms = sorted({f"eps_max = {row['eps_max']:g}, delta = {row['delta']:g}, unit: {row['unit']}" for row in rows})
    table = Table(title="Privacy budgets, recomputed from each site's ledger", caption="; ".join(terms))
    named = any(row["budget"] != "main" for row in rows)
    unknown = any(row["releases_unknown"] for row in rows)
    headings = ["site", *(["budget"] if named else []), "spent", "left", "share", "events", "D steps",
                *(["unknown"] if unknown else []), "sigma", "q", "C", "forecast"]  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("site", "budget") else "right", no_wrap=True)
    for row in rows:
        left = "-" if row["rounds_left"] is None else f"{row['rounds_left']} rounds"
        table.add_row(
            row["site"], *([row["budget"]] if named else []), f"{row['spent']:.4f}", f"{row['remaining']:.4f}",
            _number(row["share"]), str(row["events"]), str(row["d_steps"]),
            *([str(row["releases_unknown"])] if unknown else []), *(_number(row[key]) for key in ("sigma", "q", "c")),
            left,
        )  # fmt: skip
    return table


def events_table(events: Iterable[dict[str, Any]], title: str) -> Table:
    """A ledger's charges as a table for the terminal."""
    table = Table(title=title)
    for heading in ("entry", "run", "round", "mechanism", "q", "sigma", "steps", "C", "spent", "answer"):
        table.add_column(heading, justify="left" if heading in ("run", "mechanism", "answer") else "right")
    for e in events:
        table.add_row(
            str(e["seq"]), e["run"], str(e["round"]), e["mechanism"], _number(e["sample_rate"]),
            _number(e["noise_multiplier"]), str(e["count"]), _number(e["clipping_norm"]), _number(e["spent"]),
            "stored" if e["released"] else "unknown",
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
