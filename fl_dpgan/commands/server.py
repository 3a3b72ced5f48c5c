"""`fl-dpgan server`: what the coordinator of a federation does, on the server's machine."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The server's folder.")]
Days = Annotated[int, typer.Option("--days", min=1, max=36500, help="Validity of the server's certificate.")]


@app.callback()
def _group() -> None:
    """Set up, start and run a federation (init, start, check, register, sites, run)."""


@app.command()
def init(
    folder: Folder,
    host: Annotated[
        list[str], typer.Option("--host", help="A name or address of this machine at the sites; the first is theirs.")
    ],
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8100,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="A label's name, in order; else edit federation.toml.")
    ] = None,
    days: Days = 730,
    ca_days: Annotated[
        int, typer.Option("--ca-days", min=1, max=36500, help="Validity of the federation's own authority.")
    ] = 3650,
) -> None:
    """Make a server's folder: certificates, Flower's configuration, and a federation.toml to edit."""
    from fl_dpgan.deploy.server import ServerFolder

    made = ServerFolder.create(folder, host, port=port, ca_days=ca_days, days=days, classes=classes or ())
    _say(f"{made.path} made; only you may enter it. ca.key and server.key stay in it")
    _say(f"next: edit {made.path / 'federation.toml'}, then send it and ca.crt to every site")


@app.command()
def start(
    folder: Folder,
    local: Annotated[
        bool, typer.Option("--local", help="Listen on 127.0.0.1 alone, to try a federation on one machine.")
    ] = False,
) -> None:
    """Become Flower's SuperLink: TLS, registered nodes only, and all but the nodes' interface for this machine only."""
    from fl_dpgan.deploy.flower import replace_process, superlink_command
    from fl_dpgan.deploy.server import ServerFolder

    server = ServerFolder.open(folder)
    command = superlink_command(server.path, "127.0.0.1" if local else "0.0.0.0", server.port)
    replace_process(command, server.home)


@app.command()
def register(
    folder: Folder,
    public_key: Annotated[Path, typer.Argument(help="What the site sent: the .pub file of `site key`.")],
    name: Annotated[str, typer.Argument(help="The site's name, as in its site.toml.")],
) -> None:
    """Let a site join. The SuperLink must be running."""
    from fl_dpgan.deploy.server import ServerFolder

    node = ServerFolder.open(folder).register(public_key, name)
    _say(f"site {name} registered as node {node}")


@app.command()
def unregister(folder: Folder, name: Annotated[str, typer.Argument(help="A site's name.")]) -> None:
    """Let a site's key no longer in: when it was lost or replaced. The SuperLink must be running."""
    from fl_dpgan.deploy.server import ServerFolder

    ServerFolder.open(folder).unregister(name)
    _say(f"site {name} is no longer registered")


@app.command()
def sites(folder: Folder) -> None:
    """List the registered sites, and which are connected. The SuperLink must be running."""
    from fl_dpgan.deploy.server import ServerFolder

    table = Table("site", "node", "status", "since (UTC)", title="Registered sites")
    for node in ServerFolder.open(folder).nodes():
        since = {"online": "online-at", "offline": "offline-at"}.get(node["status"], "created-at")
        table.add_row(escape(node["site"]), node["node-id"], node["status"], node[since])
    console.print(table)


@app.command()
def renew(folder: Folder, days: Days = 730) -> None:
    """Sign the server's certificate anew, for the same hosts; then restart the SuperLink. Sites need nothing new."""
    from fl_dpgan.deploy.server import ServerFolder

    hosts = ServerFolder.open(folder).renew(days)
    _say(f"certificate for {', '.join(hosts)} renewed for {days} days; restart the SuperLink to use it")


@app.command()
def run(
    federation: Annotated[Path, typer.Argument(help="The federation.toml in the server's folder.")],
    out: Annotated[Path, typer.Option("--out", help="The run's folder; a run in it is continued.")],
    checkout: Annotated[
        Path | None, typer.Option("--app", help="A checkout of fl-dpgan, if it does not run from one.")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often to go on after a failure, from the last checkpoint.")
    ] = 3,
) -> None:
    """Run the federation to its end, or continue the run in --out. The SuperLink must be running."""
    from fl_dpgan.commands.rounds import RoundProgress
    from fl_dpgan.config import load_federation
    from fl_dpgan.deploy.follow import FollowedRun
    from fl_dpgan.deploy.follow import checkout as find_checkout
    from fl_dpgan.deploy.server import ServerFolder

    federation, out = federation.absolute(), out.absolute()
    settings = load_federation(federation)
    server, app_path = ServerFolder.open(federation.parent), find_checkout(checkout)
    progress = RoundProgress(console, settings.all_rounds)
    followed = FollowedRun(server, federation, out, app_path, restarts, progress.take, progress.say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        followed.begin()
        with progress:
            followed.to_the_end()
    except KeyboardInterrupt:
        followed.stop()
        _say(f"interrupted; continue with: fl-dpgan server run {federation} --out {out}")
        raise typer.Exit(130) from None
    _say(f"completed; the run is in {out}")


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
