"""What a D step really adds to the clipped sum: the optimiser's gradient less what the engine summed up."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fl_dpgan.privacy.engines import Engine
from fl_dpgan.privacy.layers import LayerEngine


class Steps:
    """D steps, in their order.

    Attributes:
        gradients: what the optimiser found, (numbers of D,). sums: what the engine gave, likewise.
        images: the reals in the batch. norms: C_t.
    """

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.images: list[Tensor] = []
        self.norms: list[float] = []

    def of(self, kind: Callable[[nn.Module], Engine] = LayerEngine) -> Callable[[nn.Module], Engine]:
        """What makes an engine of this kind that notes its part of each step here."""
        return lambda discriminator: _Noting(self, kind(discriminator))

    def noise(self, batch_size: int) -> NDArray[np.float64]:
        """What was added to each step's clipped sum, (steps, numbers of D), in units of that step's C_t."""
        rows = [
            (2 * batch_size * gradient - clipped) / norm
            for gradient, clipped, norm in zip(self.gradients, self.sums, self.norms, strict=True)
        ]
        return torch.stack(rows).numpy()


class _Noting:
    def __init__(self, steps: Steps, engine: Engine) -> None:
        self._steps, self._engine = steps, engine
        self.close = engine.close

    def clipped_sum(self, images, labels, targets, clipping_norm, rule):
        total, norms = self._engine.clipped_sum(images, labels, targets, clipping_norm, rule)
        self._steps.images.append(images[targets == 1])
        self._steps.norms.append(clipping_norm)
        self._steps.sums.append(torch.cat([part.double().flatten() for part in total]))
        return total, norms


@contextmanager
def watched() -> Iterator[Steps]:
    """The steps that this thread's optimisers take in the meantime."""
    steps, here = Steps(), threading.get_ident()

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if threading.get_ident() == here:
            found = [p.grad.double().flatten() for group in optimizer.param_groups for p in group["params"]]
            steps.gradients.append(torch.cat(found))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield steps
    finally:
        handle.remove()
