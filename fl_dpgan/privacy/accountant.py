"""Renyi accounting of Poisson-subsampled Gaussian events, on Opacus' functions: pure functions of public numbers.

An *event* is one mechanism and a count. Costs add up at each order (Mironov, arXiv 1702.07476, Proposition 1), and the
RDP of one step is that of the sampled Gaussian mechanism (Mironov et al., arXiv 1908.10530, section 3.3).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fl_dpgan.errors import ConfigError

#: Preset orders, integers only: there the sampled Gaussian's RDP is a finite sum, on which independent accountants
#: agree; at low fractional orders dp-accounting's series ends early, so a figure could not be checked against it.
ORDERS: tuple[float, ...] = (*map(float, range(2, 64)), 80.0, 128.0, 256.0, 512.0)

#: A step never counts for less: where its true cost is below this, rounding could make it zero or negative.
_LEAST_RDP = 1e-12


@dataclass(frozen=True)
class Event:
    """`count` steps of a Poisson-subsampled Gaussian.

    Attributes:
        sample_rate: q in (0, 1].
        noise_multiplier: sigma > 0, the noise's standard deviation in units of the sensitivity.
        count: number of steps, at least 1.
    """

    sample_rate: float
    noise_multiplier: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample rate q = {self.sample_rate} is outside (0, 1]; lower the batch size")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 1e-2):
            raise ConfigError(f"noise multiplier sigma = {self.noise_multiplier} must be finite and at least 0.01")
        if not 1 <= self.count <= 10**9:
            raise ConfigError(f"an event of {self.count} steps is not possible; use 1 to 10^9")


@lru_cache(maxsize=4096)
def step_rdp(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """RDP of one step at one order."""
    from opacus.accountants.analysis.rdp import compute_rdp  # heavy, and not needed to parse a command line

    return max(_LEAST_RDP, float(compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=order)))


def total_rdp(events: Iterable[Event], order: float) -> float:
    """Sum of the events' RDP at one order."""
    return math.fsum(e.count * step_rdp(e.sample_rate, e.noise_multiplier, order) for e in events)


def epsilon_from_rdp(rdp: float, order: float, delta: float) -> float:
    """Epsilon at `delta` of a mechanism with this RDP (Canonne, Kamath, Steinke, arXiv 2004.00010, Proposition 12)."""
    if rdp == 0:
        return 0.0
    return max(0.0, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def epsilon(events: Iterable[Event], order: float, delta: float) -> float:
    """Epsilon of the events together, at one preset order and `delta`; 0 if there are none."""
    return epsilon_from_rdp(total_rdp(events, order), order, delta)


def best_order(event: Event, delta: float) -> float:
    """The preset order that gives the smallest epsilon for a planned event."""
    return min(ORDERS, key=lambda order: epsilon([event], order, delta))


def steps_that_fit(
    *, spent_rdp: float, sample_rate: float, sigma: float, order: float, delta: float, cap: float
) -> int:
    """How many further steps keep epsilon at or below `cap` (an RDP filter: Feldman and Zrnic, arXiv 2008.11193)."""
    cap_rdp = cap - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)
    return max(0, math.floor((cap_rdp - spent_rdp) / step_rdp(sample_rate, sigma, order) * (1 - 1e-12)))


@lru_cache(maxsize=256)
def calibrate(*, eps_max: float, delta: float, sample_rate: float, steps: int) -> float:
    """The smallest noise multiplier (to 1e-3 of epsilon) with which `steps` steps cost at most `eps_max`.

    Raises:
        ConfigError: no noise multiplier up to 10^6 is enough.
    """
    from opacus.accountants.utils import get_noise_multiplier

    try:
        return float(
            get_noise_multiplier(
                target_epsilon=eps_max,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=1e-3,
                alphas=list(ORDERS),
            )
        )
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"no noise multiplier fits {steps} steps at q = {sample_rate:g} into eps_max = {eps_max:g}; "
            "take fewer steps, a smaller batch or a larger budget"
        ) from error
