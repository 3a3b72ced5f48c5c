"""Bounds of audits, against definitions spelt out with other functions, and against mechanisms that are known."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fl_dpgan.privacy.audit import many_runs_bound, one_run_bound, one_run_p_value, rates_bound


def by_definition(m, r, v, epsilon, delta):
    """Theorem 5.2's p-value from the binomial's single probabilities, in plain sums."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    beta = math.fsum(mass[v:])
    alpha = max((math.fsum(mass[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, beta + 2 * m * delta * alpha)


@given(st.integers(1, 60), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_p_value_of_one_run_is_that_of_its_definition(guesses, data):
    right = data.draw(st.integers(0, guesses))
    canaries = data.draw(st.integers(guesses, 200))
    epsilon, delta = data.draw(st.floats(0, 5)), data.draw(st.sampled_from([0.0, 1e-5, 1e-2]))
    found = one_run_p_value(canaries, guesses, right, epsilon, delta)
    assert found == pytest.approx(by_definition(canaries, guesses, right, epsilon, delta), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("right", "bound"), [(600, 0.30), (750, 0.98), (900, 2.02), (1000, 5.78)])
def test_bounds_of_a_thousand_canaries_are_those_worked_out_beforehand(right, bound):
    assert one_run_bound(1000, 1000, right, delta=1e-5, confidence=0.95) == pytest.approx(bound, abs=0.03)


@pytest.mark.parametrize("right", [0, 250, 500])
def test_a_coin_shows_nothing(right):
    assert one_run_bound(1000, 1000, right, delta=1e-5, confidence=0.95) == 0


@pytest.mark.parametrize("right", [640, 990])
def test_the_bound_is_where_the_p_value_passes_the_error(right):
    bound = one_run_bound(1000, 1000, right, delta=1e-5, confidence=0.95)
    assert one_run_p_value(1000, 1000, right, bound, 1e-5) < 0.05
    assert one_run_p_value(1000, 1000, right, bound + 1e-4, 1e-5) >= 0.05


@pytest.mark.parametrize("case", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_impossible_counts_are_refused(case):
    with pytest.raises(ValueError, match="guesses"):
        one_run_p_value(*case, 1.0, 0.0)


@pytest.mark.parametrize("counts", [(0, 50, 50, 50), (50, 50, 0, 50), (13, 40, 2, 60)])
def test_rates_are_bounded_by_one_sided_exact_intervals_at_half_the_error_each(counts):
    found, members, alarms, others = counts
    tpr, fpr = rates_bound(*counts, confidence=0.9)
    greater = stats.binomtest(found, members, alternative="greater").proportion_ci(0.95, "exact")
    less = stats.binomtest(alarms, others, alternative="less").proportion_ci(0.95, "exact")
    assert (tpr, fpr) == pytest.approx((greater.low, less.high), abs=1e-9)


def test_true_rates_of_randomised_response_give_its_epsilon_and_a_larger_delta_less():
    epsilon = 1.3
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert many_runs_bound(right, 1 - right, 0.0) == pytest.approx(epsilon)
    assert many_runs_bound(right, 1 - right, 0.1) < epsilon
    assert many_runs_bound(1 - right, right, 0.0) == 0  # worse than a coin: it would have to guess the other way round


def test_the_complements_of_the_rates_count_too():
    # a record that is there is never missed: few say "not there" falsely, and that alone betrays
    assert many_runs_bound(0.999, 0.5, 0.0) == pytest.approx(math.log(0.5 / 0.001))


@given(st.floats(0.3, 3.0), st.floats(-3.0, 3.0))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_rates_of_a_gaussian_mechanism_pass_its_epsilon(sigma, threshold):
    """Balle and Wang, arXiv 1805.06530, Theorem 8: the epsilon at each delta of a Gaussian of sensitivity 1."""
    tpr, fpr = stats.norm.sf(threshold, 1 / sigma), stats.norm.sf(threshold)
    for epsilon in (0.1, 1.0, 2.0):
        delta = stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )
        assert many_runs_bound(tpr, fpr, delta) <= epsilon + 1e-9
