"""`fl-dpgan audit`: attack a configuration's training, and compare what that shows with what the ledger claims."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fl_dpgan.commands.evaluate import DataDir

console = Console()


class Attack(StrEnum):
    """How an audit attacks."""

    GRADIENT = "gradient"
    INPUT = "input"
    MANY_RUNS = "many-runs"


def audit(
    scenario: Annotated[str, typer.Argument(help="A shipped scenario's name, or a .toml file.")] = "digits",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")] = None,
    attack: Annotated[
        Attack,
        typer.Option(
            "--attack",
            help="gradient: one run, canaries with parameters of D to themselves. input: one run, images of noise as "
            "canaries. many-runs: the plan's steps over and over on a tiny model.",
        ),
    ] = Attack.GRADIENT,
    epsilon: Annotated[
        float,
        typer.Option("--epsilon", min=0.01, max=10, help="The plan's eps_max; above 1 no audit can say anything."),
    ] = 1.0,
    canaries: Annotated[int, typer.Option("--canaries", min=20, max=100_000, help="In one run.")] = 1000,
    runs: Annotated[int, typer.Option("--runs", min=40, max=10**7, help="For many-runs.")] = 1000,
    confidence: Annotated[float, typer.Option("--confidence", min=0.5, max=0.9999)] = 0.95,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for audit.json and audit.html.")] = None,
) -> None:
    """Attack the training of a configuration and print a lower bound on epsilon beside the claimed one.

    The exit code is 1 where the bound contradicts the claim. A bound below the claim proves nothing but that these
    attacks found no fault.
    """
    from fl_dpgan.audit.many_runs import audit_many_runs
    from fl_dpgan.audit.one_run import audit_one_run
    from fl_dpgan.config import load_scenario

    settings = load_scenario(scenario, [*(overrides or ()), f"privacy.eps_max={epsilon}"])
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        if attack is Attack.MANY_RUNS:
            task = progress.add_task("runs", total=runs)
            plan = settings.site_plan(settings.declared_size(0))
            found = audit_many_runs(
                plan, runs=runs, confidence=confidence, seed=settings.seed, on_run=lambda: progress.advance(task)
            )
        else:
            task = progress.add_task("rounds", total=settings.training.rounds)
            found = audit_one_run(
                settings, data_dir, kind="input" if attack is Attack.INPUT else "gradient", canaries=canaries,
                confidence=confidence, on_round=lambda: progress.advance(task),
            )  # fmt: skip
    table = Table(title=f"{found.audit}; claims at delta {found.delta:g} unless said")
    for heading in (found.varied, "seen", "epsilon is at least", "claimed"):
        table.add_column(heading)
    for point in found.points:
        table.add_row(f"{point.x:g}", point.seen, f"{point.bound:.3f}", f"{point.claimed:.3f}")
    console.print(table)
    console.print(found.verdict, style=None if found.holds else "red", soft_wrap=True)
    if out is not None:
        found.write(out)
        console.print(f"{out / 'audit.html'} and {out / 'audit.json'} written", soft_wrap=True)
    if not found.holds:
        raise typer.Exit(1)
