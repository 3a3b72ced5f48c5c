"""Simulated sites: the scenario's data split over them, the same `Site` as anywhere, run by Flower's engine on Ray."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fl_dpgan.config import Scenario
from fl_dpgan.data import ImageData, load, partition, to_tensor
from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.federation.reaper import watch
from fl_dpgan.federation.site import Site
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.runs import RunFolder

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """What a process needs in order to build its part of a simulation: paths, so that every process reads its own."""

    out: Path
    data_dir: Path | None

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder.open(self.out)


def networks(scenario: Scenario) -> tuple[nn.Module, nn.Module]:
    """The scenario's G and D, initialised from its seed; the caller's random state is left as it was."""
    model = scenario.model
    shape = {"size": model.size, "channels": model.channels, "num_classes": model.num_classes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scenario.seed)
        generator = Generator(**shape, latent_dim=model.latent_dim, width=model.g_width)
        return generator, Discriminator(**shape, width=model.d_width)


@lru_cache(maxsize=2)
def split_data(
    scenario: Scenario, data_dir: Path | None
) -> tuple[ImageData, list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """The training images and each site's indices, checked against what the scenario declares.

    Raises:
        DataError: files are missing or corrupt, there are more sites than records, or a site lacks a class.
        ConfigError: the scenario names another number of classes than the data have.
    """
    data, model = scenario.data, scenario.model
    images = load(data.source, split="train", size=model.size, channels=model.channels, data_dir=data_dir)
    if len(images.classes) != model.num_classes:
        raise ConfigError(
            f"model.num_classes = {model.num_classes}, but {data.source} has {len(images.classes)}; set it to that"
        )
    parts = partition(
        images.labels,
        kind=data.partition,
        num_sites=scenario.federation.sites,
        seed=scenario.seed,
        alpha=data.alpha,
        sizes=data.sizes,
        classes_per_site=data.classes_per_site,
    )
    for index, part in enumerate(parts):
        missing = sorted(set(range(model.num_classes)) - set(images.labels[part].tolist()))
        if missing and not data.allow_missing_classes:
            named = ", ".join(images.classes[label] for label in missing)
            raise DataError(
                f"site-{index} has no record of class {named}; partition otherwise, or set data.allow_missing_classes"
            )
        if len(part) < 0.9 * scenario.declared_size(index):
            raise DataError(
                f"site-{index} has {len(part)} records, too few for its declared size {scenario.declared_size(index)}; "
                f"set data.declared_size to at most {len(part)}"
            )
    return images, parts


def check(scenario: Scenario, data_dir: Path | None) -> None:
    """Refuse plans and data that cannot work, before anything is made or charged for them.

    Raises:
        ConfigError: a site's plan is impossible. DataError: as for `split_data`.
    """
    for index in range(scenario.federation.sites):
        scenario.site_plan(scenario.declared_size(index))
    split_data(scenario, data_dir)


@lru_cache(maxsize=4096)
def simulated_site(job: Job, index: int) -> Site:
    """The site of this partition; built once a process."""
    scenario = job.folder.scenario
    images, parts = split_data(scenario, job.data_dir)
    mine = images.subset(parts[index])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, discriminator = networks(scenario)
    return Site(
        f"site-{index}",
        (to_tensor(mine.images).to(device), torch.from_numpy(mine.labels).to(device)),
        declared_size=scenario.declared_size(index),
        generator=generator,
        discriminator=discriminator,
        ledger=job.folder.ledger(f"site-{index}"),
        eps_max=scenario.budget(index),
        delta=scenario.privacy.delta,
        learning_rate=scenario.training.d_learning_rate,
        seed=scenario.seed,
    )


def register_sites(app: ClientApp, job_of: Callable[[Context], Job]) -> None:
    """Let a Flower ClientApp answer as the simulated site of its node's partition."""

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return simulated_site(job_of(context), int(context.node_config["partition-id"])).hello(message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return simulated_site(job_of(context), int(context.node_config["partition-id"])).train(message)


def serve(job: Job, grid: Grid, on_round: OnRound | None = None) -> None:
    """The server's part of a simulation: run the strategy in the job's folder to its end."""
    scenario = job.folder.scenario
    generator, discriminator = networks(scenario)
    name = f"{scenario.name}-{hashlib.sha256(scenario.model_dump_json().encode()).hexdigest()[:12]}"
    FedDPGAN(scenario, generator, discriminator, folder=job.folder, run=name, on_round=on_round).start(grid)


def simulate(job: Job, on_round: OnRound | None = None) -> None:
    """Run the scenario in the job's folder on Ray, in this process and its workers; nothing stays behind.

    Raises:
        FlDpganError: the data, the plan or the federation is at fault.
    """
    scenario = job.folder.scenario
    check(scenario, job.data_dir)
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    _log_to_file(job.out / "flower.log")
    watch()

    client_app, server_app = ClientApp(), ServerApp()
    register_sites(client_app, lambda context: job)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(job, grid, on_round)

    # Flower's own engine, called as `flwr run` calls it. The public `run_simulation` is deprecated, and `flwr run`
    # needs a checkout and leaves a daemon behind; the version range in pyproject.toml pins what is called here.
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    gpus = scenario.simulation.gpu_fraction if torch.cuda.is_available() else 0.0
    _run_simulation(
        num_supernodes=scenario.federation.sites,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app=client_app,
        server_app=server_app,
        backend_config={
            "init_args": {"logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
        },
    )


def _log_to_file(path: Path) -> None:
    """Send what Flower and Ray would print into a file of the run."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("flwr", "ray", "fl_dpgan"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
