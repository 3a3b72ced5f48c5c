"""`fl-dpgan site`: what a site's own people set."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fl_dpgan.errors import ConfigError

console = Console()
app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Set up a site."""


@app.command()
def init(
    name: Annotated[str, typer.Option("--name", help="The site's name, the same in every run; it becomes public.")],
    declared_size: Annotated[
        int, typer.Option("--declared-size", help="How many images or patients; public: round down.")
    ],
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("site.toml"),
    source: Annotated[
        str, typer.Option("--source", help="folder, manifest, npz or idx; the file explains.")
    ] = "folder",
    data: Annotated[Path, typer.Option("--data", help="Where the images are: a folder or file.")] = Path("images"),
) -> None:
    """Write a commented site file; an existing one is left alone."""
    from fl_dpgan.site_file import template

    text = template(name, declared_size, source=source, path=data)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        path.chmod(0o644)  # Flower's user reads it too, and there is no secret in it
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; edit it, or give another path") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    console.print(f"{path} written; read it through, then edit it", soft_wrap=True)


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="The site file.")] = Path("site.toml"),
) -> None:
    """Make the site's ledger, once and for ever, on the terms of its file; an existing one is left alone."""
    from contextlib import closing

    from fl_dpgan.privacy.entries import MAIN
    from fl_dpgan.privacy.ledger import Ledger
    from fl_dpgan.site_file import load_site

    site = load_site(path)
    if site.budget != MAIN:
        raise ConfigError(
            f"a ledger is made with budget {MAIN!r}; {site.budget!r} is opened in it by budget declare-disjoint"
        )
    if site.ledger.exists():
        raise ConfigError(f"{site.ledger} is there already; a site has one ledger for ever")
    with closing(Ledger(site.ledger, site.policy.account(site.name))) as made:
        account = made.account
        console.print(
            f"{site.ledger} made: eps_max = {account.eps_max:g}, delta = {account.delta:g}, order {account.order:g}, "
            f"unit {account.unit}; keep copies of it, and its newest hash elsewhere: {made.head()}",
            soft_wrap=True,
        )


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The private key's file; the public part goes to PATH.pub.")] = Path(
        "node.key"
    ),
) -> None:
    """Make the key pair by which the server knows this site; an existing one is left alone."""
    from fl_dpgan.deploy.keys import make_node_key

    public = make_node_key(path)
    console.print(
        f"{path} made: it stays here. Send {path}.pub, which holds this line, to the coordinator:", soft_wrap=True
    )
    print(public)


@app.command()
def node(
    config: Annotated[Path, typer.Option("--config", "-c", help="The site file.")] = Path("site.toml"),
    key: Annotated[Path, typer.Option("--key", help="The private key that `site key` made.")] = Path("node.key"),
    ca: Annotated[Path, typer.Option("--ca", help="The coordinator's ca.crt.")] = Path("ca.crt"),
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="A free port, on this machine alone.")] = 9094,
    home: Annotated[
        Path | None,
        typer.Option("--home", envvar="FLWR_HOME", help="Flower's own files; `flower` beside the key when left out."),
    ] = None,
) -> None:
    """Become Flower's SuperNode, which connects this site's guard with the server of its federation.toml."""
    from fl_dpgan.config import load_federation
    from fl_dpgan.deploy.flower import PROGRAMS, replace_process, supernode_command
    from fl_dpgan.deploy.launcher import write_launcher
    from fl_dpgan.site_file import load_site

    site = load_site(config)
    for file, remedy in ((key, "make one with `fl-dpgan site key`"), (ca, "ask the coordinator for it")):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    home = (home or key.parent / "flower").absolute()
    write_launcher(home / PROGRAMS)
    address = load_federation(site.federation).address
    replace_process(
        supernode_command(address, guard=site.guard.socket, key=key.absolute(), ca=ca.absolute(), port=port),
        home,
    )
