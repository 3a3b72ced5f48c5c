"""Automatic clipping (AUTO-S) and the private quantile: formulas, sensitivity and price, against hand computation."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.accountant import step_rdp
from fl_dpgan.privacy.clipping import Automatic, ClippingRule, Fixed, Quantile
from fl_dpgan.privacy.gradients import clipped_sum
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.units import Units
from fl_dpgan.training.discriminator import draw_fakes, local_update, summed_gradient
from fl_dpgan.training.records import Records
from tests.conftest import passes_of

torch.set_num_threads(1)
norms = st.floats(0, 1e30)
clips = st.floats(1e-3, 1e3)


def networks():
    torch.manual_seed(5)
    shape = {"size": 28, "channels": 1, "num_classes": 3}
    return Generator(**shape, latent_dim=4, width=2), Discriminator(**shape, width=2)


def images_and_labels(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=random) * 2 - 1, torch.randint(3, (count,), generator=random)


def gradients(model, images, labels, target):
    """One flat double-precision gradient per sample, by autograd."""
    found = []
    for i in range(len(labels)):
        loss = binary_cross_entropy_with_logits(model(images[i : i + 1], labels[i : i + 1]), torch.tensor([target]))
        found.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return found


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


def site_plan(rule, **changes):
    constants = {
        "declared_size": 20, "batch_size": 5, "d_steps": 2, "rounds": 4, "noise_multiplier": 0.8, "eps_max": 100.0,
        "delta": 1e-4, "order": 3.0, "clipping": rule,
    }  # fmt: skip
    return SitePlan.model_validate({**constants, **changes})


# --- automatic


@given(norm=norms, c=clips)
def test_automatic_factor_is_c_over_norm_plus_a_hundredth(norm, c):
    (factor,) = Automatic(c=c).factors(torch.tensor([norm], dtype=torch.float64), c).tolist()
    assert factor == pytest.approx(c / (norm + 0.01), rel=1e-12)


@given(length=st.sampled_from([0.0, 1e-30, 1e-6, 0.01, 1.0, 1e6, 1e18, 1e30]), c=clips, seed=st.integers(0, 99))
def test_automatic_clipped_norm_is_below_c_for_tiny_and_huge_gradients(length, c, seed):
    direction = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient = (direction / direction.norm() * length).float()
    (clipped,), _ = clipped_sum([gradient], c, Automatic(c=c))
    assert float(clipped.double().norm()) <= c * (1 + 1e-6)
    if length <= 1.0:
        assert float(clipped.double().norm()) < c * 0.9999  # strictly below, by the paper's stability constant
    assert bool(torch.isfinite(clipped).all())


@pytest.mark.parametrize("samples", [100, 4])
def test_automatic_sum_equals_a_loop_over_single_samples(samples):
    reals, fakes, c = images_and_labels(6, 1), images_and_labels(5, 2), 0.7
    _, model = networks()
    single = gradients(model, *reals, 1.0) + gradients(model, *fakes, 0.0)
    expected = sum(g * (c / (g.norm() + 0.01)) for g in single)
    with passes_of(samples):
        found, _ = summed_gradient(LayerEngine(networks()[1]), reals, fakes, c, Automatic(c=c))
    torch.testing.assert_close(flat(found), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**20), records=st.integers(1, 5), scale=st.sampled_from([1e-3, 1.0, 1e4, 1e38]),
    rule=st.sampled_from([Automatic(c=0.3), Quantile()]), who=st.integers(0, 4), c=st.sampled_from([0.02, 0.3]),
)  # fmt: skip
def test_sensitivity_one_record_moves_the_sum_by_at_most_c_and_the_count_by_one_half(
    seed, records, scale, rule, who, c
):
    who %= records
    images, labels = images_and_labels(records, seed)
    images[who] *= scale
    fakes, others = images_and_labels(3, seed + 1), torch.arange(records) != who
    with passes_of(3):
        larger, more = summed_gradient(LayerEngine(networks()[1]), (images, labels), fakes, c, rule)
    smaller, fewer = summed_gradient(LayerEngine(networks()[1]), (images[others], labels[others]), fakes, c, rule)
    assert float((flat(larger) - flat(smaller)).norm()) <= c * (1 + 1e-5)
    assert abs(more - fewer) == 0.5


# --- quantile: the count


def test_quantile_count_is_the_sum_of_halves_over_the_reals_alone():
    reals, fakes = images_and_labels(7, 3), images_and_labels(5, 4)
    lengths = sorted(float(g.norm()) for g in gradients(networks()[1], *reals, 1.0))
    for below in range(1, 7):
        c = (lengths[below - 1] + lengths[below]) / 2
        for samples in (100, 4):
            with passes_of(samples):
                _, count = summed_gradient(LayerEngine(networks()[1]), reals, fakes, c, Quantile())
            assert count == below - 7 / 2


def test_quantile_counts_a_gradient_that_is_not_finite_as_above_c():
    images, labels = images_and_labels(4, 3)
    images[2] = math.nan
    _, count = summed_gradient(LayerEngine(networks()[1]), (images, labels), images_and_labels(2), 1e6, Quantile())
    assert count == 3 - 4 / 2


def test_quantile_count_of_an_empty_sample_is_zero():
    _, count = summed_gradient(LayerEngine(networks()[1]), images_and_labels(0), images_and_labels(2), 1.0, Quantile())
    assert count == 0


# --- quantile: C


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (0.0, 10, 2.0),  # half of the gradients are below: nothing moves
        (5.0, 10, 2.0 * math.exp(-0.2 * 0.5)),  # all below: C shrinks
        (-5.0, 10, 2.0 * math.exp(0.2 * 0.5)),
        (5.0, 20, 2.0 * math.exp(-0.2 * 0.25)),  # B is the divisor
    ],
)
def test_quantile_update_by_hand(count, batch, expected):
    assert Quantile(c_first=2.0).following(2.0, count, batch) == pytest.approx(expected, rel=1e-12)


@given(c=clips, count=st.floats(-1e9, 1e9), batch=st.integers(1, 10**5), quantile=st.floats(0.01, 0.99),
       rate=st.floats(0.01, 10))  # fmt: skip
def test_quantile_c_follows_the_formula_within_its_bounds(c, count, batch, quantile, rate):
    rule = Quantile(c_first=1.0, c_min=0.01, c_max=50.0, quantile=quantile, rate=rate)
    found = rule.following(c, count, batch)
    log = math.log(c) - rate * (count / batch + 0.5 - quantile)
    expected = math.exp(min(max(log, math.log(0.01)), math.log(50.0)))
    assert found == pytest.approx(expected, rel=1e-9)
    assert 0.01 <= found <= 50.0


@pytest.mark.parametrize(("count", "bound"), [(1e300, 1e-3), (-1e300, 100.0)])
def test_quantile_a_draw_far_out_does_not_overflow(count, bound):
    assert Quantile(rate=10).following(1.0, count, 1) == bound


def test_quantile_starts_at_c_first_whatever_was_spent():
    rule = Quantile(c_first=0.3)
    assert rule.norm(0.0) == rule.norm(0.7) == 0.3
    assert rule.largest == 100.0


# --- quantile: the noise and its price


@given(z=st.floats(0.1, 1e3), factor=st.floats(1.001, 100))
def test_quantile_noise_split_adds_up_to_the_noise_multiplier_that_is_charged(z, factor):
    count_noise = min(z / 2 * factor, 1e6)
    z_gradient = Quantile(count_noise=count_noise).gradient_noise(z)
    assert z_gradient > z
    assert z_gradient**-2 + (2 * count_noise) ** -2 == pytest.approx(z**-2, rel=1e-6)


@pytest.mark.parametrize("q", [1.0, 0.05])
@pytest.mark.parametrize("order", [2, 5, 16])
def test_quantile_joint_rdp_of_gradient_and_count_is_what_is_charged(q, order):
    z, count_noise = 0.9, 1.1
    z_gradient = Quantile(count_noise=count_noise).gradient_noise(z)
    charged = step_rdp(q, z, float(order))
    # by hand: one record shifts two Gaussians at once, in units of their noise by (1/z_gradient, 1/(2 count_noise))
    squared = z_gradient**-2 + (0.5 / count_noise) ** 2
    moments = [
        math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / 2 * squared)
        for k in range(order + 1)
    ]
    assert charged == pytest.approx(math.log(math.fsum(moments)) / (order - 1), rel=1e-9)
    both = ComposedDpEvent([GaussianDpEvent(z_gradient), GaussianDpEvent(count_noise / 0.5)])
    reference = RdpAccountant(orders=[float(order)]).compose(PoissonSampledDpEvent(q, both))
    assert charged == pytest.approx(float(reference._rdp[0]), rel=1e-9)


def test_invariant_5_quantile_charges_the_plans_noise_multiplier_and_draws_the_gradients_larger_one():
    rule = Quantile(count_noise=0.7)
    plan = site_plan(rule)
    assert plan.event.noise_multiplier == 0.8
    larger = (0.8**-2 - 1.4**-2) ** -0.5
    drawn = plan.noised(torch.zeros(30, 1000, dtype=torch.float64), 0.25, KeyedGenerator.from_seed(3))
    expected = KeyedGenerator.from_seed(3).normal(30_000) * larger * 0.25
    np.testing.assert_allclose(drawn.numpy().ravel(), expected, rtol=0, atol=larger * 0.25 / 2048)
    assert float(drawn.std()) == pytest.approx(larger * 0.25, rel=0.02)  # 5 sigma of the estimate


@pytest.mark.parametrize(("count_noise", "fits"), [(0.39, False), (0.4, False), (0.4001, True), (5.0, True)])
def test_quantile_plan_refuses_a_count_noise_of_at_most_half_the_noise_multiplier(count_noise, fits):
    if fits:
        assert site_plan(Quantile(count_noise=count_noise)).noise_multiplier == 0.8
    else:
        with pytest.raises(ValidationError, match="count_noise"):
            site_plan(Quantile(count_noise=count_noise))


def test_quantile_a_count_noise_one_bit_above_half_still_gives_a_finite_gradient_noise():
    for z in (0.1, 0.8, 1.0, 3.3, 1e5):
        assert math.isfinite(Quantile(count_noise=math.nextafter(z / 2, math.inf)).gradient_noise(z))


def test_quantile_steps_equal_a_computation_by_hand():
    rule = Quantile(c_first=0.4, count_noise=0.7, rate=1.0)
    plan, (images, labels) = site_plan(rule), images_and_labels(20)
    g, model = networks()
    random, c, c_used = KeyedGenerator.from_seed(4), 0.4, []
    for fakes in zip(*(part.split(5) for part in draw_fakes(g, 10, random)), strict=True):
        chosen = torch.from_numpy(plan.sample(Units(20), random))
        reals = gradients(model, images[chosen], labels[chosen], 1.0)
        total = sum(v * min(1.0, c / float(v.norm())) for v in reals + gradients(model, *fakes, 0.0))
        sigma = (0.8**-2 - 1.4**-2) ** -0.5
        parameters = list(model.parameters())
        noise = np.concatenate([random.normal(p.numel()) * sigma * c for p in parameters])
        step = (total + torch.from_numpy(noise)) / (2 * 5)
        below = sum(float(v.norm()) <= c for v in reals)
        noised = below - len(reals) / 2 + 0.7 * float(random.normal(1)[0])
        with torch.no_grad():
            for p, change in zip(parameters, step.split([p.numel() for p in parameters]), strict=True):
                p -= change.view_as(p).float()
        c_used.append(c)
        c = c * math.exp(-1.0 * (noised / 5 + 0.5 - 0.5))
    assert c != c_used[1] != c_used[0]
    g, found = networks()
    optimizer = torch.optim.SGD(found.parameters(), lr=1.0)
    following = local_update(
        found, g, optimizer, Records(images, labels), plan, first_step=0, random=KeyedGenerator.from_seed(4)
    )
    # half a step of the noises' grids, twice
    assert following == pytest.approx(c, rel=2 * 0.7 / 2048 / 5)
    torch.testing.assert_close(flat(found.parameters()), flat(model.parameters()), rtol=1e-4, atol=1e-4)


def test_quantile_c_looks_at_the_noised_count_alone():
    """With the noise of the count drowned out, C is that of the noise: no record can be read from it."""
    rule = Quantile(count_noise=1e6, rate=0.1, c_min=1e-6, c_max=1e6)
    found = []
    for seed in (1, 2):  # other data, the same draws
        g, model = networks()
        random = KeyedGenerator.from_seed(9)
        plan = site_plan(rule, d_steps=1, batch_size=20)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found.append(
            local_update(model, g, optimizer, Records(*images_and_labels(20, seed)), plan, first_step=0, random=random)
        )
    assert found[0] == pytest.approx(found[1], rel=0.2)


def test_quantile_goes_on_from_the_norm_that_it_is_given():
    g, model = networks()
    seen = []

    class Spy(Quantile):
        def following(self, c, noised_count, batch_size):
            seen.append(c)
            return 0.123 if len(seen) == 1 else 0.456

    plan = site_plan(Fixed()).model_copy(update={"clipping": Spy()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data, random = Records(*images_and_labels(20)), KeyedGenerator.from_seed(1)
    last = local_update(model, g, optimizer, data, plan, first_step=4, random=random, followed=0.789)
    assert (seen, last) == ([0.789, 0.123], 0.456)


# --- refused


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        *(("automatic", "c", bad) for bad in (0.0, -1.0, math.nan, math.inf, 1e7)),
        ("automatic", "gamma", 1.0),
        ("automatic", "c_max", 1.0),
        *(("quantile", key, bad) for key in ("c_first", "c_min", "c_max") for bad in (0.0, math.nan, math.inf, -1.0)),
        *(("quantile", "quantile", bad) for bad in (0.0, 1.0, math.nan)),
        *(("quantile", "rate", bad) for bad in (0.0, -0.1, 10.5, math.inf)),
        *(("quantile", "count_noise", bad) for bad in (0.0, -1.0, 1e7, math.nan)),
        ("quantile", "c", 1.0),
        ("fixed", "count_noise", 1.0),
        ("fixed", "gamma", 1.0),
    ],
)
def test_a_key_or_value_that_a_rule_does_not_have_is_refused(rule, key, value):
    with pytest.raises(ValidationError, match=key):
        TypeAdapter(ClippingRule).validate_python({"rule": rule, key: value})


@pytest.mark.parametrize("first", [0.05, 20.0])
def test_a_c_first_outside_the_bounds_is_refused(first):
    with pytest.raises(ValidationError, match="c_first"):
        Quantile(c_first=first, c_min=0.1, c_max=10.0)
