"""Clipping rules: the clipping norm C_t, and the factor that brings a sample's gradient to a norm of at most C_t.

C_t depends on public numbers alone, or, in `Quantile`, on a noised count that the event pays for.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor

# the lower bound keeps clipped gradients and noise far from single precision's subnormals, where rounding voids both
Norm = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


class _Clip(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def factors(self, norms: "Tensor", c: float) -> "Tensor":
        """min(1, c / norm) for norms (n,) >= 0: longer gradients are cut to c, shorter ones stay as they are."""
        return c / norms.clamp(min=c)


class Fixed(_Clip):
    """C_t = c at every step (Abadi et al., arXiv 1607.00133, Algorithm 1)."""

    rule: Literal["fixed"] = "fixed"
    c: Norm = 1.0

    @property
    def largest(self) -> float:
        """The largest C_t that the rule can give."""
        return self.c

    def norm(self, spent_share: float) -> float:
        """The clipping norm; `spent_share` in [0, 1] is not used."""
        return self.c


class Automatic(Fixed):
    """AUTO-S: every gradient g becomes c g / (|g| + 0.01), so its norm is below c (Bu et al., arXiv 2206.07136, eq. 5).

    c scales the whole update; under Adam it makes no difference.
    """

    rule: Literal["automatic"] = "automatic"  # type: ignore[assignment]

    def factors(self, norms: "Tensor", c: float) -> "Tensor":
        """C / (norm + 0.01) for norms (n,) >= 0."""
        return c / (norms + 0.01)


class EpsilonAdaptive(_Clip):
    """C_t = C_min + (C_max - C_min) (1 - eps_t / eps_max)^gamma: wide at first, tight as the budget is used up.

    eps_t is what this run's D steps have spent, eps_max the run's share. The first steps of a plan spend much faster
    than the later ones, so a gamma of 1 already shrinks C_t early.
    """

    rule: Literal["epsilon_adaptive"] = "epsilon_adaptive"
    c_min: Norm = 0.5
    c_max: Norm = 1.5
    gamma: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "EpsilonAdaptive":
        if self.c_min > self.c_max:
            raise ValueError(f"c_min = {self.c_min:g} is above c_max = {self.c_max:g}; swap them")
        return self

    @property
    def largest(self) -> float:
        """The largest C_t that the rule can give."""
        return self.c_max

    def norm(self, spent_share: float) -> float:
        """The clipping norm after `spent_share` = eps_t / eps_max (clamped to [0, 1]) of the run's budget."""
        left = 1 - min(max(spent_share, 0.0), 1.0)
        return float(self.c_min + (self.c_max - self.c_min) * left**self.gamma)


class Quantile(_Clip):
    """C follows a quantile of the real gradients' norms (Andrew et al., arXiv 1905.03871, Algorithm 1).

    Each step also counts the sampled reals whose norm is at most C. Every summand is shifted by 1/2, so that one record
    moves the sum by 1/2, and the sum gets noise of standard deviation `count_noise`. Gradient and count are one
    Gaussian of noise multiplier z, which is what is charged: z^-2 = z_gradient^-2 + (2 count_noise)^-2 (Theorem 1).

    Attributes:
        c_first: C of the run's first step. c_min, c_max: bounds of C.
        quantile: the share of norms that should be at most C. rate: eta in C <- C exp(-eta (b - quantile)).
        count_noise: sigma_b, in records; more than half the plan's noise multiplier.
    """

    rule: Literal["quantile"] = "quantile"
    c_first: Norm = 1.0
    c_min: Norm = 1e-3
    c_max: Norm = 100.0
    quantile: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 0.2
    count_noise: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> "Quantile":
        if not self.c_min <= self.c_first <= self.c_max:
            raise ValueError(f"c_first = {self.c_first:g} is outside [{self.c_min:g}, {self.c_max:g}], c_min to c_max")
        return self

    @property
    def largest(self) -> float:
        """The largest C_t that the rule can give."""
        return self.c_max

    def norm(self, spent_share: float) -> float:
        """C of the run's first step; the later ones come from `following`."""
        return self.c_first

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The gradient's own noise multiplier, with which gradient and count together have `noise_multiplier`."""
        return float((noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    def following(self, c: float, noised_count: float, batch_size: int) -> float:
        """C of the next step, from the shifted and noised count over a batch of expected size B."""
        fraction = noised_count / batch_size + 0.5
        # a far-out draw of the noise must not overflow the exponential; the bounds of C would cut it anyway
        step = min(max(-self.rate * (fraction - self.quantile), -50.0), 50.0)
        return min(max(c * math.exp(step), self.c_min), self.c_max)


ClippingRule = Annotated[Fixed | Automatic | EpsilonAdaptive | Quantile, Field(discriminator="rule")]
