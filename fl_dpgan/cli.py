"""The command line: `fl-dpgan simulate`, `generate`, `evaluate` and `report`, and the groups in `commands`."""

import errno
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fl_dpgan.commands import budget, server, site
from fl_dpgan.commands.audit import audit
from fl_dpgan.commands.check import check_server, check_site
from fl_dpgan.commands.evaluate import DataDir, RunPath, evaluate
from fl_dpgan.commands.serve import serve
from fl_dpgan.commands.watch import watch
from fl_dpgan.errors import ConfigError, FlDpganError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(budget.app, name="budget")
app.add_typer(site.app, name="site")
site.app.command()(serve)
site.app.command("check")(check_site)
app.add_typer(server.app, name="server")
server.app.command("check")(check_server)
console = Console()

#: What a disk that is full, read-only or broken says, whatever is done with it.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def main() -> None:
    """Entry point: prints a typed error on one line and exits with 2."""
    warnings.filterwarnings("ignore")  # our dependencies' warnings are not for users
    try:
        app()
    except FlDpganError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _DISK:
            raise
        _fail(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}; make room on the disk, or mend it")


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"error: {message}", style="red", markup=False, highlight=False)
    sys.exit(2)


def _version(shown: bool) -> None:
    if shown:
        from fl_dpgan import __version__

        console.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train one image generator together, under record-level differential privacy."""


@app.command()
def simulate(
    scenario: Annotated[str, typer.Argument(help="A shipped scenario's name, or a .toml file.")] = "digits",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; runs/SCENARIO when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data into --data-dir first.")] = False,
) -> None:
    """Run a federation on this machine, and show what each site has spent."""
    from fl_dpgan.config import load_scenario
    from fl_dpgan.data import load
    from fl_dpgan.federation.simulation import Job, check
    from fl_dpgan.runs import RunFolder

    out = (out or Path("runs") / Path(scenario).stem).absolute()
    data_dir = data_dir.absolute() if data_dir else None
    if resume:
        if overrides:
            raise ConfigError("--set cannot change a run that is resumed; leave it out, or start a new run")
        folder = RunFolder.open(out)
    else:
        settings = load_scenario(scenario, overrides or ())
        if download:
            model = settings.model
            load(settings.data.source, split="train", size=model.size, channels=model.channels, data_dir=data_dir,
                 download=True)  # fmt: skip
        check(settings, data_dir)
        folder = RunFolder.create(out, settings)
    _run(folder, Job(out, data_dir))
    _finish(folder)


@app.command()
def generate(
    run: RunPath,
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    count: Annotated[int, typer.Option("--count", min=1, max=10_000_000, help="Number of images.")] = 1000,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Classes to draw, as in 0,3,7; all if left out.")
    ] = None,
    npz: Annotated[bool, typer.Option("--npz", help="One NPZ file in place of PNG files.")] = False,
) -> None:
    """Draw synthetic images from a run's generator, with a card that states the guarantee."""
    from fl_dpgan.report.synthetic import write_images
    from fl_dpgan.runs import RunFolder

    try:
        chosen = None if labels is None else [int(label) for label in labels.split(",")]
    except ValueError as error:
        raise ConfigError(f"--labels {labels!r} is not a list of numbers such as 0,3,7") from error
    write_images(RunFolder.open(run), count, out, labels=chosen, as_npz=npz)
    console.print(f"{count} images and card.json written to {out}")


app.command()(audit)
app.command()(evaluate)
app.command()(watch)


@app.command()
def report(run: RunPath) -> None:
    """Write RUN/report.html: budgets, curves, samples and the guarantee in words, in one file that works offline."""
    from fl_dpgan.report.budgets import budget_rows, events_of, ledgers_of
    from fl_dpgan.report.html import write_report
    from fl_dpgan.runs import RunFolder

    folder = RunFolder.open(run)
    ledgers = ledgers_of(run) if (run / "ledgers").is_dir() else []
    rows = [row for ledger in ledgers for row in budget_rows(ledger)]
    curves = {
        ledger.stem: [(e["spent"], e["clipping_norm"], e["round"]) for e in events_of(ledger) if e["clipping_norm"]]
        for ledger in ledgers  # a run's own ledgers: one budget each
    }
    console.print(f"{write_report(folder, rows, curves)} written", soft_wrap=True)


def _run(folder: Any, job: Any) -> None:
    """Run the federation with a progress line; an interrupt ends every process at once and loses nothing."""
    from fl_dpgan.commands.rounds import RoundProgress
    from fl_dpgan.federation.simulation import simulate as run_simulation
    from fl_dpgan.report.synthetic import NO_GUARANTEE

    with RoundProgress(console, folder.scenario.all_rounds, without_guarantee=NO_GUARANTEE) as progress:

        def interrupted(signum: int, frame: object) -> None:
            import ray

            progress.stop()
            ray.shutdown()
            console.print(f"interrupted; continue with: fl-dpgan simulate --resume --out {folder.path}", soft_wrap=True)
            os._exit(128 + signum)  # the server's thread would wait for answers; all that counts is on disk already

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted)
        run_simulation(job, progress.take, lambda chosen: progress.console.print(str(chosen), highlight=False))


def _finish(folder: Any) -> None:
    from fl_dpgan.baselines.gs_wgan import paper_epsilon
    from fl_dpgan.files import write_atomically
    from fl_dpgan.report.budgets import budget_rows, budget_table, ledgers_of
    from fl_dpgan.report.synthetic import NO_GUARANTEE, run_generator, sample_grid

    generator, meta = run_generator(folder)
    scenario = folder.scenario
    privacy, sites = scenario.privacy, scenario.federation.sites
    sample_grid(generator, scenario).save(folder.path / "samples.png")
    if privacy.non_private:
        console.print(NO_GUARANTEE)
    else:
        rows = [row for ledger in ledgers_of(folder.path) for row in budget_rows(ledger)]
        write_atomically(folder.path / "budgets.json", (json.dumps(rows, indent=2) + "\n").encode())
        console.print(budget_table(rows))
    if privacy.update == "image_gradient" and scenario.training.rounds:
        claimed = paper_epsilon(scenario.site_plan(scenario.declared_size(0)), sites)
        console.print(
            f"the GS-WGAN paper's own accounting would claim epsilon {claimed:.3f} for the whole plan: no guarantee "
            "here, where the server knows which site answers",
            soft_wrap=True,
        )
    console.print(f"{meta['round']} rounds done; images in {folder.path / 'samples.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
