"""`fl-dpgan site check` and `fl-dpgan server check`: what is in order and what is not, before anything runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fl_dpgan.checks.finding import Finding

console = Console()


def check_site(
    config: Annotated[Path, typer.Option("--config", "-c", help="The site file.")] = Path("site.toml"),
    key: Annotated[Path, typer.Option("--key", help="The private key that `site key` made.")] = Path("node.key"),
    ca: Annotated[Path, typer.Option("--ca", help="The coordinator's ca.crt.")] = Path("ca.crt"),
) -> None:
    """Look at data, budget, machine, users and server; exit code 0 if the site may start, 1 if not.

    What it prints is for the site alone: it counts images. Run it as the guard's user, or as root to check all.
    """
    from rich.progress import MofNCompleteColumn, Progress

    from fl_dpgan.checks.site import check_site as check
    from fl_dpgan.config import load_federation
    from fl_dpgan.site_file import load_site

    file = load_site(config)
    federation = load_federation(file.federation)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading images", total=None)
        findings = check(
            file,
            federation,
            config=config.absolute(),
            key=key.absolute(),
            ca=ca.absolute(),
            on_progress=lambda done, of: progress.update(task, completed=done, total=of),
        )
    _show(findings, f"Site {file.name}")


def check_server(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The server's folder.")],
    declared_size: Annotated[
        int, typer.Option("--declared-size", min=1, help="Of the site whose cost is shown.")
    ] = 1000,
) -> None:
    """Look at keys, certificates, plan, port, clock and disk; exit code 0 if the server may start, 1 if not."""
    from fl_dpgan.checks.server import check_server as check
    from fl_dpgan.deploy.server import ServerFolder

    _show(check(ServerFolder.open(folder), declared_size), f"Server in {folder}")


def _show(findings: "list[Finding]", title: str) -> None:
    from fl_dpgan.checks.finding import may_start, table

    console.print(table(findings, title))
    if not may_start(findings):
        failed = ", ".join(finding.name for finding in findings if finding.status == "failed")
        console.print(f"not ready: {failed}", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(1)
    console.print("ready to start", highlight=False)
