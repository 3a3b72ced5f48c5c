"""Clipping rules: the clipping norm C_t as a function of the share of the run's budget already spent.

A rule sees public numbers only, so the choice of C_t costs no privacy.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Norm = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Fixed(BaseModel):
    """C_t = c at every step (Abadi et al., arXiv 1607.00133, Algorithm 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rule: Literal["fixed"] = "fixed"
    c: Norm = 1.0

    def norm(self, spent_share: float) -> float:
        """The clipping norm; `spent_share` in [0, 1] is not used."""
        return self.c


class EpsilonAdaptive(BaseModel):
    """C_t = C_min + (C_max - C_min) (1 - eps_t / eps_max)^gamma: wide at first, tight as the budget is used up.

    eps_t and eps_max are this run's spend and share. The first steps of a plan spend much faster than the later ones,
    so a gamma of 1 already shrinks C_t early.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rule: Literal["epsilon_adaptive"] = "epsilon_adaptive"
    c_min: Norm = 0.5
    c_max: Norm = 1.5
    gamma: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "EpsilonAdaptive":
        if self.c_min > self.c_max:
            raise ValueError(f"c_min = {self.c_min:g} is above c_max = {self.c_max:g}; swap them")
        return self

    def norm(self, spent_share: float) -> float:
        """The clipping norm after `spent_share` = eps_t / eps_max (clamped to [0, 1]) of the run's budget."""
        left = 1 - min(max(spent_share, 0.0), 1.0)
        return float(self.c_min + (self.c_max - self.c_min) * left**self.gamma)


ClippingRule = Annotated[Fixed | EpsilonAdaptive, Field(discriminator="rule")]
