"""What the tests share: one torch thread, and a small federation that needs no Ray."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, MessageType
from flwr.supercore.task_identity import TaskIdentity

from fl_dpgan import cli
from fl_dpgan.config import Plan
from fl_dpgan.federation import FedDPGAN, Policy, Records, Site
from fl_dpgan.federation.client import Pack
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy import engines, layers
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="All trials of the long random tests, not a part of them.")
    parser.addoption("--schedules", type=int, default=30, help="How many schedules of faults tests/soak carries out.")
    parser.addoption("--first-schedule", type=int, default=0, help="The number of the first of them.")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the long random tests take all of their trials."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture
def takes_minutes(thorough: bool) -> None:
    """For tests that take minutes."""
    if not thorough:
        pytest.skip("takes minutes: run by `make soak`")


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> range:
    """The numbers of the schedules of faults that are to be carried out."""
    first = request.config.getoption("--first-schedule")
    return range(first, first + request.config.getoption("--schedules"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what starts Ray: such tests run one after another, for one would find the other's cluster."""
    if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
        item.add_marker("ray")


@pytest.fixture(autouse=True)
def _identity() -> None:
    """Flower's messages take their sender from here; in a run Flower sets it."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


@contextmanager
def passes_of(samples: int) -> Iterator[None]:
    """Let the engines take so few samples at a time that small batches need several passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_LARGEST", samples)
        patch.setattr(layers, "_MULTIPLE", min(samples, 3))
        patch.setattr(engines, "_PASS", samples)
        yield


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of an `fl-dpgan` command."""
    monkeypatch.setattr(sys, "argv", ["fl-dpgan", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


class LocalGrid:
    """Delivers messages to sites in this process; `handlers` maps a node id to what answers a message there."""

    def __init__(self, handlers: dict[int, Callable[[Message], Message | None]]) -> None:
        self.handlers = handlers
        self.sent: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return list(self.handlers)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"{len(self.sent)}-{number}"
            self.sent.append(message)
            try:
                reply = self.handlers[message.metadata.dst_node_id](message)
            except Exception as error:  # Flower turns a crash into an error reply
                reply = Message(Error(code=2, reason=type(error).__name__), reply_to=message)
            if reply is not None:
                replies.append(reply)
        return replies[::-1]  # answers arrive in no particular order


def handler(*sites: Site) -> Callable[[Message], Message | None]:
    """What answers the messages to a node that stands for these sites."""
    pack = Pack(sites)
    answers = {MessageType.QUERY: pack.hello, MessageType.TRAIN: pack.train, MessageType.EVALUATE: pack.evaluate}
    return lambda message: answers[message.metadata.message_type](message)


class Federation:
    """A tiny federation in a folder: 28-pixel noise images, two classes, narrow networks."""

    def __init__(self, path: Path, *, sites: int = 2, rounds: int = 2, quorum: int = 1, seed: int = 0) -> None:
        self.path = path
        self.plan = Plan.model_validate(
            {
                "seed": seed,
                "privacy": {"batch_size": 4},
                "training": {"rounds": rounds, "d_steps": 2, "g_steps": 1, "g_batch_size": 4},
                "federation": {"sites": sites, "quorum": quorum, "round_timeout": 1.0},
            }
        )
        self.sites = {n: self.site(n) for n in range(sites)}

    def networks(self) -> tuple[Generator, Discriminator]:
        torch.manual_seed(self.plan.seed)
        shape = {"size": 28, "channels": 1, "num_classes": 2}
        return Generator(**shape, latent_dim=4, width=2), Discriminator(**shape, width=2)

    def ledger(self, number: int) -> Path:
        return self.path / "ledgers" / f"site-{number}.sqlite"

    def data(self, number: int, records: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(100 + number)
        return torch.rand(records, 1, 28, 28, generator=random) * 2 - 1, torch.arange(records) % 2

    def site(self, number: int, *, data=None, eps_max: float = 10.0, **policy) -> Site:
        generator, discriminator = self.networks()
        terms = Policy.model_validate({"declared_size": 40, "eps_max": eps_max, **policy})
        account, path = terms.account(f"site-{number}"), self.ledger(number)
        if unused_on_other_terms(path, account):
            path.unlink()  # made by `sites` on the default terms
        if not path.exists():
            Ledger(path, account).close()
        return Site(
            f"site-{number}",
            Records(*(data or self.data(number))),
            policy=terms,
            models=Models(generator, discriminator),
            ledger=self.ledger(number),
            learning_rate=1e-3,
            seed=self.plan.seed,
        )

    def grid(self) -> LocalGrid:
        return LocalGrid({n + 10: handler(site) for n, site in self.sites.items()})

    def strategy(self, **kwargs) -> FedDPGAN:
        generator, discriminator = self.networks()
        self.path.mkdir(parents=True, exist_ok=True)
        return FedDPGAN(self.plan, generator, discriminator, folder=RunFolder(self.path), run="test", **kwargs)

    def request(self, number: int = 0, round_number: int = 1) -> Message:
        """The strategy's own request to a site."""
        strategy, grid = self.strategy(), self.grid()
        strategy._join(grid)
        requests = list(strategy.configure_train(round_number, None, None, grid))
        return grid_sent(requests[number])


def charges(fed: Federation, number: int = 0) -> list[Event]:
    """What a site has charged, in order."""
    with closing(LedgerReader(fed.ledger(number))) as ledger:
        return [charge.event for charge in ledger.charges()]


def log(fed: Federation) -> list[dict[str, Any]]:
    """The round log."""
    return list(RunFolder(fed.path).rounds())


def unused_on_other_terms(path: Path, account: Account) -> bool:
    if not path.exists():
        return False
    with closing(LedgerReader(path)) as ledger:
        return ledger.account != account and not ledger.charges()


def grid_sent(message: Message) -> Message:
    message.metadata.__dict__["_message_id"] = "sent"
    return message


@pytest.fixture
def federation(tmp_path: Path) -> Callable[..., Federation]:
    return lambda name="run", **kwargs: Federation(tmp_path / name, **kwargs)
