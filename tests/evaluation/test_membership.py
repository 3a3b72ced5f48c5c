"""Each figure against an independent computation, and its interval against the truth it should hold."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fl_dpgan.evaluation import membership
from fl_dpgan.evaluation.membership import auc, balanced_accuracy, coin_resistance, resistance, statistics, tpr_at_fpr

FIGURES = ("auc", "balanced_accuracy", "tpr_at_fpr_0.001", "tpr_at_fpr_0.01", "resistance")
SEEDS = 300
#: Fewer intervals than this hold the truth with probability 1e-6 only, if each holds it with probability 0.95.
FEWEST = int(stats.binom.ppf(1e-6, SEEDS, 0.95))

# whole numbers, so that there are ties
scores = st.integers(1, 40).flatmap(lambda n: st.tuples(*[st.lists(st.integers(-5, 5), min_size=n, max_size=n)] * 2))


def arrays(pair):
    return [np.array(side, np.float64) for side in pair]


def drawn(seed, n=300, shift=0.0):
    random = np.random.default_rng(seed)
    return random.normal(shift, 1, n), random.normal(0, 1, n)


def holds(interval, truth):
    return interval[0] <= truth <= interval[1]


def test_a_perfect_attacker():
    found = statistics(np.linspace(1, 2, 500), np.linspace(-1, 0, 500))
    for name, perfect in zip(FIGURES, (1, 1, 1, 1, 0), strict=True):
        assert found[name]["value"] == perfect
        assert holds(found[name]["interval"], perfect)
        assert found[name]["interval"][0] < found[name]["interval"][1]  # 500 records do not prove perfection
        assert not holds(found[name]["coin"]["range"], perfect)


def test_an_attacker_who_has_it_the_wrong_way_round():
    found = statistics(np.linspace(-1, 0, 500), np.linspace(1, 2, 500))
    assert [found[name]["value"] for name in FIGURES] == [0, 0.5, 0, 0, 1]  # no threshold helps: nobody is accused


def test_scores_that_are_all_the_same_tell_nothing():
    found = statistics(np.zeros(500), np.zeros(500))
    assert [found[name]["value"] for name in FIGURES] == [0.5, 0.5, 0, 0, 1]
    assert found["auc"]["interval"][0] < 0.5 < found["auc"]["interval"][1]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_sets_give_every_figure_a_wide_interval(n):
    found = statistics(np.arange(n) + 0.5, np.arange(n) * 1.0)
    json.dumps(found, allow_nan=False)
    for name in FIGURES:
        low, high = found[name]["interval"]
        assert 0 <= low <= found[name]["value"] <= high <= 1
        assert high - low > 0.5


@pytest.mark.parametrize("bad", [([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([math.inf], [1.0])])
def test_what_has_no_figures_is_refused(bad):
    with pytest.raises(ValueError, match=r"members|finite"):
        statistics(*arrays(bad))


@given(scores)
def test_auc_is_the_hand_counted_mann_whitney_statistic(pair):
    members, non_members = arrays(pair)
    counted = sum((m > n) + (m == n) / 2 for m in members for n in non_members) / len(members) ** 2
    assert auc(members, non_members)["value"] == pytest.approx(counted)
    truth = np.repeat([1, 0], len(members))
    assert roc_auc_score(truth, np.concatenate([members, non_members])) == pytest.approx(counted)


def test_the_interval_of_auc_is_delongs_by_its_definition():
    members, non_members = (np.round(s, 1) for s in drawn(1, n=40, shift=0.7))  # rounded, so that there are ties
    wins = (members[:, None] > non_members) + (members[:, None] == non_members) / 2
    error = math.sqrt(wins.mean(1).var(ddof=1) / 40 + wins.mean(0).var(ddof=1) / 40)
    low, high = auc(members, non_members)["interval"]
    assert (high - low) / 2 == pytest.approx(1.959964 * error, rel=1e-6)
    assert (high + low) / 2 == pytest.approx(wins.mean())


@given(scores)
def test_resistance_is_one_minus_the_greatest_gap_of_the_roc_curve(pair):
    members, non_members = arrays(pair)
    fpr, tpr, _ = roc_curve(np.repeat([1, 0], len(members)), np.concatenate([members, non_members]))
    assert resistance(members, non_members)["value"] == pytest.approx(1 - (tpr - fpr).max())


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_a_coins_resistance_follows_the_exact_kolmogorov_smirnov_law(n):
    base = np.arange(n, dtype=float)
    above = []  # P(D+ >= k / n), by scipy, from samples whose D+ is k / n
    for k in range(1, n + 1):
        shifted = base + k - 0.5
        found = stats.ks_2samp(shifted, base, alternative="less", method="exact")
        assert found.statistic == pytest.approx(k / n)
        above.append(found.pvalue)
    mean, (low, high) = coin_resistance(n)
    assert mean == pytest.approx(1 - sum(above) / n)
    assert round((1 - low) * n) == sum(p > 0.025 for p in above)
    assert round((1 - high) * n) == sum(p > 0.975 for p in above)


def test_a_coin_does_not_reach_a_resistance_of_one():
    mean, (low, high) = coin_resistance(5000)
    assert low < mean < high < 1
    assert mean == pytest.approx(1 - math.sqrt(math.pi / 5000) / 2, abs=2e-4)  # P(D+ > d) is about exp(-n d^2)


@pytest.mark.parametrize(("one_in", "found"), [(100, 17), (1000, 3)])
def test_tpr_at_fpr_by_hand_and_its_interval_by_scipy(one_in, found):
    n = 1000
    non_members = np.arange(n, dtype=float)
    members = np.full(n, -1.0)
    members[:found] = n - 1 - n // one_in + 0.5  # above just n // one_in non-members
    figure = tpr_at_fpr(members, non_members, one_in)
    assert (figure["value"], figure["fpr"]) == (found / n, 1 / one_in)
    low, high = figure["interval"]
    assert low == pytest.approx(stats.beta.ppf(0.025, found, n - found + 1))
    assert high == pytest.approx(stats.beta.ppf(0.975, found + 1, n - found))


def test_too_few_non_members_for_a_rate_allow_no_false_alarm():
    figure = tpr_at_fpr(np.array([1.0, 3.0, 5.0, 7.0]), np.array([0.0, 2.0, 4.0, 4.0]), 100)
    assert (figure["value"], figure["fpr"]) == (0.5, 0.0)
    assert figure["coin"]["value"] == pytest.approx(1 / 5)  # any of the five gaps is as likely


def test_balanced_accuracy_uses_the_threshold_of_the_other_half():
    # the first half is best cut at 5; in the second, one of two members and one of two non-members are then right
    members, non_members = np.array([5.0, 9.0, 6.0, 1.0]), np.array([0.0, 7.0, 1.0, 2.0])
    figure = balanced_accuracy(members, non_members)
    assert figure["value"] == 0.5
    wilson = stats.binomtest(1, 2).proportion_ci(method="wilson")  # of either share, 1 of 2
    assert figure["interval"][0] == pytest.approx(0.5 - math.sqrt(2) * (0.5 - wilson.low) / 2)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_intervals_hold_the_truth_as_often_as_they_say(shift):
    normal = stats.norm
    truth = {"auc": normal.cdf(shift / math.sqrt(2)), "resistance": 2 - 2 * normal.cdf(shift / 2)}
    held = dict.fromkeys(("auc", "resistance", "tpr", "balanced_accuracy"), 0)
    for seed in range(SEEDS):
        members, non_members = drawn(seed, shift=shift)
        for name in truth:
            held[name] += holds(getattr(membership, name)(members, non_members)["interval"], truth[name])
        at = np.sort(non_members)[-4]  # one in 100 of 300: three are above
        held["tpr"] += holds(tpr_at_fpr(members, non_members, 100)["interval"], normal.sf(at, shift))
        thresholds, tpr, fpr = membership.rates(members[::2], non_members[::2])
        cut = thresholds[np.argmax(tpr - fpr)]
        right = (normal.sf(cut, shift) + normal.cdf(cut)) / 2
        held["balanced_accuracy"] += holds(balanced_accuracy(members, non_members)["interval"], right)
    assert min(held.values()) >= FEWEST, held
    assert held["auc"] <= stats.binom.ppf(1 - 1e-6, SEEDS, 0.95)  # nor is it wider than it need be


def test_a_coin_lies_in_its_range_and_averages_its_value():
    values = {name: [] for name in FIGURES}
    for seed in range(SEEDS):
        found = statistics(*drawn(seed))
        for name in FIGURES:
            values[name].append(found[name]["value"])
    for name, several in values.items():
        coin = found[name]["coin"]
        inside = sum(holds((coin["range"][0] - 1e-12, coin["range"][1] + 1e-12), value) for value in several)
        assert inside >= FEWEST, name
        error = np.std(several) / math.sqrt(SEEDS)
        assert abs(np.mean(several) - coin["value"]) < 5 * error, name  # 6e-7
