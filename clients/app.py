"""The Flower ClientApp that `flwr run .` starts: each node answers as the simulated site of its partition."""

from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp

from fl_dpgan.federation.simulation import Job, register_sites

app = ClientApp()


def job(context: Context) -> Job:
    """Where the run's folder and the data are, from the run's configuration."""
    data_dir = str(context.run_config["data-dir"])
    return Job(Path(str(context.run_config["out"])).absolute(), Path(data_dir) if data_dir else None)


register_sites(app, job)
