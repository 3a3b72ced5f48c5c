"""How well an attack's scores tell members from non-members: each figure with its interval, and what a coin would get.

Every figure is a dictionary: `value`; `interval`, the 95 % confidence interval; and `coin`, the `value` that scores
without any information get on average at these sample sizes, with the `range` that holds 95 % of their values.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

Scores = NDArray[np.float64]
Interval = tuple[float, float]

_TAIL = 0.025  # on either side of a 95 % interval
_Z = float(stats.norm.ppf(1 - _TAIL))
#: One false alarm in so many non-members: 0.1 % and 1 %.
_ONE_IN = (1000, 100)


def statistics(members: Scores, non_members: Scores) -> dict[str, Any]:
    """All figures for one attack, by name.

    Args:
        members, non_members: scores (n,) each, in random order; high says "member".

    Raises:
        ValueError: the two are not of the same length, or empty, or not finite.
    """
    if not 0 < len(members) == len(non_members):
        raise ValueError(f"{len(members)} members and {len(non_members)} non-members; give as many of each, not none")
    if not (np.isfinite(members).all() and np.isfinite(non_members).all()):
        raise ValueError("scores that are not finite; mend the attack")
    return {
        "auc": auc(members, non_members),
        "balanced_accuracy": balanced_accuracy(members, non_members),
        **{f"tpr_at_fpr_{1 / one_in:g}": tpr_at_fpr(members, non_members, one_in) for one_in in _ONE_IN},
        "resistance": resistance(members, non_members),
    }


def auc(members: Scores, non_members: Scores) -> dict[str, Any]:
    """The chance that a member scores above a non-member, ties counting one half (Mann and Whitney, 1947).

    The interval is DeLong's (DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988), with the mid-ranks of Sun and Xu
    (IEEE Signal Processing Letters 21, 2014). Where its variance vanishes (perfect separation, nothing but ties, or one
    record), it is Hoeffding's bound for U-statistics (JASA 58, 1963, section 5b) instead.
    """
    m, n = len(members), len(non_members)
    ranks = stats.rankdata(np.concatenate([members, non_members]))
    beaten = (ranks[:m] - stats.rankdata(members)) / n  # the share of non-members below each member
    beating = 1 - (ranks[m:] - stats.rankdata(non_members)) / m  # the share of members above each non-member
    value = float(beaten.mean())
    variance = beaten.var(ddof=1) / m + beating.var(ddof=1) / n if min(m, n) > 1 else 0.0
    margin = _Z * math.sqrt(variance) if variance > 0 else math.sqrt(math.log(2 / (2 * _TAIL)) / (2 * min(m, n)))
    return _figure(value, _within(value, margin), 0.5, _within(0.5, _Z * math.sqrt((m + n + 1) / (12 * m * n))))


def balanced_accuracy(members: Scores, non_members: Scores) -> dict[str, Any]:
    """The mean of the shares of members and of non-members told right, at the threshold best on the other half.

    On the records that chose the threshold a coin would pass 0.5; so every second record chooses, and the rest is
    counted. The interval joins Wilson's for the two shares (Newcombe, Statistics in Medicine 17, 1998, method 10); the
    coin tosses for every record. A single record of each kind must do for both.
    """
    thresholds, tpr, fpr = rates(members[::2], non_members[::2])
    threshold = thresholds[np.argmax(tpr - fpr)]
    rest = (members[1::2], non_members[1::2]) if len(members) > 1 else (members, non_members)
    right = (int((rest[0] >= threshold).sum()), int((rest[1] < threshold).sum()))
    n = len(rest[0])
    shares = [count / n for count in right]
    ends = [stats.binomtest(count, n).proportion_ci(method="wilson") for count in right]
    value = sum(shares) / 2
    below, above = (
        math.hypot(*(share - end[side] for share, end in zip(shares, ends, strict=True))) / 2 for side in (0, 1)
    )
    tossed = stats.binom.ppf([_TAIL, 1 - _TAIL], 2 * n, 0.5) / (2 * n)
    return _figure(value, (max(0.0, value - below), min(1.0, value + above)), 0.5, (tossed[0], tossed[1]))


def tpr_at_fpr(members: Scores, non_members: Scores, one_in: int) -> dict[str, Any]:
    """The share of members found where at most one non-member in `one_in` raises a false alarm.

    Carlini et al., arXiv 2112.03570, section III. A record is called a member if it scores above the (k + 1)-th
    highest non-member, k = floor(n / one_in). The interval is Clopper and Pearson's for that threshold. The coin's
    figures take in that the threshold is drawn too: the number of members above that non-member is beta-binomial,
    and its mean a little above k.

    Returns:
        Beside the usual keys `fpr`, the share of these non-members above the threshold; ties may bring it below k / n.
    """
    m, n = len(members), len(non_members)
    allowed = n // one_in
    threshold = np.sort(non_members)[n - 1 - allowed]
    found = int((members > threshold).sum())
    ends = stats.binomtest(found, m).proportion_ci(method="exact")
    coin = stats.betabinom(m, allowed + 1, n - allowed)
    drawn = (coin.ppf(_TAIL) / m, coin.ppf(1 - _TAIL) / m)
    figure = _figure(found / m, (ends.low, ends.high), coin.mean() / m, drawn)
    return {**figure, "fpr": float((non_members > threshold).mean())}


def resistance(members: Scores, non_members: Scores) -> dict[str, Any]:
    """1 - max(TPR - FPR) over all thresholds: 1 where no threshold helps the attacker, 0 where one tells all apart.

    The maximum is chosen on the records it is measured on, so it is one-sided Kolmogorov-Smirnov's D+, which is above 0
    for a coin too: compare with `coin`, not with 1. The interval adds the margins of the two distributions (Massart's
    constant in Dvoretzky, Kiefer and Wolfowitz's inequality, Annals of Probability 18, 1990): never too narrow.
    """
    n = len(members)
    _, tpr, fpr = rates(members, non_members)
    value = 1 - float((tpr - fpr).max())
    margin = 2 * math.sqrt(math.log(2 / _TAIL) / (2 * n))
    return _figure(value, _within(value, margin), *coin_resistance(n))


def coin_resistance(n: int) -> tuple[float, Interval]:
    """The resistance of scores without information, n members and n non-members: its mean, and 95 % of its values.

    Without ties P(n D+ >= k) = C(2n, n + k) / C(2n, n) (Gnedenko and Korolyuk, 1951).
    """
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, 2 * n + 1)))])
    k = np.arange(n + 1)
    reached = np.exp(2 * log_factorials[n] - log_factorials[n + k] - log_factorials[n - k])  # P(n D+ >= k)
    at_most = 1 - np.append(reached[1:], 0.0)
    low, high = (int(np.argmax(at_most >= share)) for share in (_TAIL, 1 - _TAIL))
    return 1 - float(reached[1:].sum()) / n, (1 - high / n, 1 - low / n)


def rates(members: Scores, non_members: Scores) -> tuple[Scores, Scores, Scores]:
    """Each threshold that makes a difference, from the highest on, with TPR and FPR of `score >= threshold`."""
    thresholds = np.append(np.inf, np.unique(np.concatenate([members, non_members]))[::-1])
    tpr, fpr = (1 - np.searchsorted(np.sort(s), thresholds) / len(s) for s in (members, non_members))
    return thresholds, tpr, fpr


def _within(value: float, margin: float) -> Interval:
    """value ± margin, as far as it lies in [0, 1]."""
    return max(0.0, value - margin), min(1.0, value + margin)


def _figure(value: float, interval: Interval, coin: float, drawn: Interval) -> dict[str, Any]:
    as_floats = [[float(end) for end in ends] for ends in (interval, drawn)]
    return {
        "value": float(value),
        "interval": as_floats[0],
        "coin": {"value": float(coin), "range": as_floats[1]},
    }
