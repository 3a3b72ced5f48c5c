import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.accountant import Event, epsilon
from fl_dpgan.privacy.clipping import EpsilonAdaptive, Fixed
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.privacy.units import Units

torch.set_num_threads(1)


def derive(declared_size=500, d_steps=5, rounds=10, **privacy):
    return SitePlan.derive(
        PrivacyConfig(**{"batch_size": 50, **privacy}), declared_size=declared_size, d_steps=d_steps, rounds=rounds
    )


def test_invariant_5_sampler_noise_and_event_come_from_one_plan():
    plan = derive(noise_multiplier=2.5, clipping=Fixed(c=0.8))
    event = plan.event
    assert event == Event(sample_rate=50 / 500, noise_multiplier=2.5, count=5)

    replay = KeyedGenerator.from_seed(1)
    drawn = plan.sample(Units(500), KeyedGenerator.from_seed(1))
    assert np.array_equal(drawn, np.flatnonzero(replay.uniform(500) < event.sample_rate))

    noise = plan.noised(torch.zeros(4, 6), 0.8, KeyedGenerator.from_seed(2))
    sd = event.noise_multiplier * 0.8
    expected = KeyedGenerator.from_seed(2).normal(24) * sd
    np.testing.assert_allclose(noise.numpy().ravel(), expected, rtol=0, atol=sd / 2048)


def test_invariant_5_the_plan_cannot_be_changed_after_it_was_made():
    with pytest.raises(ValidationError, match="frozen"):
        derive().noise_multiplier = 0.1


def test_invariant_5_the_plans_epsilon_is_that_of_its_events():
    plan = derive(noise_multiplier=1.3)
    assert plan.epsilon_after(20) == pytest.approx(
        epsilon([replace(plan.event, count=n) for n in (7, 13)], plan.order, plan.delta)
    )


def test_invariant_11_delta_above_a_tenth_of_one_over_n_is_refused():
    with pytest.raises(ValidationError, match=r"delta = 0\.0003 .* N\^ = 500"):
        derive(delta=3e-4)


def test_invariant_11_delta_of_a_tenth_of_one_over_n_is_accepted():
    assert derive(delta=1 / 5000).delta == 1 / 5000


def test_a_batch_larger_than_the_declared_size_is_refused_with_both_values():
    with pytest.raises(ValidationError, match=r"batch size 501 .* declared size 500"):
        derive(batch_size=501)


def test_a_batch_of_the_declared_size_samples_every_record():
    plan = derive(batch_size=500)
    assert plan.sample_rate == 1
    assert len(plan.sample(Units(500), KeyedGenerator.from_seed(0))) == 500


@pytest.mark.parametrize(
    ("privacy", "reason"), [({"batch_size": 501}, r"501 .* 500"), ({"delta": 3e-4}, r"delta = 0\.0003")]
)
def test_an_impossible_site_plan_is_a_config_error_in_one_line(privacy, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        Plan(privacy=privacy).site_plan(500)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eps_max", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("declared_size", [60, 500, 5000])
def test_a_calibrated_run_spends_its_budget_and_never_passes_it(eps_max, declared_size):
    plan = derive(declared_size, eps_max=eps_max)
    assert eps_max - 0.01 <= plan.epsilon_after(50) <= eps_max


def test_a_budget_so_large_that_little_noise_is_needed_gives_a_plan():
    assert Plan(privacy={"eps_max": 1000.0}, training={"rounds": 1}).site_plan(479).epsilon_after(5) <= 1000


def test_a_given_noise_multiplier_is_kept():
    assert derive(noise_multiplier=3.25).noise_multiplier == 3.25


def test_no_steps_cost_nothing_and_each_further_step_costs_more():
    plan = derive()
    spent = [plan.epsilon_after(step) for step in range(51)]
    assert spent[0] == 0
    assert all(a < b for a, b in itertools.pairwise(spent))


def test_the_clipping_norm_starts_at_c_max_and_shrinks_with_the_budget():
    plan = derive(clipping=EpsilonAdaptive(c_min=0.5, c_max=2.0))
    norms = [plan.clipping_norm(step) for step in range(51)]
    assert norms[0] == 2.0
    assert all(a > b for a, b in itertools.pairwise(norms))
    assert norms[-1] >= 0.5


def test_equal_plans_have_one_digest_and_others_another():
    assert derive(noise_multiplier=2.0).digest == derive(noise_multiplier=2.0).digest
    assert derive(noise_multiplier=2.0).digest != derive(noise_multiplier=2.001).digest


@pytest.mark.parametrize("field", ["eps_max", "delta", "noise_multiplier"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_number_that_is_not_positive_and_finite_is_refused(field, bad):
    with pytest.raises(ValidationError, match=field):
        PrivacyConfig(**{field: bad})


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="epsilon"):
        PrivacyConfig(epsilon=1.0)


def test_a_plan_of_more_steps_than_an_event_can_count_is_refused():
    plan = derive()
    SitePlan.model_validate({**plan.model_dump(), "d_steps": 1000, "rounds": 10**6})
    with pytest.raises(ValidationError, match="more than 10\\^9 steps"):
        SitePlan.model_validate({**plan.model_dump(), "d_steps": 1001, "rounds": 10**6})
