"""Times what the guard costs: a round through its socket beside the trainer alone, and Flower's process per message."""

import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from fl_dpgan.config import Settings
from fl_dpgan.federation import Models, Policy, Records, Site, relay, wire
from fl_dpgan.federation.guard import Guard
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update
from simulations.benchmarks.common import Result, interleaved, milliseconds, ratio, scratch, table, torch_threads
from simulations.benchmarks.processes import DeployedSite, Process, free_port, run, wait

_SIZE = 2000
_PLAN = {"privacy": {"batch_size": 64, "eps_max": 900.0}, "training": {"d_steps": 50, "rounds": 200}}


def measure(rounds: int) -> Result:
    """Seconds of a round of 50 D steps (B = 64, the default networks) at the trainer alone and through guard and wire,
    and from a ClientApp process's start to its hand-over, in a federation of one site.

    Args:
        rounds: of each.
    """
    with torch_threads(1), scratch() as folder:
        found = _rounds(folder, rounds)
        ages = _ages(folder / "deployed", rounds)
    return {
        "trainer_ms": milliseconds(found["trainer"]), "guard_ms": milliseconds(found["guard"]),
        "overhead": ratio(found, "guard", "trainer") - 1, "hand_over_s": statistics.median(ages), "ages_s": ages,
    }  # fmt: skip


def render(result: Result) -> Table:
    """A row per measurement."""
    made = table("The guard (medians, one thread)", "what", "found", "limit")
    made.add_row("a round of 50 D steps, B = 64: the trainer alone", f"{result['trainer_ms']:.0f} ms", "")
    made.add_row("the same through guard, ledger and wire", f"{result['guard_ms']:.0f} ms", "")
    made.add_row("overhead within a round", f"{result['overhead']:.1%}", "5%")
    made.add_row("a ClientApp's process, start to hand-over", f"{result['hand_over_s']:.2f} s", "1.5 s")
    return made


def _rounds(folder: Path, rounds: int) -> dict[str, list[float]]:
    settings = Settings.model_validate(_PLAN)
    generator, discriminator = from_config(settings.model, 0)
    policy = Policy(declared_size=_SIZE, eps_max=1000, eps_per_run=1000)
    ledger, socket = folder / "ledger.sqlite", folder / "guard.sock"
    Ledger(ledger, policy.account("one")).close()
    plan = settings.site_plan(_SIZE, policy.ledger_order)
    images = torch.randint(0, 256, (_SIZE, 1, 28, 28), dtype=torch.uint8)
    data = Records(images, torch.arange(_SIZE) % settings.model.num_classes)
    models = Models(generator, discriminator)
    site = Site("one", data, policy=policy, models=models, ledger=ledger, learning_rate=1e-3)
    numbers, weights = count(1), wire.dump(discriminator=discriminator, generator=generator)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    random = KeyedGenerator.from_os()

    def train() -> None:
        local_update(discriminator, generator, optimizer, data, plan, first_step=0, random=random, engine=models.engine)

    # the guard works in a thread of its own; the trainer in another, for PyTorch counts threads by thread
    with _at_work(site, socket, ledger), ThreadPoolExecutor(1) as trainer:
        actions = {
            "trainer": lambda: trainer.submit(train).result(),
            "guard": lambda: _ask(socket, next(numbers), plan, weights),
        }
        return interleaved(actions, rounds)


def _ask(socket: Path, number: int, plan: SitePlan, weights: bytes) -> None:
    request = wire.Request(run="benchmark", round=number, site="one", plan=plan)
    answer, _ = relay.ask(socket, "train", request.model_dump_json(), weights)
    if wire.parse(answer, wire.Answer).status != "trained":
        raise RuntimeError(answer)


@contextmanager
def _at_work(site: Site, socket: Path, ledger: Path) -> Iterator[None]:
    guard = Guard(site, wire.Question(), path=socket, lock=ledger.with_suffix(".guard"), largest=1 << 27)
    thread = threading.Thread(target=guard.serve)
    thread.start()
    try:
        yield
    finally:
        guard.stop()
        thread.join()


def _ages(home: Path, rounds: int) -> list[float]:
    """What a socket before the guard sees of Flower's processes, in a real federation of one site."""
    server, place, processes = home / "server", home / "site", list[Process]()
    place.mkdir(parents=True)
    port, classes = free_port(), ["--class=a", "--class=b"]
    run("server", "init", server, "--host", "127.0.0.1", "--port", port, *classes)
    text = (server / "federation.toml").read_text()
    for key, before, after in (
        ("sites", 3, 1), ("quorum", 2, 1), ("rounds", 30, rounds), ("d_steps", 50, 1), ("g_steps", 100, 1),
    ):  # fmt: skip
        text = text.replace(f"\n{key} = {before}\n", f"\n{key} = {after}\n")
    (server / "federation.toml").write_text(text)
    np.savez(place / "site.npz", images=np.zeros((200, 28, 28), np.uint8), labels=np.arange(200) % 2)
    site = DeployedSite(place, "one", 200, "npz", place / "site.npz", eps_max=50.0)
    site.label(**{"0": "a", "1": "b"})
    for file in ("federation.toml", "ca.crt"):
        (place / file).write_bytes((server / file).read_bytes())
    site.make_ledger()
    try:
        processes.append(Process(home / "superlink.log", "server", "start", server, "--local"))
        wait(lambda: "Uvicorn running" in processes[0].said(), 60, "the SuperLink")
        run("server", "register", server, place / "node.key.pub", "one")
        tap = site.tap()
        site.start_guard()
        site.start_node("tapped.toml")
        run("server", "run", server / "federation.toml", "--out", home / "run")
        return tap.ages
    finally:
        site.stop()
        for process in processes:
            process.stop()
