"""The audit in many runs lets honest code pass, and finds faults planted in it. Seeds are fixed: no chance is left."""

import pytest
import torch

from fl_dpgan.audit.many_runs import audit_many_runs
from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy import gradients, layers
from fl_dpgan.privacy.clipping import EpsilonAdaptive, Fixed, Quantile
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.training import discriminator

torch.set_num_threads(1)


def plan(*, size=10, batch=10, steps=1, rounds=1, rule=None, epsilon=1.0, **more):
    privacy = PrivacyConfig(batch_size=batch, eps_max=epsilon, delta=0.01, clipping=rule or Fixed(c=0.8), **more)
    return SitePlan.derive(privacy, declared_size=size, d_steps=steps, rounds=rounds)


def run(chosen, runs=200):
    return audit_many_runs(chosen, runs=runs, confidence=0.95, seed=1)


def with_noise_of(factor):
    real = SitePlan.noised

    def noised(self, total, clipping_norm, random):
        return total + factor * (real(self, total, clipping_norm, random) - total)

    return noised


@pytest.mark.parametrize(
    "chosen",
    [
        plan(),
        plan(batch=4, steps=2, rounds=2, rule=EpsilonAdaptive(c_min=0.5, c_max=1.5)),
        plan(batch=4, steps=3, rule=Quantile(count_noise=4.0)),
    ],
    ids=["one step of all", "four steps of samples", "the quantile rule"],
)
def test_honest_steps_do_not_contradict_their_claim(chosen):
    found = run(chosen)
    assert found.holds
    assert found.points[0].x == 0.01 and found.points[0].claimed == pytest.approx(1.0, abs=2e-3)


def test_honest_steps_at_a_large_epsilon_show_a_good_part_of_it():
    found = run(plan(epsilon=30.0))
    assert found.holds
    assert 1.5 < max(point.bound for point in found.points) < 30


@pytest.mark.parametrize("chosen", [plan(), plan(batch=4, steps=4)], ids=["one step of all", "four steps of samples"])
@pytest.mark.parametrize("factor", [0.0, 0.05], ids=["no noise", "noise scaled to the mean twice"])
def test_noise_left_out_or_far_too_small_is_found(monkeypatch, chosen, factor):
    monkeypatch.setattr(SitePlan, "noised", with_noise_of(factor))
    found = run(chosen)
    assert not found.holds
    assert "FALSE" in found.verdict


def test_a_part_of_the_noise_is_found_out(monkeypatch, thorough):
    runs, factor = (4000, 0.5) if thorough else (1000, 0.3)  # the nearer to honest, the more runs
    monkeypatch.setattr(SitePlan, "noised", with_noise_of(factor))
    assert not run(plan(), runs=runs).holds


def test_a_sum_clipped_to_more_than_the_noise_is_made_for_is_found(monkeypatch):
    real = discriminator.summed_gradient

    def longer(engine, reals, fakes, clipping_norm, rule):
        return real(engine, reals, fakes, 10 * clipping_norm, rule)

    monkeypatch.setattr(discriminator, "summed_gradient", longer)
    assert not run(plan()).holds


@pytest.mark.parametrize("module", [layers, gradients])
def test_engines_that_do_not_clip_are_not_used(monkeypatch, module):
    """Where ours does not clip, Opacus' sums are taken; where neither does, there is no training to audit."""
    monkeypatch.setattr(layers, "clipping_factors", lambda norms, c, rule: (torch.ones_like(norms), norms < 1e9))
    monkeypatch.setattr(module, "clipping_factors", layers.clipping_factors)
    if module is layers:
        assert run(plan()).holds
    else:
        with pytest.raises(ConfigError, match="cannot be trained privately"):
            run(plan())


def test_the_same_seed_gives_the_same_outcome():
    assert run(plan(), runs=60) == run(plan(), runs=60)


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ConfigError, match="39 runs"):
        run(plan(), runs=39)
    with pytest.raises(ConfigError, match="no updates of a discriminator"):
        run(plan(update="image_gradient"))
