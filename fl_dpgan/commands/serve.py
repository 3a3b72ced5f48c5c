"""`fl-dpgan site serve`: the guard, which alone holds a site's images and ledger."""

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="The site file.")] = Path("site.toml"),
) -> None:
    """Hold the images and the ledger, and answer what Flower's ClientApp passes on, until it is stopped."""
    from rich.progress import MofNCompleteColumn, Progress

    from fl_dpgan.federation.deployment import make_guard, open_site
    from fl_dpgan.site_file import load_site

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.getLogger("fl_dpgan").setLevel(logging.INFO)
    os.umask(0o077)  # what the guard writes is for its own user
    file = load_site(config)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("reading images", total=None)
        site, images = open_site(file, lambda done, of: progress.update(task, completed=done, total=of))
    guard = make_guard(file, site)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: guard.stop())
    for what, count in sorted(images.conversions.items()):
        console.print(f"{count} images: {what}", soft_wrap=True, markup=False)
    console.print(f"{file.name}: {len(images.labels)} images held; listening on {file.guard.socket}", soft_wrap=True)
    guard.serve()
    console.print(f"{file.name}: stopped")
