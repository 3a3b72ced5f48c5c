"""Renyi accounting of Poisson-subsampled Gaussian events: pure functions of public numbers.

An *event* is one mechanism and a count. Costs add up at each order (Mironov, arXiv 1702.07476, Proposition 1). The
tests hold the figures against Opacus and dp-accounting; neither is imported here, for what they need takes longer to
load than `fl-dpgan budget` should.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from fl_dpgan.errors import ConfigError

#: Preset orders, integers only: there the sampled Gaussian's RDP is a finite sum, on which independent accountants
#: agree; at low fractional orders dp-accounting's series ends early, so a figure could not be checked against it.
ORDERS: tuple[float, ...] = (*map(float, range(2, 64)), 80.0, 128.0, 256.0, 512.0)

#: What may leave a site, by name. Each is one function, and `count` steps of a Poisson-subsampled Gaussian.
Mechanism = Literal["discriminator_update", "evaluation_count", "moment_release", "image_gradient"]
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)

#: A step never counts for less: where its true cost is below this, rounding could make it zero or negative.
_LEAST_RDP = 1e-12
_LEAST_SIGMA = 1e-2


@dataclass(frozen=True)
class Event:
    """`count` steps of a mechanism, each a Poisson-subsampled Gaussian.

    Attributes:
        sample_rate: q in (0, 1].
        noise_multiplier: sigma in [0.01, 10^6], the noise's standard deviation in units of the sensitivity.
        count: number of steps, at least 1.
        mechanism: what is released, one of `MECHANISMS`.

    Raises:
        ConfigError: a value is out of its range.
    """

    sample_rate: float
    noise_multiplier: float
    count: int
    mechanism: str = "discriminator_update"

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ConfigError(f"mechanism {self.mechanism!r:.80} is unknown; use one of {', '.join(MECHANISMS)}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample rate q = {self.sample_rate} is outside (0, 1]; lower the batch size")
        if not _LEAST_SIGMA <= self.noise_multiplier <= 1e6:
            raise ConfigError(f"noise multiplier sigma = {self.noise_multiplier} is outside [0.01, 10^6]")
        if not 1 <= self.count <= 10**9:
            raise ConfigError(f"an event of {self.count} steps is not possible; use 1 to 10^9")


@lru_cache(maxsize=4096)
def step_rdp(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """RDP of one step at one whole order a >= 2 (Mironov, Talwar, Zhang, arXiv 1908.10530, section 3.3).

    log(sum over k of C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 sigma^2))) / (a - 1). The binomial weights add up
    to 1, so the sum is taken over what the exponentials exceed 1 by: nothing cancels, however small the cost.

    Raises:
        ConfigError: the order is not a whole number from 2 on.
    """
    if not (order >= 2 and float(order).is_integer()):
        raise ConfigError(f"order {order:g} is not a whole number from 2 on; use one of the accountant's orders")
    a, q, variance = int(order), sample_rate, noise_multiplier**2
    if q == 1:
        return max(_LEAST_RDP, a / (2 * variance))
    logs = []
    for k in range(2, a + 1):
        exponent = (k * k - k) / (2 * variance)
        beyond_one = exponent + math.log(-math.expm1(-exponent))
        logs.append(math.log(math.comb(a, k)) + (a - k) * math.log1p(-q) + k * math.log(q) + beyond_one)
    largest = max(logs)
    log_excess = largest + math.log(math.fsum(math.exp(value - largest) for value in logs))
    # log(1 + e^x), without overflow
    log_sum = log_excess + math.log1p(math.exp(-log_excess)) if log_excess > 0 else math.log1p(math.exp(log_excess))
    return max(_LEAST_RDP, log_sum / (a - 1))


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


def best_order(events: Sequence[Event], delta: float) -> float:
    """The preset order that gives the smallest epsilon for planned events."""
    return min(ORDERS, key=lambda order: epsilon(events, order, delta))


def rdp_cap(cap: float, order: float, delta: float) -> float:
    """The RDP at `order` that epsilon = `cap` stands for: the inverse of `epsilon_from_rdp`."""
    return cap - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def steps_that_fit(*, spent_rdp: float, event: Event, order: float, delta: float, cap: float) -> int:
    """How many more steps of the event's kind keep epsilon at or below `cap`.

    An RDP filter at one order (Feldman and Zrnic, arXiv 2008.11193, Theorem 4.5): valid whatever was chosen adaptively.
    """
    left = rdp_cap(cap, order, delta) - spent_rdp
    return max(0, math.floor(left / step_rdp(event.sample_rate, event.noise_multiplier, order) * (1 - 1e-12)))


@lru_cache(maxsize=256)
def calibrate(
    *,
    eps_max: float,
    delta: float,
    sample_rate: float,
    steps: int,
    others: tuple[Event, ...] = (),
    order: float | None = None,
) -> float:
    """The smallest noise multiplier (to 1e-3 of epsilon) with which `steps` steps cost at most `eps_max`.

    Bisection as in Opacus' `get_noise_multiplier`, which knows of one kind of event only.

    Args:
        others: events that the same budget also pays for.
        order: the RDP order that counts, where it is fixed already; else the best one.

    Raises:
        ConfigError: the budget is not a positive number, or no noise multiplier up to 10^6 is enough.
    """
    if not 0 < eps_max < math.inf:
        raise ConfigError(f"eps_max = {eps_max} is not a positive number; correct it")

    def cost(sigma: float) -> float:
        events = (Event(sample_rate, sigma, steps), *others)
        return epsilon(events, order or best_order(events, delta), delta)

    low, high = 0.0, 10.0
    spent = math.inf
    while spent > eps_max:
        high *= 2
        if high > 1e6:
            paid = f" beside {len(others)} other events" if others else ""
            raise ConfigError(
                f"no noise multiplier fits {steps} steps at q = {sample_rate:g}{paid} into eps_max = {eps_max:g}; "
                "take fewer steps, a smaller batch or a larger budget"
            )
        spent = cost(high)
    while eps_max - spent > 1e-3 and high > 2 * _LEAST_SIGMA:
        middle = (low + high) / 2
        at_middle = cost(middle)
        if at_middle < eps_max:
            high, spent = middle, at_middle
        else:
            low = middle
    return high
