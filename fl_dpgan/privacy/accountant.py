"""Renyi accounting of Poisson-subsampled Gaussian events, on Opacus' functions: pure functions of public numbers.

An *event* is one mechanism and a count. Costs add up at each order (Mironov, arXiv 1702.07476, Proposition 1), and the
RDP of one step is that of the sampled Gaussian mechanism (Mironov et al., arXiv 1908.10530, section 3.3).
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fl_dpgan.errors import ConfigError

#: Preset orders, integers only: there the sampled Gaussian's RDP is a finite sum, on which independent accountants
#: agree; at low fractional orders dp-accounting's series ends early, so a figure could not be checked against it.
ORDERS: tuple[float, ...] = (*map(float, range(2, 64)), 80.0, 128.0, 256.0, 512.0)

#: What may leave a site, by name. Each is one function, and `count` steps of a Poisson-subsampled Gaussian.
MECHANISMS = ("discriminator_update", "evaluation_count")

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
            raise ConfigError(f"mechanism {self.mechanism!r} is unknown; use one of {', '.join(MECHANISMS)}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample rate q = {self.sample_rate} is outside (0, 1]; lower the batch size")
        if not _LEAST_SIGMA <= self.noise_multiplier <= 1e6:
            raise ConfigError(f"noise multiplier sigma = {self.noise_multiplier} is outside [0.01, 10^6]")
        if not 1 <= self.count <= 10**9:
            raise ConfigError(f"an event of {self.count} steps is not possible; use 1 to 10^9")


@cache
def _opacus_rdp() -> Callable[..., Any]:
    """Opacus' `compute_rdp`, its module loaded by itself: the package imports torch, for which `budget` would wait."""
    package = importlib.util.find_spec("opacus")
    if package is None or package.origin is None:
        raise ConfigError("opacus is not installed; install fl-dpgan with its dependencies")
    path = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py"
    spec = importlib.util.spec_from_file_location("_fl_dpgan_opacus_rdp", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded; reinstall opacus")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.compute_rdp  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def step_rdp(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """RDP of one step at one order."""
    one = _opacus_rdp()(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=order)
    return max(_LEAST_RDP, float(one))


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
