"""A small federation in a folder: three sites with noise for images, a server, and the disks that they write to."""

import ctypes
import os
import resource
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from faults import SERVER, SITES, Schedule

from fl_dpgan.config import Federation, ModelConfig
from fl_dpgan.federation import Policy, Records, Site
from fl_dpgan.federation.deployment import question
from fl_dpgan.federation.guard import Guard
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models

# what the processes would each load for themselves: they are forks of this one
for late in ("torch._dynamo", "torchvision.utils"):
    import_module(late)

NAMES = [f"site-{number}" for number in range(SITES)]
DECLARED = (40, 30, 20)
D_STEPS, TIMEOUT = 2, 1.0
#: Bytes of each file that may still be written where a disk is "full" because no other one could be mounted.
LEFT = 8192
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of unshare(2)


class Home:
    """Who is who, and where things are."""

    def __init__(self, path: Path, schedule: Schedule) -> None:
        self.path, self.schedule = path, schedule
        path.mkdir()
        full = {fault.who for fault in schedule.faults if fault.kind.startswith("disk")}
        places = [*NAMES, "run"]
        self.disks = [Disk(path / place, its_own=who in full) for who, place in enumerate(places)]
        self.federation = Federation.model_validate(
            {
                "name": "soak",
                "seed": schedule.seed % 2**31,
                "classes": ["healthy", "ill"],
                "address": "127.0.0.1:1",
                "model": {"num_classes": 2, "latent_dim": 4, "g_width": 2, "d_width": 2},
                "privacy": {"batch_size": 4} | ({} if schedule.tight else {"noise_multiplier": 5.0}),
                "training": {"rounds": schedule.rounds, "d_steps": D_STEPS, "g_steps": 1, "g_batch_size": 4},
                "federation": {
                    "sites": SITES, "quorum": schedule.quorum, "round_timeout": TIMEOUT, "join_timeout": TIMEOUT / 2,
                },
            }
        )  # fmt: skip
        self._models = models(self.federation.model)
        RunFolder.create(self.run, self.federation)
        for number in range(SITES):
            Ledger(self.ledger(number), self.policy(number).account(NAMES[number])).close()

    @property
    def run(self) -> Path:
        return self.disks[SERVER].path

    def ledger(self, number: int) -> Path:
        return self.disks[number].path / "ledger.sqlite"

    def guard_socket(self, number: int) -> Path:
        return self.path / f"guard-{number}"

    def node_socket(self, number: int) -> Path:
        return self.path / f"node-{number}"

    def policy(self, number: int) -> Policy:
        return Policy(declared_size=DECLARED[number], eps_max=10.0 if self.schedule.tight else 1000.0, order=8.0)

    def guard(self, number: int) -> Guard:
        """A guard as it is deployed: its site has no seed."""
        random = torch.Generator().manual_seed(number)
        images = torch.rand(DECLARED[number], 1, 28, 28, generator=random) * 2 - 1
        site = Site(
            NAMES[number],
            Records(images, torch.arange(len(images)) % 2),
            policy=self.policy(number),
            models=self._models,
            ledger=self.ledger(number),
            learning_rate=self.federation.training.d_learning_rate,
        )
        lock = self.ledger(number).with_name("ledger.sqlite.guard")
        return Guard(site, question(self.federation), path=self.guard_socket(number), lock=lock, largest=1 << 24)

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


class Disk:
    """A folder, on a disk of its own if that is to be full; where none can be mounted, its user may write no more."""

    def __init__(self, path: Path, *, its_own: bool) -> None:
        self.path, self.mounted = path, False
        path.mkdir()
        if its_own and can_mount():
            _mount(path)
            self.mounted = True

    def fill(self) -> None:
        """Called by the process that writes to it."""
        if not self.mounted:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT, most))
            return
        descriptor = os.open(self.path / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while True:
                os.write(descriptor, bytes(4096))
        except OSError:
            os.close(descriptor)

    def empty(self, pid: int | None) -> None:
        """Make room again. pid: of the process that writes to it."""
        if self.mounted:
            (self.path / "filler").unlink(missing_ok=True)
        elif pid is not None:
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", self.path], check=True)


def _mount(path: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", path], check=True, stderr=subprocess.DEVNULL
    )


@cache
def models(model: ModelConfig) -> Models:
    """The networks of every site, made once: each process has a copy of its own."""
    return Models(*from_config(model, 0))


@cache
def can_mount() -> bool:
    """Whether this process may mount small disks: nobody else sees them, and they go with it, however it ends."""
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    with TemporaryDirectory() as folder:
        try:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True, stderr=subprocess.DEVNULL)
            _mount(Path(folder))
        except (OSError, subprocess.CalledProcessError):
            return False
        subprocess.run(["umount", folder], check=True)
        return True
