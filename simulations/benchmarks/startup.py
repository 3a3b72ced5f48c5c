"""Times how soon the command line answers, beside a Python that imports typer and does nothing."""

import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.table import Table

from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge
from fl_dpgan.privacy.ledger import Ledger
from simulations.benchmarks.common import Result, interleaved, milliseconds, ratio, scratch, table
from simulations.benchmarks.simulated import command

BARE = "python -c 'import typer'"


def measure(rounds: int) -> Result:
    """Medians of processes that take turns."""
    with scratch() as folder:
        ledger = folder / "north.sqlite"
        _write(ledger)
        commands = {
            BARE: [sys.executable, "-c", "import typer"],
            "fl-dpgan --help": [*command(), "--help"],
            "fl-dpgan budget LEDGER": [*command(), "budget", str(ledger)],
        }
        found = interleaved({name: partial(_run, arguments) for name, arguments in commands.items()}, rounds)
    rows = [
        {"what": name, "ms": milliseconds(taken), "ratio": ratio(found, name, BARE)} for name, taken in found.items()
    ]
    return {"rounds": rounds, "rows": rows}


def _run(arguments: list[str]) -> None:
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def _write(path: Path, charges: int = 10) -> None:
    """A ledger of a few rounds."""
    event = Event(0.02, 1.0, 5)
    with closing(Ledger(path, Account("north", 6000, 10.0, 1e-5, 8.0))) as ledger:
        for number in range(charges):
            ledger.charge(Charge(event, 1.0, "run", number, f"request-{number}", 10.0, "0" * 64))


def render(result: Result) -> Table:
    """A row per command."""
    made = table(f"Medians of {result['rounds']} processes each, by turns", "command", "ms", "times the first")
    for row in result["rows"]:
        made.add_row(row["what"], f"{row['ms']:.0f}", f"{row['ratio']:.2f}")
    return made
