"""What each site has spent, recomputed from its ledger's events."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from fl_dpgan.privacy.ledger import Ledger


def budget_row(path: Path) -> dict[str, Any]:
    """One site's budget: every figure is recomputed from the events of the ledger at `path`."""
    ledger = Ledger(path)
    try:
        account, rows, spent = ledger.account, ledger.rows(), ledger.epsilon()
    finally:
        ledger.close()
    last = rows[-1] if rows else None
    return {
        "site": account.site,
        "unit": account.unit,
        "spent": spent,
        "remaining": max(0.0, account.eps_max - spent),
        "eps_max": account.eps_max,
        "delta": account.delta,
        "order": account.order,
        "events": len(rows),
        "d_steps": sum(row.event.count for row in rows),
        "sigma": last.event.noise_multiplier if last else None,
        "q": last.event.sample_rate if last else None,
        "last_c": last.clipping_norm if last else None,
    }


def budget_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows as a table for the terminal."""
    rows = list(rows)
    terms = sorted({f"eps_max = {row['eps_max']:g}, delta = {row['delta']:g}, unit: {row['unit']}" for row in rows})
    table = Table(title="Privacy budgets, recomputed from each site's ledger", caption="; ".join(terms))
    for heading in ("site", "spent", "left", "events", "D steps", "sigma", "q", "C"):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for row in rows:
        numbers = ["-" if row[key] is None else f"{row[key]:.4f}" for key in ("sigma", "q", "last_c")]
        table.add_row(
            row["site"],
            f"{row['spent']:.4f}",
            f"{row['remaining']:.4f}",
            str(row["events"]),
            str(row["d_steps"]),
            *numbers,
        )
    return table
