"""The one object from which a site's sampler, noise, clipping and event come, so that they cannot drift apart."""

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fl_dpgan.privacy.accountant import ORDERS, Event, best_order, calibrate, epsilon
from fl_dpgan.privacy.clipping import ClippingRule, EpsilonAdaptive, Quantile
from fl_dpgan.privacy.entries import Unit
from fl_dpgan.privacy.moments import Features
from fl_dpgan.privacy.noise import KeyedGenerator, noised
from fl_dpgan.privacy.units import Indices, Units

if TYPE_CHECKING:
    from torch import Tensor

#: The smallest sigma that a plan may have; a budget that would allow less is simply not used up.
LEAST_NOISE = 0.1


def _preset(order: float) -> float:
    if order not in ORDERS:
        raise ValueError(f"order {order:g} is not one of the accountant's; use a whole number from 2 to 63")
    return order


Order = Annotated[float, AfterValidator(_preset)]

#: What a round's answer is: D after noised steps, or noised gradients of the site's own critic with respect to fakes.
Update = Literal["discriminator_update", "image_gradient"]


class MomentsConfig(BaseModel):
    """A release of noised class sums before the first round.

    Attributes:
        features: what is summed up.
        share: what the release would cost by itself, as a share of the run's eps_max. All of it goes to the release
            where there are no rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    features: Features = Features()
    share: float = Field(0.5, gt=0, le=1)


class PrivacyConfig(BaseModel):
    """What a federation proposes, the same for every site.

    Attributes:
        eps_max, delta: the run's share of each site's budget.
        batch_size: B, the expected number of real records in a D step, and the exact number of fakes.
        noise_multiplier: sigma; left out, the smallest one with which the whole run fits eps_max.
        unit: what is protected.
        evaluation_noise: sigma of the sites' noised count of images that a classifier trained on synthetic ones gets
            right; left out, no site is asked. evaluation_every: rounds between two such questions.
        moments: a moment release before the first round; left out, there is none.
        update: what a round's answer is.
        non_private: noise and clipping off, to compare with. Only simulated sites take part in such a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    eps_max: float = Field(10.0, gt=0, le=1000, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, lt=0.5, allow_inf_nan=False)
    batch_size: int = Field(64, ge=1, le=100_000)
    noise_multiplier: float | None = Field(None, ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    clipping: ClippingRule = EpsilonAdaptive()
    unit: Unit = "image"
    evaluation_noise: float | None = Field(None, ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    evaluation_every: int = Field(10, ge=1, le=10**6)
    moments: MomentsConfig | None = None
    update: Update = "discriminator_update"
    non_private: bool = False

    @model_validator(mode="after")
    def _one_way_without_protection(self) -> "PrivacyConfig":
        protected = {
            "moments": self.moments is not None,
            "evaluation_noise": self.evaluation_noise is not None,
            "update": self.update != "discriminator_update",
        }
        for key, is_set in protected.items():
            if self.non_private and is_set:
                raise ValueError(f"non_private leaves the noise out of D's updates and of nothing else; unset {key}")
        return self


class SitePlan(BaseModel):
    """The constants of one site's part in a run. They derive from its declared size; nothing here has seen a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    declared_size: int = Field(ge=1, le=10**10)
    batch_size: int = Field(ge=1, le=100_000)
    d_steps: int = Field(ge=1, le=100_000)
    rounds: int = Field(ge=0, le=10**7)
    noise_multiplier: float = Field(ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    eps_max: float = Field(gt=0, le=1000, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=0.5, allow_inf_nan=False)
    order: Order
    clipping: ClippingRule
    unit: Unit = "image"
    evaluation_noise: float | None = Field(None, ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    evaluation_every: int = Field(10, ge=1, le=10**6)
    moments: Features | None = None
    moment_noise: float | None = Field(None, ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    update: Update = "discriminator_update"
    non_private: bool = False

    @model_validator(mode="after")
    def _possible(self) -> "SitePlan":
        if self.batch_size > self.declared_size:
            raise ValueError(
                f"batch size {self.batch_size} is larger than the site's declared size {self.declared_size}; "
                f"set privacy.batch_size to at most {self.declared_size}"
            )
        if self.delta > 1 / (10 * self.declared_size):
            raise ValueError(
                f"delta = {self.delta:g} is more than 1/(10 N^) for the declared size N^ = {self.declared_size}; "
                f"set privacy.delta to at most {1 / (10 * self.declared_size):.1e}"
            )
        if self.d_steps * self.rounds > 10**9:
            raise ValueError(f"{self.rounds} rounds of {self.d_steps} D steps are more than 10^9 steps; take fewer")
        if (self.moments is None) != (self.moment_noise is None):
            raise ValueError("a moment release needs both features and noise; give both or neither")
        if self.rounds == 0 and self.moments is None:
            raise ValueError("a plan without rounds and without a moment release does nothing; set training.rounds")
        if isinstance(self.clipping, Quantile) and 2 * self.clipping.count_noise <= self.noise_multiplier:
            raise ValueError(
                f"count_noise = {self.clipping.count_noise:g} leaves nothing for the gradient at noise multiplier "
                f"{self.noise_multiplier:g}; set privacy.clipping.count_noise above half of it"
            )
        return self

    @classmethod
    def derive(
        cls, privacy: PrivacyConfig, *, declared_size: int, d_steps: int, rounds: int, order: float | None = None
    ) -> "SitePlan":
        """The plan of a site of this declared size; sigma is calibrated to the whole run unless the run sets it.

        Args:
            order: the RDP order of the site's ledger, where there is one already; else the best for this plan.
        """
        constants = {
            "declared_size": declared_size,
            "batch_size": privacy.batch_size,
            "d_steps": d_steps,
            "rounds": rounds,
            "eps_max": privacy.eps_max,
            "delta": privacy.delta,
            "clipping": privacy.clipping,
            "unit": privacy.unit,
            "evaluation_noise": privacy.evaluation_noise,
            "evaluation_every": privacy.evaluation_every,
            "moments": privacy.moments and privacy.moments.features,
            "moment_noise": cls._moment_noise(privacy, rounds, order),
            "update": privacy.update,
            "non_private": privacy.non_private,
        }
        # validate before calibrating: an impossible q must be named as such, not as a failed search
        draft = cls.model_validate({**constants, "clipping": EpsilonAdaptive(), "noise_multiplier": 1.0, "order": 2.0})
        if not rounds:
            only = tuple(draft.whole_run)
            order = order or best_order(only, privacy.delta)
            return cls.model_validate({**constants, "noise_multiplier": draft.moment_noise, "order": order})
        steps, *others = draft.whole_run
        sigma = privacy.noise_multiplier or max(
            LEAST_NOISE,
            calibrate(
                eps_max=privacy.eps_max, delta=privacy.delta, sample_rate=steps.sample_rate, steps=steps.count,
                others=tuple(others), order=order,
            ),
        )  # fmt: skip
        order = order or best_order((replace(steps, noise_multiplier=sigma), *others), privacy.delta)
        return cls.model_validate({**constants, "noise_multiplier": sigma, "order": order})

    @staticmethod
    def _moment_noise(privacy: PrivacyConfig, rounds: int, order: float | None) -> float | None:
        if privacy.moments is None:
            return None
        # the share is of what it would cost by itself, at the order that suits it: at the run's it may not be had
        cost, at = (privacy.moments.share * privacy.eps_max, None) if rounds else (privacy.eps_max, order)
        return max(LEAST_NOISE, calibrate(eps_max=cost, delta=privacy.delta, sample_rate=1.0, steps=1, order=at))

    @property
    def sample_rate(self) -> float:
        """Q = B / N^ of a D step; 1 where a round releases gradients of fakes, on which every record acts."""
        return self.batch_size / self.declared_size if self.update == "discriminator_update" else 1.0

    @property
    def steps_a_round(self) -> int:
        """Steps of the mechanism that a round charges: its D steps, or one release of gradients."""
        return self.d_steps if self.update == "discriminator_update" else 1

    @property
    def digest(self) -> str:
        """SHA-256 over the plan's canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def event(self) -> Event:
        """The ledger's event for one round's update."""
        return self._steps(self.steps_a_round)

    @property
    def moment_release(self) -> Event | None:
        """The ledger's event for the moment release, over all units; None where the plan has none."""
        return self._moments(1)

    @property
    def evaluation(self) -> Event | None:
        """The ledger's event for one evaluation count, over all units; None where the plan asks for none."""
        return self._counts(1)

    @property
    def whole_run(self) -> tuple[Event, ...]:
        """All that the run will charge to the site, an event a mechanism; the rounds' updates come first."""
        return self._events(self.steps_a_round * self.rounds, self.rounds // self.evaluation_every, releases=1)

    def epsilon_after(self, steps: int, evaluations: int = 0, *, releases: int = 0) -> float:
        """This run's epsilon after `steps` steps of its updates, some evaluation counts and moment releases.

        Infinite for a plan without noise.
        """
        if self.non_private:
            return math.inf
        return epsilon(self._events(steps, evaluations, releases=releases), self.order, self.delta)

    def _events(self, steps: int, evaluations: int, *, releases: int) -> tuple[Event, ...]:
        found = (
            self._steps(steps) if steps else None,
            self._counts(evaluations) if evaluations else None,
            self._moments(releases) if releases else None,
        )
        return tuple(event for event in found if event)

    def clipping_norm(self, step: int, followed: float | None = None) -> float:
        """C_t of D step `step` (0-based, counted over the run).

        Args:
            followed: what `Quantile` gave after the step before; None in the run's first. The other rules do not look.
        """
        rule = self.clipping
        if isinstance(rule, Quantile) and followed is not None:
            return min(max(followed, rule.c_min), rule.c_max)  # it may come from another plan of the run
        return rule.norm(self.epsilon_after(step) / self.eps_max)

    def sample(self, units: Units, random: KeyedGenerator) -> Indices:
        """Poisson sample: each unit drawn independently with rate q; one record's index of each unit drawn."""
        drawn = np.flatnonzero(random.bernoulli(len(units), self.sample_rate)).astype(np.int64)
        return units.records(drawn, random)

    def noised(self, total: "Tensor", clipping_norm: float, random: KeyedGenerator) -> "Tensor":
        """A sum of gradients clipped to `clipping_norm` plus its Gaussian noise, on a grid that no record acts on."""
        sigma = self.noise_multiplier
        if isinstance(self.clipping, Quantile):
            sigma = self.clipping.gradient_noise(sigma)
        return noised(total, sigma * clipping_norm, random).to(total)

    def _steps(self, count: int) -> Event:
        return Event(self.sample_rate, self.noise_multiplier, count, self.update)

    def _moments(self, count: int) -> Event | None:
        return Event(1.0, self.moment_noise, count, "moment_release") if self.moment_noise else None

    def _counts(self, count: int) -> Event | None:
        return Event(1.0, self.evaluation_noise, count, "evaluation_count") if self.evaluation_noise else None
