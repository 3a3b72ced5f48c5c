"""The Flower ServerApp: a federation of real sites, or the scenario named in the run's configuration, simulated."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_dpgan.errors import FlDpganError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Make the run's folder and run the strategy in it; a folder that holds the run already is continued."""
    config = {key: str(value) for key, value in context.run_config.items()}
    out = Path(config["out"]).absolute()
    try:
        if config["federation"]:
            serve_federation(grid, Path(config["federation"]), out)
        else:
            serve_scenario(grid, config, out)
    except FlDpganError as error:
        # Flower passes on the message alone; `server run` has to know which errors a new start may mend
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def serve_federation(grid: Grid, file: Path, out: Path) -> None:
    """The server of real sites."""
    from fl_dpgan.config import load_federation
    from fl_dpgan.deploy.follow import continues
    from fl_dpgan.deploy.server import ServerFolder
    from fl_dpgan.federation.deployment import serve
    from fl_dpgan.runs import RunFolder

    federation = load_federation(file)
    server = ServerFolder.open(file.parent)
    folder = RunFolder.open(out) if continues(out, federation) else RunFolder.create(out, federation)
    serve(folder, grid, lambda: {name: int(site["node"]) for name, site in server.sites.items()})


def serve_scenario(grid: Grid, config: dict[str, str], out: Path) -> None:
    """The server of simulated sites."""
    from fl_dpgan.config import load_scenario
    from fl_dpgan.federation.simulation import Job, check, serve
    from fl_dpgan.runs import RunFolder

    if not (out / "scenario.json").is_file():
        RunFolder.create(out, load_scenario(config["scenario"], config["set"].split()))
    job = Job(out, Path(config["data-dir"]) if config["data-dir"] else None)
    check(job.folder.scenario, job.data_dir)
    serve(job, grid)
