import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fl_dpgan.privacy.clipping import ClippingRule, EpsilonAdaptive, Fixed

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
