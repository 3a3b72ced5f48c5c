"""The audit in many runs: one canary, there or not, and a model so small that thousands of runs are affordable.

Jagielski, Ullman and Oprea, arXiv 2006.07709, with the canary and the records at their worst: the canary alone has a
gradient, far beyond C and along one weight, and plain steps of gradient descent hide nothing of the noised sum.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_dpgan.audit.outcome import Outcome, Point
from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.accountant import best_order, epsilon
from fl_dpgan.privacy.audit import many_runs_bound, rates_bound
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records

#: Claims and rates are compared at each of these that is above the plan's delta, and at that.
DELTAS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2, 0.3)
_SIDE = 4
#: So small that D's logits stay near 0, where the canary's gradient is longest.
_RATE = 1e-6


class _Linear(nn.Module):
    """A discriminator of one weight a pixel, all zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_SIDE**2, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, 1, side, side) to logits (n,)."""
        logits: Tensor = self.head(images.flatten(1))
        return logits.squeeze(1)


class _Blank(nn.Module):
    """A generator of images that are zero, from which D's weights have no gradient."""

    latent_dim, num_classes = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.zeros(1, _SIDE, _SIDE))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(n, 1) and (n,) to images (n, 1, side, side)."""
        return self.image.expand(len(z), -1, -1, -1)


def audit_many_runs(
    plan: SitePlan, *, runs: int, confidence: float, seed: int, on_run: Callable[[], None] = lambda: None
) -> Outcome:
    """Take the plan's steps so often, half of the runs with the canary, and compare the rates with the plan's events.

    Every second run chooses the threshold; the others are counted, and their two rates bound epsilon at every delta
    together. What is claimed is the events' epsilon at each delta, at its best order, since the plan is fixed.

    Args:
        plan: of updates of D. runs: at least 40. seed: of the noise and the samples.

    Raises:
        ConfigError: too few runs, or the plan has no updates of D.
    """
    if runs < 40:
        raise ConfigError(f"{runs} runs say nothing; take 40 or more")
    if plan.update != "discriminator_update" or not plan.rounds:
        raise ConfigError("the plan has no updates of a discriminator; audit one that has")
    scores = {there: np.empty(runs // 2) for there in (False, True)}
    models = Models(_Blank(), _Linear())
    for number in range(runs // 2):
        for there in (False, True):
            random = KeyedGenerator.from_seed(seed, "audit", number, there)
            scores[there][number] = _score(plan, models, random, there=there)
            on_run()
    return _outcome(scores[True], scores[False], plan, confidence)


def _score(plan: SitePlan, models: Models, random: KeyedGenerator, *, there: bool) -> float:
    """How far one run's D went in the canary's direction, in clipping norms of the sum."""
    images = torch.zeros(plan.declared_size + there, 1, _SIDE, _SIDE)
    if there:
        images[-1, 0, 0, 0] = 20 * plan.clipping.largest  # at a logit of 0 its gradient is half as long
    data = Records(images, torch.zeros(len(images), dtype=torch.int64))
    discriminator, followed = _Linear(), None
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=_RATE)
    for number in range(plan.rounds):
        followed = local_update(
            discriminator, models.generator, optimizer, data, plan,
            first_step=number * plan.d_steps, random=random, followed=followed, engine=models.engine,
        )  # fmt: skip
    return float(discriminator.head.weight.detach()[0, 0]) / _RATE * 2 * plan.batch_size


def _outcome(members: NDArray[np.float64], others: NDArray[np.float64], plan: SitePlan, confidence: float) -> Outcome:
    deltas = [plan.delta, *(delta for delta in DELTAS if delta > plan.delta)]
    every = [(delta, epsilon(plan.whole_run, best_order(plan.whole_run, delta), delta)) for delta in deltas]
    claims = [(delta, claimed) for delta, claimed in every if claimed > 0]

    def bounds(half: slice, threshold: float) -> tuple[list[float], str]:
        inside, outside = members[half], others[half]
        found, alarms = int((inside >= threshold).sum()), int((outside >= threshold).sum())
        tpr, fpr = rates_bound(found, len(inside), alarms, len(outside), confidence=confidence)
        seen = f"{found} of {len(inside)} found, {alarms} of {len(outside)} false alarms"
        return [many_runs_bound(tpr, fpr, delta) for delta, _ in claims], seen

    def reached(threshold: float) -> float:
        found, _ = bounds(slice(0, None, 2), threshold)
        return max(bound / claimed for bound, (_, claimed) in zip(found, claims, strict=True))

    candidates = np.quantile(np.concatenate([members[::2], others[::2]]), np.linspace(0.005, 0.995, 100))
    found, seen = bounds(slice(1, None, 2), float(max(candidates, key=reached)))
    points = [Point(delta, bound, claimed, seen) for bound, (delta, claimed) in zip(found, claims, strict=True)]
    return Outcome(f"{len(members) + len(others)} runs, one canary", "delta", confidence, plan.delta, tuple(points))
