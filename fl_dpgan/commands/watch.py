"""`fl-dpgan watch`: a page on the terminal that shows the coordinator a run's sites, and refreshes."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

_REFRESH = 2.0


def watch(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print the page once.")] = False,
) -> None:
    """Show a run's sites: last seen, last status, epsilon, refusals and who did not join. Ends with Ctrl-C."""
    from rich.live import Live

    from fl_dpgan.report.watched import overview, page
    from fl_dpgan.runs import RunFolder

    folder = RunFolder.open(run)
    if once:
        console.print(page(overview(folder)))
        return
    with Live(page(overview(folder)), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_REFRESH)
                live.update(page(overview(folder)), refresh=True)
        except KeyboardInterrupt:
            return
