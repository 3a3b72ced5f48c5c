"""GSWGAN: the strategy that sends the sites fakes, and trains G along their noised gradients with respect to them."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor, nn, zeros

from fl_dpgan.baselines.gs_wgan import noise_sd
from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.generator import Loss


class GSWGAN(FedDPGAN):
    """GS-WGAN (Chen, Orekondy, Fritz, arXiv 2006.08265) in a federation: one round is one G step.

    The critics stay at the sites; the discriminator given here is the form that they have, and is not trained. G's
    batch is the plan's `privacy.batch_size`, which the sites' sensitivity depends on; `training.g_batch_size` is not
    looked at.

    Args: as for `FedDPGAN`.

    Raises:
        ConfigError: the plan is not one of image gradients, or takes several G steps a round.
    """

    _answered: ClassVar[str] = "released"

    def __init__(self, plan: Plan, generator: nn.Module, discriminator: nn.Module, **options: Any) -> None:
        check_plan(plan)
        super().__init__(plan, generator, discriminator, **options)
        batch = plan.privacy.batch_size
        self._template = zeros(batch, *self._trainer.preview(batch_size=2, seed=0)[0].shape[1:], device="meta")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The fakes of this round's G step to each site that has not withdrawn; none in rounds of moments alone."""
        if server_round <= self.plan.matching.rounds:
            return ()
        images, labels = self._trainer.preview(
            batch_size=self.plan.privacy.batch_size, seed=self.plan.round_seed(server_round)
        )
        fakes = wire.dump_tensors(images=images, labels=labels)
        return self._exchange.requests(server_round, fakes, "image_gradient", grid.get_node_ids())

    def _learn(self, number: int, mean: dict[str, Tensor]) -> float:
        """One G step on the fakes that the sites have seen, along their mean gradient."""
        along = _along(mean["gradient"])
        return self._train_generator(number, along, steps=1, batch_size=self.plan.privacy.batch_size)

    def _read(self, tensors: bytes, plan: SitePlan) -> dict[str, Tensor]:
        """A site's noised gradients; one site must not be able to ruin the run with others than an honest one has."""
        given = wire.read_tensors(tensors, gradient=self._template)
        c, norm = plan.clipping.largest, float(given["gradient"].double().norm())
        sd = noise_sd(plan.noise_multiplier, c, plan.batch_size)
        most = 1.01 * c * math.sqrt(plan.batch_size) + sd * (math.sqrt(self._template.numel()) + 10)
        if not norm <= most:
            raise WireError(f"gradients of norm {norm:.3g}, beyond {most:.3g}, which no honest site has")
        return given


def check_plan(plan: Plan) -> None:
    """Refuse a plan that cannot be run as GS-WGAN.

    Raises:
        ConfigError: as for `GSWGAN`.
    """
    if plan.privacy.update != "image_gradient":
        raise ConfigError(f"GS-WGAN needs privacy.update = 'image_gradient', not {plan.privacy.update!r}; set it")
    if plan.training.g_steps != 1:
        raise ConfigError(
            f"training.g_steps = {plan.training.g_steps}, but the sites' gradients are good for one G step a round; "
            "set it to 1, and training.rounds to the number of G steps"
        )


def _along(gradient: Tensor) -> Loss:
    """The loss whose gradient with respect to each of its images is the one given, over B."""

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return (images * gradient.to(images)).sum() / len(images)

    return loss
