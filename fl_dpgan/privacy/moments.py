"""What a moment release measures: a public description of features of one image, all numbers plan constants.

A site answers with noised sums of the features over its units, class by class (`fl_dpgan.moments`). Every unit's vector
has a norm of at most 1 by construction, so the noise multiplier of the event is the noise's standard deviation.
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Features(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    weight: float = Field(1.0, ge=1e-3, le=1e3)


class _RandomFourier(_Features):
    """Random Fourier features cos(Wv), sin(Wv) of a vector v, divided by sqrt(count / 2): norm 1.

    Rows of W are N(0, I / s) (DP-MERF: Harder, Adamczewski, Park, arXiv 2002.11603, section 3), in equal numbers for
    each length scale s in `scales`; W follows from `seed`, which all parties share.
    """

    count: int = Field(2000, ge=2, le=100_000, multiple_of=2)
    scales: tuple[Annotated[float, Field(gt=0, le=1e9)], ...] = Field((60.0,), min_length=1, max_length=16)
    seed: int = Field(0, ge=0, lt=2**31)


class Fourier(_RandomFourier):
    """Random Fourier features of the pixels in [0, 1]."""

    kind: Literal["fourier"] = "fourier"


class Wavelets(_RandomFourier):
    """Random Fourier features of an image's first-order scattering coefficients, brought to norm 1.

    These say how strong edges of a direction and a width are, in each of `side` x `side` fields
    (`fl_dpgan.scattering.FirstOrder`). So images are alike whose edges lie alike, which pixels do not tell.
    """

    kind: Literal["wavelets"] = "wavelets"
    side: int = Field(7, ge=1, le=14)
    scales: tuple[Annotated[float, Field(gt=0, le=1e9)], ...] = Field((0.16,), min_length=1, max_length=16)


Feature = Annotated[Fourier | Wavelets, Field(discriminator="kind")]


class Features(BaseModel):
    """Several kinds of features side by side, each times its weight; the whole is divided by the weights' norm.

    Attributes:
        parts: the kinds.
        count_share: a unit's squared norm goes to the features and, in this share, to the count of its class, which the
            server divides by.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    parts: tuple[Feature, ...] = Field((Fourier(), Wavelets()), min_length=1, max_length=4)
    count_share: float = Field(0.1, gt=0, lt=1)

    @property
    def numbers(self) -> int:
        """How many numbers of features a class's sum has."""
        return sum(part.count for part in self.parts)

    @property
    def weights(self) -> list[float]:
        """Each part's weight in a vector of norm at most 1, the count's share taken off."""
        whole = math.sqrt(sum(part.weight**2 for part in self.parts) / (1 - self.count_share))
        return [part.weight / whole for part in self.parts]
