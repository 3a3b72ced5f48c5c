import math

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import integrate, stats

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.accountant import (
    ORDERS,
    Event,
    best_order,
    calibrate,
    epsilon,
    epsilon_from_rdp,
    step_rdp,
    steps_that_fit,
    total_rdp,
)

torch.set_num_threads(1)

DELTA = 1e-5

events_strategy = st.lists(
    st.builds(
        Event,
        sample_rate=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
        noise_multiplier=st.floats(0.6, 8.0),
        count=st.integers(1, 2000),
    ),
    min_size=1,
    max_size=4,
)


def composed(accountant, events):
    for e in events:
        step = dp_accounting.GaussianDpEvent(e.noise_multiplier)
        if e.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(e.sample_rate, step)
        accountant.compose(step, e.count)
    return accountant


@settings(max_examples=40, deadline=None)
@given(events=events_strategy, order=st.sampled_from([2.0, 3.0, 8.0, 24.0, 63.0]))
def test_epsilon_is_that_of_dp_accounting_at_the_same_order(events, order):
    expected = composed(rdp.RdpAccountant(orders=[order]), events).get_epsilon(DELTA)
    assert epsilon(events, order, DELTA) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("sample_rate", "sigma", "order"), [(0.1, 1.0, 2.0), (0.1, 1.0, 4.0), (0.1, 2.0, 3.0), (0.01, 0.8, 3.0)]
)
def test_rdp_is_that_of_numerical_integration(sample_rate, sigma, order):
    def integrand(x):
        ratio = 1 - sample_rate + sample_rate * math.exp((2 * x - 1) / (2 * sigma**2))
        return stats.norm.pdf(x, scale=sigma) * ratio**order

    moment = integrate.quad(integrand, -12, 20, epsabs=1e-13, limit=500)[0]
    assert step_rdp(sample_rate, sigma, order) == pytest.approx(math.log(moment) / (order - 1), rel=1e-4)


@pytest.mark.parametrize(
    "events",
    [
        [Event(0.01, 1.0, 200)],
        [Event(0.1, 1.5, 50)],
        [Event(1.0, 4.0, 3)],
        [Event(0.05, 0.8, 20), Event(0.2, 3.0, 30)],
    ],
)
def test_epsilon_is_never_below_the_tight_figure_of_privacy_loss_distributions(events):
    tight = composed(pld.PLDAccountant(value_discretization_interval=1e-3), events).get_epsilon(DELTA)
    assert tight > 0
    assert min(epsilon(events, order, DELTA) for order in ORDERS) >= tight


@pytest.mark.parametrize("eps_max", [0.5, 3.0, 10.0])
@pytest.mark.parametrize(("sample_rate", "steps"), [(0.01, 1000), (0.13, 150), (1.0, 10)])
def test_calibrated_noise_spends_the_budget_and_never_passes_it(eps_max, sample_rate, steps):
    sigma = calibrate(eps_max=eps_max, delta=DELTA, sample_rate=sample_rate, steps=steps)
    planned = Event(sample_rate, sigma, steps)
    spent = epsilon([planned], best_order([planned], DELTA), DELTA)
    assert eps_max - 0.01 <= spent <= eps_max


def test_a_budget_that_no_noise_can_meet_is_a_config_error():
    with pytest.raises(ConfigError, match="no noise multiplier fits"):
        calibrate(eps_max=1e-4, delta=1e-12, sample_rate=1.0, steps=10**8)


@settings(max_examples=200, deadline=None)
@given(
    sample_rate=st.one_of(st.floats(1e-6, 1.0), st.just(1.0)),
    sigma=st.floats(0.05, 1000.0),
    order=st.sampled_from(ORDERS),
)
def test_rdp_of_a_step_is_that_of_opacus(sample_rate, sigma, order):
    expected = compute_rdp(q=sample_rate, noise_multiplier=sigma, steps=1, orders=order)
    # below, Opacus' sum of numbers near 1 loses its digits
    assert step_rdp(sample_rate, sigma, order) == pytest.approx(float(expected), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("order", [1.0, 1.1, 2.5, 0.0, -3.0, math.inf, math.nan])
def test_an_order_that_is_not_whole_is_a_config_error_and_never_rounded(order):
    with pytest.raises(ConfigError, match="is not a whole number"):
        step_rdp(0.1, 1.0, order)


@pytest.mark.parametrize("order", [2.0, 64.0])
def test_no_events_cost_nothing(order):
    assert epsilon([], order, DELTA) == 0


@settings(max_examples=40, deadline=None)
@given(
    sample_rate=st.sampled_from([0.01, 0.1, 1.0]),
    sigma=st.floats(0.7, 6.0),
    order=st.sampled_from([2.0, 5.0, 12.0]),
    cap=st.floats(8.0, 30.0),
    before=st.integers(0, 3),
)
def test_steps_that_fit_is_the_last_count_at_or_below_the_cap(sample_rate, sigma, order, cap, before):
    spent = [Event(0.05, 2.0, before)] if before else []
    fits = steps_that_fit(
        spent_rdp=total_rdp(spent, order), event=Event(sample_rate, sigma, 1), order=order, delta=DELTA, cap=cap
    )
    with_one_more = epsilon([*spent, Event(sample_rate, sigma, fits + 1)], order, DELTA)
    assert with_one_more > cap * (1 - 1e-9)
    if fits:
        assert epsilon([*spent, Event(sample_rate, sigma, fits)], order, DELTA) <= cap


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 1000, 99_991])
@pytest.mark.parametrize(("sample_rate", "sigma", "order"), [(0.01, 0.9, 12.0), (0.1, 0.7, 5.0), (1.0, 3.0, 2.0)])
def test_a_step_that_would_pass_the_cap_by_a_rounding_alone_does_not_fit_and_one_just_below_it_does(
    steps, sample_rate, sigma, order
):
    event = Event(sample_rate, sigma, steps)
    terms = {"spent_rdp": 0.0, "event": event, "order": order, "delta": 0.1}
    whole = epsilon([event], order, 0.1)
    assert whole > 0
    assert steps_that_fit(**terms, cap=math.nextafter(whole, 0)) == steps - 1
    assert steps_that_fit(**terms, cap=whole * (1 + 1e-9)) == steps


def test_a_spent_budget_fits_no_step():
    spent = total_rdp([Event(1.0, 1.0, 1000)], 2.0)
    assert steps_that_fit(spent_rdp=spent, event=Event(0.1, 1.0, 1), order=2.0, delta=DELTA, cap=20.0) == 0


@pytest.mark.parametrize(
    ("sample_rate", "sigma", "order"), [(1e-4, 1000.0, 2.0), (1e-6, 100.0, 3.0), (1e-10, 1.0, 2.0)]
)
def test_a_step_that_costs_almost_nothing_still_costs_something_and_fits_often(sample_rate, sigma, order):
    assert step_rdp(sample_rate, sigma, order) > 0
    fits = steps_that_fit(spent_rdp=0.0, event=Event(sample_rate, sigma, 1), order=order, delta=0.1, cap=100.0)
    assert fits > 10**6


@settings(max_examples=40, deadline=None)
@given(small=st.floats(0, 50), more=st.floats(0, 50), order=st.sampled_from(ORDERS))
def test_epsilon_does_not_fall_as_rdp_grows(small, more, order):
    assert epsilon_from_rdp(small + more, order, DELTA) >= epsilon_from_rdp(small, order, DELTA) >= 0


@pytest.mark.parametrize(
    ("sample_rate", "sigma", "count"),
    [
        (0.0, 1.0, 1),
        (-0.1, 1.0, 1),
        (1.0001, 1.0, 1),
        (math.nan, 1.0, 1),
        (0.1, math.nan, 1),
        (0.1, math.inf, 1),
        (0.1, -1.0, 1),
        (0.1, 0.0, 1),
        (0.1, 1.0, 0),
        (0.1, 1.0, -3),
        (0.1, 1.0, 10**9 + 1),
    ],
)
def test_an_impossible_event_is_a_config_error(sample_rate, sigma, count):
    with pytest.raises(ConfigError):
        Event(sample_rate, sigma, count)


def test_a_mechanism_that_the_ledger_does_not_know_is_a_config_error():
    with pytest.raises(ConfigError, match="mechanism 'gradients' is unknown"):
        Event(0.1, 1.0, 1, "gradients")


@pytest.mark.parametrize("eps_max", [0.0, -1.0, math.inf, math.nan])
def test_a_budget_that_is_no_positive_number_is_a_config_error(eps_max):
    with pytest.raises(ConfigError, match="is not a positive number"):
        calibrate(eps_max=eps_max, delta=DELTA, sample_rate=0.1, steps=1)


def test_an_event_at_the_ends_of_its_ranges_is_possible_and_just_beyond_them_is_not():
    for sample_rate, sigma, count in ((1.0, 0.01, 1), (1e-300, 1e6, 10**9)):
        Event(sample_rate, sigma, count)
    for sigma in (math.nextafter(0.01, 0), math.nextafter(1e6, 2e6)):
        with pytest.raises(ConfigError, match="noise multiplier"):
            Event(0.1, sigma, 1)


def test_the_orders_at_which_ledgers_were_made_stay_possible():
    assert (*range(2, 64), 80, 128, 256, 512) == ORDERS


@pytest.mark.parametrize(("sample_rate", "sigma"), [(1e-9, 1e6), (1e-300, 1.0), (1.0, 1e6)])
def test_no_step_counts_for_less_than_a_billionth_of_a_thousandth(sample_rate, sigma):
    # what they truly cost is q^2 / sigma^2 or so, at most 1e-12
    assert step_rdp(sample_rate, sigma, 2.0) == 1e-12


def test_a_budget_that_others_have_used_up_says_that_there_are_others():
    others = (Event(1.0, 0.5, 100), Event(1.0, 0.5, 1, "moment_release"))
    for paid, told in (((), "at q = 1e-05 into"), (others, "beside 2 other events into")):
        with pytest.raises(ConfigError, match=told):
            calibrate(eps_max=1e-3, delta=DELTA, sample_rate=1e-5, steps=10**9, others=paid)


@pytest.mark.parametrize("order", [3.0, 12.0, 63.0])
def test_an_epsilon_that_the_formula_would_put_below_nothing_is_nothing(order):
    by_formula = 1e-6 + math.log((order - 1) / order) - math.log(0.4 * order) / (order - 1)
    assert by_formula < 0
    assert epsilon_from_rdp(1e-6, order, 0.4) == 0.0


def test_noise_is_found_to_a_thousandth_of_epsilon_where_little_is_enough_and_never_below_what_an_event_may_have():
    sigma = calibrate(eps_max=1610.0, delta=DELTA, sample_rate=1.0, steps=1, order=2.0)
    spent = 1 / sigma**2 + math.log(1 / 2) - math.log(2 * DELTA)  # of one Gaussian at order 2
    assert 1610 - 1e-3 <= spent <= 1610 + 1e-9
    assert 0.01 <= calibrate(eps_max=1e6, delta=DELTA, sample_rate=1.0, steps=1) <= 0.02
