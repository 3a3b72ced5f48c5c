"""Times a round of what public packages give together as they come: Flower's simulation with Opacus in each site.

`simulations.benchmarks.sites` runs it in a process of its own. The peer at its best setting: a Ray actor per core with
one torch thread, all data in every actor's memory, no evaluation. Each message gets its own
`PrivacyEngine.make_private`, as in Flower's Opacus example; G comes along with D and serves for the fakes only. Both
networks are plain layers of torch, so that nothing of fl_dpgan takes part.
"""

import json
import logging
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, repeat
from typing import Literal

import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Mode = Literal["hooks", "functorch", "ew", "ghost"]
Format = Literal["contiguous", "channels_last"]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
RECORDS, BATCH, CLASSES, LATENT = 600, 32, 10, 64

app = ClientApp()


class Discriminator(nn.Module):
    """Scores an image whose label comes along as one-hot maps."""

    def __init__(self, width: int = 32, channels: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels + CLASSES, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(2 * width * 49, 1),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, 28, 28) and (n,) to logits (n,)."""
        onehot = (labels[:, None] == torch.arange(CLASSES)).to(images.dtype)  # torch.func cannot map over `one_hot`
        maps = onehot[:, :, None, None].expand(-1, -1, 28, 28)
        logits: Tensor = self.layers(torch.cat([images, maps], dim=1)).squeeze(1)
        return logits


class Generator(nn.Module):
    """The DCGAN's G."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(LATENT + CLASSES, 64 * 49, bias=False), nn.Unflatten(1, (64, 7, 7)),
            nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(n, LATENT) and (n,) to images (n, 1, 28, 28)."""
        onehot = nn.functional.one_hot(labels, CLASSES).to(z.dtype)
        images: Tensor = self.layers(torch.cat([z, onehot], dim=1))
        return images


def generator(layout: Format) -> Generator:
    """G as the sites use it, with its memory laid out so."""
    return Generator().eval().to(memory_format=FORMATS[layout])


@lru_cache
def site_data(sites: int) -> list[TensorDataset]:
    """Every site's random images and labels; made once a process, so that any actor can stand in for any site."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(sites, RECORDS, 1, 28, 28, generator=random) * 2 - 1
    labels = torch.randint(CLASSES, (sites, RECORDS), generator=random)
    return [TensorDataset(*site) for site in zip(images, labels, strict=True)]


@torch.no_grad()
def fakes(g: nn.Module) -> tuple[Tensor, Tensor]:
    """As many fakes as there are reals in an expected batch."""
    labels = torch.randint(CLASSES, (BATCH,))
    images = g(torch.randn(BATCH, LATENT), labels)
    return images.contiguous(), labels  # Opacus' hooks read channels that lie last as if they did not


def train(d: nn.Module, g: nn.Module, data: TensorDataset, d_steps: int, mode: Mode) -> None:
    """Private steps on D in place, each one pass over a Poisson batch of reals and the fakes."""
    from opacus import PrivacyEngine  # costs seconds, which the server need not wait for

    model, optimizer, *wrapped, loader = PrivacyEngine().make_private(
        module=d.train(), optimizer=torch.optim.Adam(d.parameters(), lr=5e-4), criterion=nn.BCEWithLogitsLoss(),
        data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    criterion = wrapped[0] if wrapped else nn.BCEWithLogitsLoss()  # ghost clipping brings its own
    optimizer.expected_batch_size = 2 * BATCH  # the divisor of the noised sum; make_private counts the reals alone
    for _, (reals, labels) in zip(range(d_steps), chain.from_iterable(repeat(loader)), strict=False):
        fake_images, fake_labels = fakes(g)
        optimizer.zero_grad()
        logits = model(torch.cat([reals, fake_images]), torch.cat([labels, fake_labels]))
        criterion(logits, torch.cat([torch.ones(len(labels)), torch.zeros(BATCH)])).backward()
        optimizer.step()


@app.train()
def answer(message: Message, context: Context) -> Message:
    """A site's part of a round."""
    torch.set_num_threads(1)
    content, config = message.content, message.content["config"]
    d, g = Discriminator(config["width"]), generator(config["layout"])
    d.load_state_dict(content["d"].to_torch_state_dict())
    g.load_state_dict(content["g"].to_torch_state_dict())
    sites, index = int(context.node_config["num-partitions"]), int(context.node_config["partition-id"])
    train(d, g, site_data(sites)[index], config["d-steps"], config["mode"])
    return Message(RecordDict({"d": ArrayRecord(d.state_dict())}), reply_to=message)


def average(replies: Iterable[Message]) -> dict[str, Tensor]:
    """The plain average of the sites' D."""
    states = [reply.content["d"].to_torch_state_dict() for reply in replies]
    return {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}


def timed_round(grid: Grid, d: nn.Module, g: nn.Module, config: dict[str, int | str]) -> float:
    """Seconds from the requests until D is the average of every site's answer."""
    began = time.perf_counter()
    arrays = {"d": ArrayRecord(d.state_dict()), "g": ArrayRecord(g.state_dict())}
    content = RecordDict({**arrays, "config": ConfigRecord(config)})
    requests = [Message(content, dst_node_id=node, message_type=MessageType.TRAIN) for node in grid.get_node_ids()]
    d.load_state_dict(average(grid.send_and_receive(requests)))
    return time.perf_counter() - began


def run(sites: int, d_steps: int, rounds: int, width: int, mode: Mode, layout: Format) -> list[float]:
    """Seconds of each round, after one short round that is not counted: it brings up Ray, the actors and their data."""
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    for name in ("flwr", "ray"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    server_app, seconds = ServerApp(), []
    config = {"d-steps": d_steps, "width": width, "mode": mode, "layout": layout}

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        d, g = Discriminator(width), generator(layout)
        timed_round(grid, d, g, {**config, "d-steps": 1})
        seconds.extend(timed_round(grid, d, g, config) for _ in range(rounds))

    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    _run_simulation(
        num_supernodes=sites,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr=f"{__spec__.name}:app",  # by name, so that the actors import this module and keep their data
        server_app=server_app,
        backend_config={
            "init_args": {"logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return seconds


def main(
    sites: int = 100, d_steps: int = 10, rounds: int = 2, width: int = 32, mode: Mode = "ew",
    layout: Format = "contiguous",
) -> None:  # fmt: skip
    """Print the seconds of each round, as JSON."""
    print(json.dumps(run(sites, d_steps, rounds, width, mode, layout)))


if __name__ == "__main__":
    typer.run(main)
