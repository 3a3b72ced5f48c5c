"""The one object from which a site's sampler, noise, clipping and event come, so that they cannot drift apart."""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fl_dpgan.privacy.accountant import Event, best_order, calibrate, epsilon_from_rdp, step_rdp
from fl_dpgan.privacy.clipping import ClippingRule, EpsilonAdaptive
from fl_dpgan.privacy.noise import KeyedGenerator

#: The smallest sigma that a plan may have; a budget that would allow less is simply not used up.
LEAST_NOISE = 0.1


class PrivacyConfig(BaseModel):
    """What a federation proposes, the same for every site.

    Attributes:
        eps_max, delta: the run's share of each site's budget.
        batch_size: B, the expected number of real records in a D step, and the exact number of fakes.
        noise_multiplier: sigma; left out, the smallest one with which the whole run fits eps_max.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    eps_max: float = Field(10.0, gt=0, le=1000, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, lt=0.5, allow_inf_nan=False)
    batch_size: int = Field(64, ge=1, le=100_000)
    noise_multiplier: float | None = Field(None, ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    clipping: ClippingRule = EpsilonAdaptive()


class SitePlan(BaseModel):
    """The constants of one site's part in a run. They derive from its declared size; nothing here has seen a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    declared_size: int = Field(ge=1, le=10**10)
    batch_size: int = Field(ge=1, le=100_000)
    d_steps: int = Field(ge=1, le=100_000)
    rounds: int = Field(ge=1, le=10**7)
    noise_multiplier: float = Field(ge=LEAST_NOISE, le=1e6, allow_inf_nan=False)
    eps_max: float = Field(gt=0, le=1000, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=0.5, allow_inf_nan=False)
    order: float = Field(gt=1, le=1024, allow_inf_nan=False)
    clipping: ClippingRule

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
        return self

    @classmethod
    def derive(cls, privacy: PrivacyConfig, *, declared_size: int, d_steps: int, rounds: int) -> "SitePlan":
        """The plan of a site of this declared size; sigma is calibrated to the whole run unless the run sets it."""
        constants = {
            "declared_size": declared_size,
            "batch_size": privacy.batch_size,
            "d_steps": d_steps,
            "rounds": rounds,
            "eps_max": privacy.eps_max,
            "delta": privacy.delta,
            "clipping": privacy.clipping,
        }
        # validate before calibrating: an impossible q must be named as such, not as a failed search
        draft = cls.model_validate({**constants, "noise_multiplier": 1.0, "order": 2.0})
        sigma = privacy.noise_multiplier or max(
            LEAST_NOISE,
            calibrate(
                eps_max=privacy.eps_max, delta=privacy.delta, sample_rate=draft.sample_rate, steps=d_steps * rounds
            ),
        )
        planned = Event(draft.sample_rate, sigma, d_steps * rounds)
        order = best_order(planned, privacy.delta)
        return cls.model_validate({**constants, "noise_multiplier": sigma, "order": order})

    @property
    def sample_rate(self) -> float:
        """Q = B / N^."""
        return self.batch_size / self.declared_size

    @property
    def digest(self) -> str:
        """SHA-256 over the plan's canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def event(self, steps: int) -> Event:
        """The ledger's row for `steps` D steps."""
        return Event(self.sample_rate, self.noise_multiplier, steps)

    def epsilon_after(self, steps: int) -> float:
        """This run's epsilon after `steps` D steps, at the plan's order; 0 before the first."""
        rdp = steps * step_rdp(self.sample_rate, self.noise_multiplier, self.order)
        return epsilon_from_rdp(rdp, self.order, self.delta)

    def clipping_norm(self, step: int) -> float:
        """C_t of D step `step` (0-based, counted over the run)."""
        return self.clipping.norm(self.epsilon_after(step) / self.eps_max)

    def sample(self, records: int, random: KeyedGenerator) -> NDArray[np.int64]:
        """Poisson sample: the indices of the records drawn, each independently with rate q."""
        return np.flatnonzero(random.bernoulli(records, self.sample_rate)).astype(np.int64)

    def noise(self, template: Tensor, step: int, random: KeyedGenerator) -> Tensor:
        """Gaussian noise of standard deviation sigma C_t in the shape of `template`."""
        draw = random.normal(template.numel()) * (self.noise_multiplier * self.clipping_norm(step))
        return torch.from_numpy(draw).to(template).view_as(template)
