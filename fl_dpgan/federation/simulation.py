"""Simulated sites: the scenario's data split over them, the same `Site` as anywhere, run by Flower's engine on Ray."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fl_dpgan.baselines.non_private import UnprotectedSite
from fl_dpgan.config import Scenario
from fl_dpgan.data import ImageData, load, partition, withhold
from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.evaluation.utility import classifier
from fl_dpgan.federation import cluster, resources, shards
from fl_dpgan.federation.client import respond
from fl_dpgan.federation.gs_wgan import check_plan
from fl_dpgan.federation.reaper import watch
from fl_dpgan.federation.server import OnRound, run_strategy
from fl_dpgan.federation.site import Site
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.privacy.units import Units
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records, check_units


@dataclass(frozen=True)
class Job:
    """What a process needs in order to build its part of a simulation: paths, so that every process reads its own."""

    out: Path
    data_dir: Path | None

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder.open(self.out)


@lru_cache(maxsize=1)
def split_data(scenario: Scenario, data_dir: Path | None) -> tuple[ImageData, list[NDArray[np.int64]]]:
    """The training images and each site's indices, checked against what the scenario declares.

    Raises:
        DataError: files are missing or corrupt, there are more sites than records, or a site lacks a class.
        ConfigError: the scenario names another number of classes than the data have.
    """
    data, model = scenario.data, scenario.model
    images = load(data.source, split="train", size=model.size, channels=model.channels, data_dir=data_dir)
    images, _ = withhold(images, data.withheld) if data.withheld else (images, None)
    if len(images.classes) != model.num_classes:
        raise ConfigError(
            f"model.num_classes = {model.num_classes}, but {data.source} has {len(images.classes)}; set it to that"
        )
    if scenario.privacy.unit == "patient" and images.patients is None:
        raise ConfigError(
            f"privacy.unit = 'patient', but {data.source} has no patient ids; use data.source = 'manifest'"
        )
    parts = _parts(scenario, images)
    for index, part in enumerate(parts):
        missing = sorted(set(range(model.num_classes)) - set(images.labels[part].tolist()))
        if missing and not data.allow_missing_classes:
            named = ", ".join(images.classes[label] for label in missing)
            raise DataError(
                f"site-{index} has no record of class {named}; partition otherwise, or set data.allow_missing_classes"
            )
    return images, parts


def _parts(scenario: Scenario, images: ImageData) -> list[NDArray[np.int64]]:
    """Each site's indices. All images of a patient go to one site: at two, the patient would spend at both."""
    data = scenario.data
    labels, members = images.labels, None
    if scenario.privacy.unit == "patient":
        _, first, codes = np.unique(np.asarray(images.patients), return_index=True, return_inverse=True)
        labels, members = labels[first], codes
    parts = partition(
        labels,
        kind=data.partition,
        num_sites=scenario.federation.sites,
        seed=scenario.seed,
        alpha=data.alpha,
        sizes=data.sizes,
        classes_per_site=data.classes_per_site,
    )
    return parts if members is None else [np.flatnonzero(np.isin(members, part)) for part in parts]


def _records(scenario: Scenario, mine: ImageData) -> Records:
    device, patients = _device(), mine.patients if scenario.privacy.unit == "patient" else None
    return Records(torch.from_numpy(mine.images).to(device), torch.from_numpy(mine.labels).to(device), patients)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(scenario: Scenario, data_dir: Path | None) -> None:
    """Refuse plans and data that cannot work, before anything is made or charged for them.

    Raises:
        ConfigError: the strategy cannot run the plan, or a site's plan is impossible.
        DataError: as for `split_data`, or a site falls short of its size.
        ConfigError, FederationError: RAY_ADDRESS names no cluster, as for `cluster.address`.
    """
    cluster.address()
    if scenario.privacy.update == "image_gradient":
        check_plan(scenario)
    for index in range(scenario.federation.sites):
        scenario.site_plan(scenario.declared_size(index))
    images, parts = split_data(scenario, data_dir)
    for index, part in enumerate(parts):
        patients = images.subset(part).patients if scenario.privacy.unit == "patient" else None
        try:
            check_units(Units(len(part), patients), scenario.declared_size(index))
        except DataError as error:
            raise DataError(f"site-{index}: {error}") from error


def policy(scenario: Scenario, index: int) -> Policy:
    """A simulated site's policy: it accepts the scenario, within the budget that the scenario gives this site."""
    privacy = scenario.privacy
    mechanisms = {
        privacy.update: scenario.training.rounds > 0,
        "evaluation_count": privacy.evaluation_noise is not None,
        "moment_release": privacy.moments is not None,
    }
    return Policy.model_validate(
        {
            "declared_size": scenario.declared_size(index), "unit": privacy.unit, "eps_max": scenario.budget(index),
            "delta": privacy.delta, "eps_per_run": privacy.eps_max,
            "mechanisms": tuple(name for name, used in mechanisms.items() if used),
            "largest_batch_size": privacy.batch_size, "largest_clipping_norm": privacy.clipping.largest,
            "largest_d_steps": scenario.training.d_steps,
            "order": scenario.site_plan(scenario.declared_size(index)).order,
        }
    )  # fmt: skip


@lru_cache(maxsize=1)
def _models(scenario: Scenario) -> Models:
    """The networks that a process's sites share."""
    model = scenario.model
    counting = classifier(model.channels, model.size, model.num_classes)
    return Models(*from_config(model, scenario.seed), counting, device=_device())


@lru_cache(maxsize=4096)
def simulated_site(job: Job, index: int) -> Site:
    """The site of this index; built once a process."""
    scenario = job.folder.scenario
    terms, name = policy(scenario, index), f"site-{index}"
    records, models = _records(scenario, shards.read(job.folder.shards, index)), _models(scenario)
    rate, seed = scenario.training.d_learning_rate, scenario.seed
    if scenario.privacy.non_private:
        state = job.out / "unprotected" / f"{name}.safetensors"
        return UnprotectedSite(name, records, policy=terms, models=models, state=state, learning_rate=rate, seed=seed)
    ledger = job.folder.ledger(name)
    Ledger(ledger, terms.account(name)).close()
    return Site(name, records, policy=terms, models=models, ledger=ledger, learning_rate=rate, seed=seed)


def answer_as_simulated(message: Message, context: Context, job: Job) -> Message:
    """Answer as the simulated sites of the node's partition."""

    def sites_of(context: Context) -> list[Site]:
        federation, node = job.folder.scenario.federation, int(context.node_config["partition-id"])
        first = node * federation.sites_per_node
        return [simulated_site(job, i) for i in range(first, min(first + federation.sites_per_node, federation.sites))]

    return respond(message, context, sites_of)


def serve(job: Job, grid: Grid, on_round: OnRound = lambda record: None) -> None:
    """The server's part of a simulation, once `check` has passed: run the strategy in the job's folder to its end."""
    scenario, folder = job.folder.scenario, job.folder
    shards.write(folder.shards, *split_data(scenario, job.data_dir))
    try:
        run_strategy(folder, grid, on_round)
    finally:
        shards.remove(folder.shards)


def simulate(
    job: Job,
    on_round: OnRound = lambda record: None,
    on_start: Callable[[resources.Resources], None] = lambda chosen: None,
) -> None:
    """Run the scenario in the job's folder on Ray: in this process and its workers, of which none stays behind.

    Where RAY_ADDRESS names a cluster, the workers are on its nodes. `on_start` is told how many there are.

    Raises:
        FlDpganError: the data, the plan or the federation is at fault.
    """
    scenario = job.folder.scenario
    check(scenario, job.data_dir)
    # the last: under `uv run`, Ray would upload the working directory to every node
    os.environ.update(
        FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    )  # fmt: skip
    _log_to_file(job.out / "flower.log")
    watch()
    cluster.connect(job.out, job.data_dir)

    client_app, server_app = ClientApp(), ServerApp()
    for kind in (client_app.query, client_app.train, client_app.evaluate):
        kind()(partial(answer_as_simulated, job=job))

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(job, grid, on_round)

    # Flower's own engine, called as `flwr run` calls it. The public `run_simulation` is deprecated, and `flwr run`
    # needs a checkout and leaves a daemon behind; the version range in pyproject.toml pins what is called here.
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    from fl_dpgan.federation.actors import renew_dead_actors

    renew_dead_actors()
    chosen = resources.choose(
        resources.machines(),
        nodes=scenario.federation.nodes,
        parameters=sum(p.numel() for module in from_config(scenario.model, 0) for p in module.parameters()),
        gpu_fraction=scenario.simulation.gpu_fraction,
    )
    on_start(chosen)
    _run_simulation(
        num_supernodes=scenario.federation.nodes,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app=client_app,
        server_app=server_app,
        backend_config={"client_resources": {"num_cpus": chosen.threads, "num_gpus": chosen.gpu_fraction}},
    )


def _log_to_file(path: Path) -> None:
    """Send what Flower and Ray would print into a file of the run."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("flwr", "ray", "fl_dpgan"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
