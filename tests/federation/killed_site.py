"""A process that serves a site's training requests until it is killed, and says which point it has reached."""

import os
import random
import struct
import time
from pathlib import Path

import torch
from flwr.app import Message, MessageType

from fl_dpgan.federation import Policy, Records, Site, wire
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation.client import Pack
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy import ledger as ledger_module
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.training.models import Models

SIZE = 40
#: What a process has done last, in the order in which it comes to pass. Creation has three moments: nothing is written
#: yet; the new file is whole, but under another name; it has its name, but the folder is not synced yet. Those of
#: `WINDOW` lie between charge and send.
POINTS = ("creating", "asked", "charging", "charged", "training", "trained", "storing", "stored", "sending", "sent")
WINDOW = POINTS[3:9]
POLICY = Policy(declared_size=SIZE, eps_max=1000, eps_per_run=1000)
PLAN = SitePlan.derive(
    PrivacyConfig(batch_size=4, eps_max=1000, noise_multiplier=1.0),
    declared_size=SIZE,
    d_steps=2,
    rounds=1000,
    order=POLICY.ledger_order,
)


def networks() -> tuple[Generator, Discriminator]:
    torch.manual_seed(0)
    shape = {"size": 28, "channels": 1, "num_classes": 2}
    return Generator(**shape, latent_dim=4, width=2), Discriminator(**shape, width=2)


def new_site(ledger: Path) -> Site:
    """A site as it is deployed: without a seed."""
    images = torch.rand(SIZE, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return Site(
        "site-0",
        Records(images, torch.arange(SIZE) % 2),
        policy=POLICY,
        models=Models(*networks()),
        ledger=ledger,
        learning_rate=1e-3,
    )


def request(number: int) -> Message:
    generator, discriminator = networks()
    header = wire.Request(run="kill", round=number, site="site-0", plan=PLAN)
    content = wire.pack(header, wire.dump(discriminator=discriminator, generator=generator))
    message = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = str(number)
    return message


def serve(ledger: Path, first: int, points: int, answers: int, stall: str, seed: int) -> None:
    """Answer the requests of rounds `first`, `first` + 1, ... into `answers`, for ever.

    Args:
        ledger: the site's; created if there is none, then opened, and verified, as in any new process.
        points, answers: pipes. A point is one byte; an answer its length, its header and its tensors.
        stall: the point at which every process waits a little longer, so that some are killed there. seed: of the wait.
    """
    source = random.Random(seed)

    def reached(point: str) -> None:
        os.write(points, bytes([POINTS.index(point)]))
        time.sleep(source.uniform(0.03, 0.06) if point == stall else 0.0)

    _say(Ledger, "_create", "creating", None, reached)
    _say(ledger_module, "sync", "creating", None, reached)
    _say(Ledger, "charge", "charging", "charged", reached)
    _say(site_module, "local_update", "training", "trained", reached)
    _say(Ledger, "store_answer", "storing", "stored", reached)
    Ledger(ledger, POLICY.account("site-0")).close()
    site = new_site(ledger)
    number = first
    while True:
        reached("asked")
        content = Pack([site]).train(request(number)).content.config_records["fl_dpgan"]
        header, tensors = str(content["headers"][0]).encode(), bytes(content["tensors"][0])
        reached("sending")
        os.write(answers, struct.pack("<III", number, len(header), len(tensors)) + header + tensors)
        reached("sent")
        number += 1


def _say(owner: object, name: str, before: str, after: str | None, reached) -> None:
    plain = getattr(owner, name)

    def told(*args, **kwargs):
        reached(before)
        result = plain(*args, **kwargs)
        if after:
            reached(after)
        return result

    setattr(owner, name, told)


def read_answers(raw: bytes) -> list[tuple[int, str, bytes]]:
    """The whole answers in what came through the pipe: round, header, tensors. A torn one has not arrived."""
    found, place = [], 0
    while place + 12 <= len(raw):
        number, header, tensors = struct.unpack_from("<III", raw, place)
        place += 12
        if place + header + tensors <= len(raw):
            found.append((number, raw[place : place + header].decode(), raw[place + header :][:tensors]))
        place += header + tensors
    return found
