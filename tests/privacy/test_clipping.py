import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fl_dpgan.privacy.clipping import Automatic, ClippingRule, EpsilonAdaptive, Fixed, Quantile

shares = st.floats(0, 1)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 4.0])
def test_adaptive_norm_starts_at_c_max_and_ends_at_c_min(gamma):
    rule = EpsilonAdaptive(c_min=0.25, c_max=2.0, gamma=gamma)
    assert rule.norm(0.0) == 2.0
    assert rule.norm(1.0) == 0.25


@given(low=st.floats(1e-3, 10), extra=st.floats(0, 10), gamma=st.floats(0.01, 100), first=shares, second=shares)
def test_adaptive_norm_never_grows_and_stays_between_its_ends(low, extra, gamma, first, second):
    rule = EpsilonAdaptive(c_min=low, c_max=low + extra, gamma=gamma)
    early, late = rule.norm(min(first, second)), rule.norm(max(first, second))
    assert late <= early
    assert rule.c_min <= late
    assert early <= rule.c_max * (1 + 1e-12)


def test_adaptive_norm_halfway_follows_the_formula():
    assert EpsilonAdaptive(c_min=0.5, c_max=1.5, gamma=2.0).norm(0.5) == pytest.approx(0.75, rel=1e-12)


@pytest.mark.parametrize(("outside", "inside"), [(-0.5, 0.0), (1.5, 1.0)])
def test_a_share_outside_zero_to_one_is_clamped(outside, inside):
    rule = EpsilonAdaptive(gamma=0.5)
    assert rule.norm(outside) == rule.norm(inside)


@given(share=shares)
def test_fixed_norm_is_constant(share):
    assert Fixed(c=0.7).norm(share) == 0.7


def test_swapped_ends_are_refused():
    with pytest.raises(ValidationError, match="swap them"):
        EpsilonAdaptive(c_min=2.0, c_max=1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize(("rule", "field"), [("fixed", "c"), *(("epsilon_adaptive", f) for f in ("c_min", "c_max"))])
def test_a_norm_that_is_not_a_positive_finite_number_is_refused(rule, field, bad):
    with pytest.raises(ValidationError, match=field):
        TypeAdapter(ClippingRule).validate_python({"rule": rule, field: bad})


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_gamma_that_is_not_a_positive_finite_number_is_refused(bad):
    with pytest.raises(ValidationError, match="gamma"):
        EpsilonAdaptive(gamma=bad)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValidationError):
        TypeAdapter(ClippingRule).validate_python({"rule": "median"})


TINY, ALMOST_ONE = math.nextafter(0, 1), math.nextafter(1, 0)


@pytest.mark.parametrize(
    ("rule", "fields", "least", "most"),
    [
        ("fixed", ("c",), 1e-6, 1e6),
        ("automatic", ("c",), 1e-6, 1e6),
        ("epsilon_adaptive", ("c_min", "c_max"), 1e-6, 1e6),
        ("epsilon_adaptive", ("gamma",), TINY, 100),
        ("quantile", ("c_min", "c_first", "c_max"), 1e-6, 1e6),
        ("quantile", ("quantile",), TINY, ALMOST_ONE),
        ("quantile", ("rate",), TINY, 10),
        ("quantile", ("count_noise",), TINY, 1e6),
    ],
)
def test_each_number_of_a_rule_is_accepted_up_to_its_ends_and_refused_just_beyond_them(rule, fields, least, most):
    def made(value):
        return TypeAdapter(ClippingRule).validate_python({"rule": rule, **dict.fromkeys(fields, value)})

    for value in (least, most):
        assert [getattr(made(value), field) for field in fields] == [value] * len(fields)
    for value in (math.nextafter(least, -1), math.nextafter(most, 1e9), math.nan):
        with pytest.raises(ValidationError, match=fields[0]):
            made(value)


@pytest.mark.parametrize(
    ("rule", "numbers", "largest"),
    [
        (Fixed(), {"c": 1.0}, 1.0),
        (Automatic(), {"c": 1.0}, 1.0),
        (EpsilonAdaptive(), {"c_min": 0.5, "c_max": 1.5, "gamma": 1.0}, 1.5),
        (
            Quantile(),
            {"c_first": 1.0, "c_min": 1e-3, "c_max": 100.0, "quantile": 0.5, "rate": 0.2, "count_noise": 5.0},
            100.0,
        ),
    ],
    ids=lambda value: getattr(value, "rule", None),
)
def test_what_a_plan_leaves_out_of_a_rule_stays_what_it_was_when_other_runs_began(rule, numbers, largest):
    assert rule.model_dump(exclude={"rule"}) == numbers
    assert rule.largest == largest
    with pytest.raises(ValidationError, match="frozen"):
        setattr(rule, next(iter(numbers)), 0.7)


@pytest.mark.parametrize(("c_min", "c_max"), [(1.1, 2.0), (0.1, 0.9)])
def test_a_first_norm_outside_its_bounds_is_refused_and_at_either_of_them_accepted(c_min, c_max):
    with pytest.raises(ValidationError, match="c_first = 1 is outside"):
        Quantile(c_first=1.0, c_min=c_min, c_max=c_max)
    assert Quantile(c_first=c_min, c_min=c_min, c_max=c_max).norm(0.0) == c_min
    assert Quantile(c_first=c_max, c_min=c_min, c_max=c_max).norm(0.0) == c_max


@given(length=st.floats(0, 1e6), c=st.floats(1e-3, 1e3))
def test_the_factor_of_a_fixed_norm_cuts_longer_gradients_to_it_and_leaves_shorter_ones(length, c):
    (factor,) = Fixed(c=c).factors(torch.tensor([length], dtype=torch.float64), c).tolist()
    assert factor == pytest.approx(1.0 if length <= c else c / length, rel=1e-12)
