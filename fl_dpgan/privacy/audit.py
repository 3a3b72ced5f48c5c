"""Lower bounds on epsilon from how often an adversary was right: pure functions of counts."""

import math

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

#: No bound is looked for beyond this.
_LARGEST = 64.0


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The chance of so many right guesses about one run of an (epsilon, delta)-private mechanism, from above.

    Steinke, Nasr and Jagielski, arXiv 2305.08846, Theorem 5.2: a right guess is at most as likely as under randomised
    response, which is right with probability 1 / (1 + e^-epsilon); delta adds 2 m delta alpha.

    Args:
        canaries: m, each in the data with probability 1/2, independently. guesses: r <= m, on which ones the adversary
            committed itself. right: v <= r.

    Raises:
        ValueError: not 0 <= right <= guesses <= canaries, or epsilon or delta is negative.
    """
    if not 0 <= right <= guesses <= canaries or epsilon < 0 or delta < 0:
        raise ValueError(f"{right} of {guesses} guesses about {canaries} canaries at ({epsilon:g}, {delta:g})")
    by_chance = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    beta = float(by_chance.sf(right - 1))
    fewer = np.arange(1, right + 1)  # alpha = max over i of P[v - i <= Bin < v] / i
    between = by_chance.sf(right - fewer - 1) - by_chance.sf(right - 1)
    alpha = float((between / fewer).max()) if right else 0.0
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_bound(canaries: int, guesses: int, right: int, *, delta: float, confidence: float) -> float:
    """The largest epsilon that so many right guesses rule out at this confidence; 0 where they rule out none.

    The p-value rises with epsilon, so the bound is found by bisection, to 1e-6 from below.
    """
    low, high = 0.0, _LARGEST
    while high - low > 1e-6:
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, right, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def rates_bound(found: int, members: int, alarms: int, others: int, *, confidence: float) -> tuple[float, float]:
    """A lower bound of the true positive rate and an upper bound of the false positive rate, which hold together.

    One-sided intervals of Clopper and Pearson (Biometrika 26, 1934), each at half of the error.

    Args:
        found: of `members` runs with the canary, those in which it was said to be there. alarms: the same of `others`,
            the runs without it.
    """
    error = (1 - confidence) / 2
    tpr = float(stats.beta.ppf(error, found, members - found + 1)) if found else 0.0
    fpr = float(stats.beta.ppf(1 - error, alarms + 1, others - alarms)) if alarms < others else 1.0
    return tpr, fpr


def many_runs_bound(tpr: float, fpr: float, delta: float) -> float:
    """The smallest epsilon >= 0 with which a private mechanism allows these rates at this delta.

    Kairouz, Oh and Viswanath, arXiv 1311.0776, Theorem 2.1: TPR <= e^epsilon FPR + delta, and the same of the two
    rates' complements.
    """
    pairs = ((tpr - delta, fpr), (1 - fpr - delta, 1 - tpr))
    found = (math.log(above / below) if below > 0 else _LARGEST for above, below in pairs if above > 0)
    return max([0.0, *found])
