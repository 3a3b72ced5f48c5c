"""Each rule of a site's policy accepts a plan at its limit and refuses one just beyond it, by name (invariant 4)."""

import math

import pytest
from pydantic import ValidationError

from fl_dpgan.errors import PolicyError
from fl_dpgan.privacy.accountant import ORDERS, Event, best_order, calibrate, epsilon
from fl_dpgan.privacy.clipping import Automatic, EpsilonAdaptive, Fixed, Quantile
from fl_dpgan.privacy.moments import Features, Fourier, Wavelets
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.policy import Policy

UPDATE = "discriminator_update"


def site_plan(**changes):
    constants = {
        "declared_size": 100, "batch_size": 10, "d_steps": 5, "rounds": 3, "noise_multiplier": 2.0, "eps_max": 4.0,
        "delta": 1e-5, "order": 8.0, "clipping": Fixed(c=1.5),
    }  # fmt: skip
    return SitePlan.model_validate({**constants, **changes})


def policy(**changes):
    return Policy.model_validate({"declared_size": 100, **changes})


def broken_rule(terms, plan, mechanism=UPDATE):
    with pytest.raises(PolicyError) as caught:
        terms.check(plan, mechanism)
    assert "\n" not in str(caught.value)
    return caught.value.rule


MOMENTS = Features(parts=(Fourier(count=24), Wavelets(count=10)))  # 34 numbers
AT_THE_LIMIT = {
    "eps_per_run": (4.0, {"eps_max": math.nextafter(4.0, 5)}),
    "largest_sample_rate": (0.1, {"batch_size": 11}),
    "largest_batch_size": (10, {"batch_size": 11}),
    "largest_clipping_norm": (1.5, {"clipping": Fixed(c=math.nextafter(1.5, 2))}),
    "largest_d_steps": (5, {"d_steps": 6}),
    "largest_moments": (33, {"moments": MOMENTS, "moment_noise": 2.0}),
    "least_noise_multiplier": (2.0, {"noise_multiplier": math.nextafter(2.0, 1)}),
}


@pytest.mark.parametrize("rule", AT_THE_LIMIT)
def test_invariant_4_a_rule_accepts_at_its_limit_and_refuses_just_beyond_it(rule):
    limit, beyond = AT_THE_LIMIT[rule]
    terms = policy(**{rule: limit})
    terms.check(site_plan(), UPDATE)
    assert broken_rule(terms, site_plan(**beyond)) == rule


@pytest.mark.parametrize(
    ("rule", "terms", "plan"),
    [
        ("declared_size", {"declared_size": 99}, {}),
        ("declared_size", {"declared_size": 101}, {}),
        ("unit", {"unit": "patient"}, {}),
        ("unit", {}, {"unit": "patient"}),
        ("delta", {"delta": 1e-6}, {}),
        ("delta", {"delta": 2e-5}, {}),
    ],
)
def test_invariant_4_terms_that_must_be_equal_are_refused_on_either_side(rule, terms, plan):
    assert broken_rule(policy(**terms), site_plan(**plan)) == rule


@pytest.mark.parametrize("size", [99.9999, 100.5])
def test_a_declared_size_is_a_whole_number(size):
    with pytest.raises(ValidationError, match="declared_size"):
        policy(declared_size=size)


@pytest.mark.parametrize(
    ("rule", "largest"),
    [
        (Fixed(c=3.0), 3.0),
        (Automatic(c=3.0), 3.0),
        (EpsilonAdaptive(c_min=0.1, c_max=3.0), 3.0),
        (Quantile(c_first=0.2, c_min=0.1, c_max=3.0), 3.0),
    ],
    ids=lambda value: getattr(value, "rule", None),
)
def test_invariant_4_the_largest_c_that_a_rule_can_give_counts(rule, largest):
    policy(largest_clipping_norm=largest).check(site_plan(clipping=rule), UPDATE)
    below = policy(largest_clipping_norm=math.nextafter(largest, 0))
    assert broken_rule(below, site_plan(clipping=rule)) == "largest_clipping_norm"


@pytest.mark.parametrize("mechanism", [UPDATE, "evaluation_count"])
def test_invariant_4_evaluation_noise_below_the_least_is_refused(mechanism):
    terms = policy(least_noise_multiplier=1.5, mechanisms=[UPDATE, "evaluation_count"])
    terms.check(site_plan(evaluation_noise=1.5), mechanism)
    assert broken_rule(terms, site_plan(evaluation_noise=1.4999), mechanism) == "least_noise_multiplier"


def test_invariant_1_only_the_update_may_leave_unless_the_site_says_otherwise():
    plan = site_plan(evaluation_noise=5.0)
    policy().check(plan, UPDATE)
    assert broken_rule(policy(), plan, "evaluation_count") == "mechanisms"
    assert broken_rule(policy(mechanisms=["evaluation_count"]), plan, UPDATE) == "mechanisms"
    policy(mechanisms=["evaluation_count"]).check(plan, "evaluation_count")


def test_every_rule_is_a_key_of_the_policy():
    kept_by_the_ledger = {"eps_max", "order"}
    assert {*AT_THE_LIMIT, "declared_size", "unit", "delta", "mechanisms"} | kept_by_the_ledger == set(
        Policy.model_fields
    )


@pytest.mark.parametrize("order", [2.0, 7.0, 63.0, 512.0])
def test_invariant_6_the_ledgers_order_is_the_policys_and_goes_into_the_account(order):
    terms = policy(order=order, unit="patient", eps_max=3.0)
    assert terms.ledger_order == order
    account = terms.account("north")
    assert (account.site, account.declared_size, account.eps_max, account.delta, account.order, account.unit) == (
        "north", 100, 3.0, 1e-5, order, "patient"
    )  # fmt: skip


@pytest.mark.parametrize("eps_max", [0.5, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("size", [100, 10_000])
def test_invariant_6_an_order_left_out_is_the_best_for_a_thousand_steps_and_the_same_every_time(eps_max, size):
    terms = policy(eps_max=eps_max, declared_size=size)
    sigma = calibrate(eps_max=eps_max, delta=1e-5, sample_rate=0.02, steps=1000)
    events = [Event(0.02, sigma, 1000)]
    assert terms.order is None
    assert terms.ledger_order == best_order(events, 1e-5) == policy(eps_max=eps_max).ledger_order
    assert epsilon(events, terms.ledger_order, 1e-5) == min(epsilon(events, order, 1e-5) for order in ORDERS)


@pytest.mark.parametrize("order", [1.0, 2.5, 64.0, 1024.0, 0.0, -2.0, math.inf, math.nan])
def test_invariant_6_an_order_is_one_of_the_accountants(order):
    with pytest.raises(ValidationError, match="order"):
        policy(order=order)
    with pytest.raises(ValidationError, match="order"):
        site_plan(order=order)


@pytest.mark.parametrize("size", [100, 1000, 9999])
def test_invariant_11_delta_may_be_a_tenth_of_one_over_n_and_no_more(size):
    assert policy(declared_size=size, delta=1 / (10 * size)).declared_size == size
    with pytest.raises(ValidationError, match="delta"):
        policy(declared_size=size, delta=math.nextafter(1 / (10 * size), 1))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, bad) for key in ("eps_max", "eps_per_run", "largest_clipping_norm") for bad in (0, -1, math.inf)),
        *((key, math.nan) for key in ("eps_max", "delta", "largest_sample_rate", "least_noise_multiplier")),
        ("delta", 0), ("delta", 0.5), ("declared_size", 0), ("unit", "hospital"), ("least_noise_multiplier", 0.09),
        ("largest_sample_rate", 1.01), ("largest_sample_rate", 0), ("largest_batch_size", 0), ("largest_d_steps", 0),
        ("mechanisms", []), ("mechanisms", ["accuracy"]), ("mechanisms", "discriminator_update"), ("sigma", 1.0),
    ],
)  # fmt: skip
def test_an_unknown_key_or_a_value_out_of_range_is_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        policy(**{key: value})


def test_a_policy_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        policy().eps_max = 1000.0
