"""A Flower app of its own on this library: another data set (two textures) and other networks."""

import os
from pathlib import Path

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fl_dpgan.config import Plan
from fl_dpgan.federation import FedDPGAN, Models, Policy, Records, Site, register
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.runs import RunFolder

OUT = Path(os.environ.get("OWN_APP_OUT", "runs/own-app")).absolute()
PLAN = Plan.model_validate({"privacy": {"batch_size": 16}, "training": {"rounds": 2}, "federation": {"sites": 2}})


class G(nn.Sequential):
    latent_dim, num_classes = 8, 2

    def forward(self, z, labels):
        return super().forward(z + labels[:, None])


class D(nn.Sequential):
    def forward(self, images, labels):
        return super().forward(images).squeeze(1)


def networks():
    g = G(nn.Linear(8, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
    return g, D(nn.Flatten(), nn.Linear(64, 32), nn.GroupNorm(4, 32), nn.LeakyReLU(), nn.Linear(32, 1))


def site(context):
    number = int(context.node_config["partition-id"])
    labels = torch.arange(200) % 2
    stripes = torch.sin(torch.rand(200, 8, 8) + torch.arange(8) * (1 + labels)[:, None, None])
    name, policy, ledger = f"lab-{number}", Policy(declared_size=200), OUT / f"lab-{number}.sqlite"
    Ledger(ledger, policy.account(name)).close()  # made on the first call; at a real site, once: fl-dpgan site ledger
    return Site(name, Records(stripes[:, None], labels), policy=policy, models=Models(*networks()), ledger=ledger,
                learning_rate=1e-3)  # fmt: skip


client, server = ClientApp(), ServerApp()
register(client, site)


@server.main()
def main(grid, context):
    OUT.mkdir(parents=True, exist_ok=True)
    FedDPGAN(PLAN, *networks(), folder=RunFolder(OUT), run="own-app").start(grid)
