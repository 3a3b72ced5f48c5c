"""`fl-dpgan budget`: show, verify, export and plan what is spent of a site's privacy budget."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal

import click
import typer
from rich.console import Console
from typer.core import TyperGroup

console = Console()

LedgerPath = Annotated[Path, typer.Argument(help="A site's .sqlite file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


class _ShowByDefault(TyperGroup):
    """`budget RUN` is `budget show RUN`; a folder that is called like a subcommand is written `./verify`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ShowByDefault, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show what each site has spent (budget RUN | LEDGER...), verify, export, plan, or open a disjoint budget."""


@app.command()
def show(
    paths: Annotated[list[Path], typer.Argument(help="Runs' folders or ledgers.")],
    events: Annotated[bool, typer.Option("--events", help="Every event too.")] = False,
    as_json: AsJson = False,
) -> None:
    """A row per site and budget, recomputed from the ledgers (also: budget RUN | LEDGER...)."""
    from fl_dpgan.report.budgets import budget_rows, budget_table, events_of, events_table, ledgers_of

    ledgers = [ledger for path in paths for ledger in ledgers_of(path)]
    rows = [row for ledger in ledgers for row in budget_rows(ledger)]
    charged = {str(ledger): events_of(ledger) for ledger in ledgers} if events else {}
    if as_json:
        print(json.dumps({"budgets": rows, "events": charged} if events else rows, indent=2))
        return
    console.print(budget_table(rows))
    for ledger, charges in charged.items():
        console.print(events_table(charges, f"Events of {ledger}"))


@app.command()
def verify(
    ledger: LedgerPath,
    anchor: Annotated[
        str | None, typer.Option("--anchor", help="A hash kept elsewhere, as in the server's round log.")
    ] = None,
) -> None:
    """Check the chain and recompute every figure, in code of its own; exits with 2 on any edit."""
    from fl_dpgan.privacy.verify import verify as check

    found = check(ledger, anchor)
    console.print(
        f"{ledger} verifies: {found.entries} entries, site {found.site}, unit {found.unit}, "
        f"eps_max = {found.eps_max:g}, delta = {found.delta:g}, order {found.order:g}", soft_wrap=True,
        markup=False,
    )  # fmt: skip
    for budget in found.budgets:
        console.print(
            f"budget {budget.name}: epsilon {math.ceil(budget.epsilon * 1e6) / 1e6:.6f} from {budget.events} events, "
            f"{budget.d_steps} D steps, declared size {budget.declared_size}", soft_wrap=True,
            markup=False,
        )  # fmt: skip
    console.print(f"charges of which no answer was stored: {found.releases_unknown}")
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    missing = (
        "" if anchor else " (keep it elsewhere: without --anchor a shortened or wholly rewritten file is not seen)"
    )
    console.print(f"head {found.head}{missing}", soft_wrap=True, markup=False)


@app.command()
def export(
    ledger: LedgerPath,
    form: Annotated[Literal["json", "csv"], typer.Option("--format", help="json: all; csv: the charges.")] = "json",
) -> None:
    """Print the ledger in a documented schema (fl_dpgan/report/export.py), with all that its figures follow from."""
    from fl_dpgan.report.export import as_csv, as_json

    print(as_json(ledger) if form == "json" else as_csv(ledger), end="")


@app.command()
def plan(
    records: Annotated[int, typer.Option("--records", min=1, help="N^: images or patients at the site.")],
    rate: Annotated[float, typer.Option("--rate", help="q: the share of them in a D step, in (0, 1].")],
    rounds: Annotated[int, typer.Option("--rounds", min=1)],
    d_steps: Annotated[int, typer.Option("--d-steps", min=1, help="D steps in a round.")],
    eps: Annotated[float | None, typer.Option("--eps", help="The budget: which sigma would fit?")] = None,
    sigma: Annotated[float | None, typer.Option("--sigma", help="The noise: what would it cost?")] = None,
    moments: Annotated[
        float | None,
        typer.Option("--moments", help="Noise of a moment release before the first round, if there is one."),
    ] = None,
    delta: Annotated[float, typer.Option("--delta")] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """What would a plan cost, or which noise would fit? Nothing is run."""
    from fl_dpgan.report.forecast import forecast, forecast_table

    found = forecast(
        records=records, rate=rate, rounds=rounds, d_steps=d_steps, delta=delta,
        eps=eps, sigma=sigma, moment_sigma=moments,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console.print(forecast_table(found))


@app.command("declare-disjoint")
def declare_disjoint(
    ledger: LedgerPath,
    name: Annotated[str, typer.Option("--name", help="The new budget's name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why no image or patient of these data is in any other.")],
    declared_size: Annotated[int, typer.Option("--declared-size", min=1, help="N^ of the new data.")],
) -> None:
    """Open a second budget for data that you declare disjoint from all others. The declaration stays for ever."""
    from contextlib import closing

    from fl_dpgan.privacy.entries import Declaration
    from fl_dpgan.privacy.ledger import Ledger
    from fl_dpgan.privacy.verify import verify as check

    check(ledger)
    with closing(Ledger(ledger)) as opened:
        opened.declare_disjoint(Declaration(name, declared_size, reason))
        console.print(
            f"budget {name} opened with eps_max = {opened.account.eps_max:g}; head {opened.head()}", soft_wrap=True
        )
