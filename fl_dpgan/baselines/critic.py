"""A site's own critic and its optimiser for GS-WGAN, kept in a file from one round to the next."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_dpgan.baselines import kept
from fl_dpgan.baselines.gs_wgan import critic_steps
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.training.records import Records
from fl_dpgan.training.state import load_optimizer, optimizer_tensors


class Critic:
    """Opens the critic of a file, or begins with a copy of the federation's discriminator.

    Args:
        path: the file; it has seen records without noise, and never leaves the site.
        template: the federation's discriminator. learning_rate: of the critic's Adam optimiser.

    Attributes:
        module: the critic.
    """

    def __init__(self, path: Path, template: nn.Module, *, learning_rate: float) -> None:
        self.module = copy.deepcopy(template)
        self._path, self._trained_for = path, ""
        # betas: as in GS-WGAN's own code
        self._optimizer = torch.optim.Adam(self.module.parameters(), lr=learning_rate, betas=(0.5, 0.9))
        if found := kept.read(path):
            tensors, notes = found
            self.module.load_state_dict(_part(tensors, "critic."))
            load_optimizer(self._optimizer, _part(tensors, "optimizer."))
            self._trained_for = notes["request"]

    def train(
        self, data: Records, fakes: tuple[Tensor, Tensor], steps: int, random: KeyedGenerator, *, request: str
    ) -> None:
        """Take the round's steps, and keep what they made of the critic; for a request's digest once only.

        A site that stops between these steps and its answer is asked again, and goes on with the critic as it was.
        """
        if request == self._trained_for:
            return
        critic_steps(self.module, self._optimizer, data, fakes, steps, random)
        tensors = {f"critic.{name}": tensor for name, tensor in self.module.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self._optimizer).items()}
        kept.write(self._path, tensors, {"request": request})
        self._trained_for = request


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
