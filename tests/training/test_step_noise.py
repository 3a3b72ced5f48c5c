"""The noise and the sample of D steps as they are taken, from what the optimiser and the engine get to see.

The keys are fixed, so each test either always passes or always fails. Error rates are those of a correct mechanism over
the choice of the key.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fl_dpgan.networks import Discriminator
from fl_dpgan.privacy.clipping import Automatic, EpsilonAdaptive, Fixed, Quantile
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.records import Records
from tests.privacy.gaussian import assert_standard, assert_unrelated
from tests.training.released import watched

torch.set_num_threads(1)

ERROR = 1e-4


class Grey(nn.Module):
    """A generator of grey images."""

    def __init__(self, size):
        super().__init__()
        self.latent_dim, self.num_classes, self.size = 1, 3, size
        self.level = nn.Parameter(torch.zeros(1))

    def forward(self, z, labels):
        return self.level.expand(len(z), 1, self.size, self.size)


class Counted:
    """An engine whose sums are zero; every gradient has a norm of at most C."""

    def __init__(self, discriminator):
        self.shapes = [p.shape for p in discriminator.parameters()]

    def clipped_sum(self, images, labels, targets, clipping_norm, rule):
        return [torch.zeros(shape) for shape in self.shapes], torch.zeros(len(images), dtype=torch.float64)

    def close(self):
        pass


def site_plan(**changes):
    constants = {
        "declared_size": 40, "batch_size": 12, "d_steps": 8, "rounds": 1, "noise_multiplier": 0.8, "eps_max": 100.0,
        "delta": 1e-4, "order": 3.0, "clipping": EpsilonAdaptive(c_min=0.05, c_max=0.5),
    }  # fmt: skip
    return SitePlan.model_validate({**constants, **changes})


def numbered(count, patients=None, size=1):
    """Records whose first pixel tells which they are."""
    images = torch.zeros(count, 1, size, size)
    images[:, 0, 0, 0] = torch.arange(count) / count
    return Records(images, torch.arange(count) % 3, patients)


def steps_of(plan, data, model, engine, *key):
    """The steps of one update, and what it returned."""
    with watched() as steps:
        followed = local_update(
            model, Grey(data.images.shape[-1]), torch.optim.SGD(model.parameters(), lr=1e-3), data, plan, first_step=0,
            random=KeyedGenerator.from_seed(*key), engine=steps.of(engine),
        )  # fmt: skip
    return steps, followed


def real_steps(plan, width, *key):
    """The steps of an update of a real discriminator of this width, by the engine that such ones have."""
    torch.manual_seed(5)
    model = Discriminator(size=28, channels=1, num_classes=3, width=width)
    return steps_of(plan, numbered(40, size=28), model, LayerEngine, *key)[0]


def batches(steps, records):
    """Which records were in each step's batch, (steps, records); each counts as often as it was there."""
    found = [torch.round(images[:, 0, 0, 0] * records).long() for images in steps.images]
    return np.stack([np.bincount(chosen.numpy(), minlength=records) for chosen in found])


@pytest.mark.parametrize(
    ("rule", "width"),
    [(EpsilonAdaptive(c_min=0.05, c_max=0.5, gamma=5.0), 60), (Fixed(c=0.2), 20), (Automatic(c=2.0), 20)],
)
def test_what_is_added_to_each_steps_clipped_sum_is_gaussian_of_sigma_c_t_and_unrelated_to_any_other(rule, width):
    plan = site_plan(clipping=rule)
    steps = real_steps(plan, width, "noise", rule.rule)
    noise = steps.noise(plan.batch_size) / plan.noise_multiplier
    if width == 60:
        assert noise.size > 10**6
        assert steps.norms == sorted(steps.norms, reverse=True) and steps.norms[0] > 1.3 * steps.norms[-1]
    assert_standard(noise, ERROR)
    for row in noise:
        assert_standard(row, ERROR / len(noise))
    assert_unrelated(noise, ERROR)


def test_noise_beside_the_quantile_rules_count_is_larger_as_the_count_is_paid_for_from_the_same_event():
    rule = Quantile(c_first=0.5, c_min=0.01, c_max=10.0, count_noise=0.6)
    plan = site_plan(clipping=rule)
    steps = real_steps(plan, 20, "quantile")
    # (sigma_gradient^-2 + (2 count_noise)^-2)^-1/2 = sigma
    wanted = 0.8 * 1.2 / (1.2**2 - 0.8**2) ** 0.5
    assert len(set(steps.norms)) == 8
    noise = steps.noise(plan.batch_size) / wanted
    assert_standard(noise, ERROR)
    assert_unrelated(noise, ERROR)


def test_the_quantile_rules_count_gets_gaussian_noise_of_its_own():
    rule = Quantile(c_first=1.0, c_min=1e-6, c_max=1e6, quantile=0.5, rate=0.1, count_noise=3.0)
    plan = site_plan(clipping=rule, d_steps=2000, declared_size=4000, batch_size=50, delta=1e-5)
    steps, last = steps_of(plan, numbered(1), nn.Linear(1, 1), Counted, "count")
    norms = np.array([*steps.norms, last])
    reals = np.array([len(images) for images in steps.images])
    # C <- C exp(-rate (fraction - quantile)); every real of such small batches has a norm of at most C
    shifted = (np.log(norms[:-1] / norms[1:]) / rule.rate + rule.quantile - 0.5) * plan.batch_size
    noise = (shifted - reals / 2) / rule.count_noise
    assert_standard(noise, ERROR)
    of_gradients = steps.noise(plan.batch_size).T / rule.gradient_noise(plan.noise_multiplier)
    assert_unrelated(np.stack([noise, *of_gradients]), ERROR)


def test_every_record_is_in_every_batch_at_rate_q_whatever_else_is_in_it():
    plan = site_plan(d_steps=2000, clipping=Fixed())
    steps, _ = steps_of(plan, numbered(40), nn.Linear(4, 4), Counted, "poisson")
    hits, q = batches(steps, 40), 12 / 40
    assert hits.max() == 1
    low, high = stats.binom.interval(1 - ERROR / 40, len(hits), q)
    assert ((low <= hits.sum(0)) & (hits.sum(0) <= high)).all()
    standard = (hits - q) / (q * (1 - q)) ** 0.5
    # with another record in the same step, with itself and others in the next, with the noise of the step
    noise = steps.noise(plan.batch_size) / plan.noise_multiplier
    within = (standard.T @ standard)[np.triu_indices(40, 1)]
    following = (standard[:-1].T @ standard[1:]).ravel()
    beside = np.concatenate([(standard.T @ noise).ravel(), (standard.T @ (noise**2 - 1)).ravel() / 2**0.5])
    sums = np.concatenate([within, following, beside]) / len(hits) ** 0.5
    assert len(sums) == 780 + 1600 + 2 * 40 * 20
    assert np.abs(sums).max() < stats.norm.isf(ERROR / 2 / len(sums))
    # as many as a binomial has: neither a fixed number nor a multiple of a few
    sizes = hits.sum(1)
    expected = stats.binom.pmf(np.arange(41), 40, q) * len(hits)
    likely = np.flatnonzero(expected > 10)
    observed = [(sizes < likely[0]).sum(), *[(sizes == n).sum() for n in likely], (sizes > likely[-1]).sum()]
    wanted = [expected[: likely[0]].sum(), *expected[likely], expected[likely[-1] + 1 :].sum()]
    assert stats.chisquare(observed, wanted).pvalue > ERROR


def test_invariant_11_every_patient_is_in_every_batch_at_rate_q_through_one_image_drawn_uniformly():
    patients = ["many"] * 12 + ["some"] * 3 + ["few"] * 2 + [f"one-{n}" for n in range(7)]
    plan = site_plan(declared_size=10, batch_size=3, d_steps=2000, clipping=Fixed(), unit="patient", delta=1e-3)
    steps, _ = steps_of(plan, numbered(24, patients), nn.Linear(1, 1), Counted, "patients")
    images, q = batches(steps, 24), 0.3
    who = np.array([[patient == name for patient in patients] for name in dict.fromkeys(patients)])
    hits = images @ who.T
    assert hits.max() == 1  # never two images of one patient
    low, high = stats.binom.interval(1 - ERROR / 10, len(hits), q)
    assert ((low <= hits.sum(0)) & (hits.sum(0) <= high)).all()
    standard = (hits - q) / (q * (1 - q)) ** 0.5
    pairs = (standard.T @ standard)[np.triu_indices(10, 1)] / len(hits) ** 0.5
    assert np.abs(pairs).max() < stats.norm.isf(ERROR / 2 / len(pairs))
    for first, count in ((0, 12), (12, 3), (15, 2)):
        assert stats.chisquare(images[:, first : first + count].sum(0)).pvalue > ERROR / 3
    # which image of one patient is drawn says nothing about which of another, nor about which comes next time
    chosen = {start: images[:, start : start + count] for start, count in ((0, 12), (12, 3), (15, 2))}
    for one, other in itertools.combinations(chosen.values(), 2):
        assert stats.chi2_contingency(one.T @ other).pvalue > ERROR / 4
    drawn = chosen[0][chosen[0].sum(1) == 1]
    assert stats.chi2_contingency(drawn[:-1].T @ drawn[1:]).pvalue > ERROR / 4
