"""The Flower ServerApp that `flwr run .` starts: it runs the scenario named in the run's configuration."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_dpgan.config import load_scenario
from fl_dpgan.federation.simulation import Job, check, serve
from fl_dpgan.runs import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Make the run's folder and run the strategy in it; a folder that holds the run already is continued."""
    config = context.run_config
    out, data_dir = Path(str(config["out"])).absolute(), str(config["data-dir"])
    if not (out / "scenario.json").is_file():
        overrides = str(config["set"]).split()
        RunFolder.create(out, load_scenario(str(config["scenario"]), overrides))
    job = Job(out, Path(data_dir) if data_dir else None)
    check(job.folder.scenario, job.data_dir)
    serve(job, grid)
