import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.clipping import EpsilonAdaptive, Fixed
from fl_dpgan.privacy.engines import OpacusEngine
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.units import Units
from fl_dpgan.training.discriminator import draw_fakes, local_update, summed_gradient
from fl_dpgan.training.records import Records
from tests.conftest import passes_of

torch.set_num_threads(1)


class Unchecked(Records):
    """Records that nobody checked: what local_update does with them must not rest on the check."""

    def __init__(self, images, labels):
        self.images, self.labels, self.units = images, labels, Units(len(labels))


def discriminator():
    torch.manual_seed(5)
    return Discriminator(size=28, channels=1, num_classes=3, width=2)


def generator():
    torch.manual_seed(6)
    return Generator(size=28, channels=1, num_classes=3, latent_dim=4, width=2)


def images_and_labels(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=random) * 2 - 1, torch.randint(3, (count,), generator=random)


def site_plan(**changes):
    constants = {
        "declared_size": 20,
        "batch_size": 5,
        "d_steps": 1,
        "rounds": 4,
        "noise_multiplier": 0.8,
        "eps_max": 100.0,
        "delta": 1e-4,
        "order": 3.0,
        "clipping": EpsilonAdaptive(c_min=0.05, c_max=0.5),
    }
    return SitePlan(**{**constants, **changes})


def length(tensors):
    return float(torch.cat([t.detach().double().flatten() for t in tensors]).norm())


def looped(model, reals, fakes, clipping_norm):
    """The clipped sum, sample by sample."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for (images, labels), target in ((reals, 1.0), (fakes, 0.0)):
        for i in range(len(labels)):
            logit = model(images[i : i + 1], labels[i : i + 1])
            grads = torch.autograd.grad(binary_cross_entropy_with_logits(logit, torch.tensor([target])), parameters)
            factor = min(1.0, clipping_norm / length(grads))
            total = [t + factor * g for t, g in zip(total, grads, strict=True)]
    return total


def by_hand(model, images, labels, plan, step, random, fakes=None):
    """The parameters after one step of SGD at a learning rate of 1."""
    fakes = fakes or draw_fakes(generator(), plan.batch_size, random)
    chosen = torch.from_numpy(plan.sample(Units(len(labels)), random))
    norm = plan.clipping.norm(plan.epsilon_after(step) / plan.eps_max)
    total = looped(model, (images[chosen], labels[chosen]), fakes, norm)
    expected = []
    for p, g in zip(model.parameters(), total, strict=True):
        noise = torch.from_numpy(random.normal(p.numel()) * plan.noise_multiplier * norm).float().view_as(p)
        expected.append((p - (g + noise) / (2 * plan.batch_size)).detach())
    return len(chosen), expected


def rounding(plan, steps=1):
    """How far a computation without the noise's grid may lie from the parameters after so many of `by_hand`'s steps."""
    return steps * plan.noise_multiplier * plan.clipping.largest / 2048 / (2 * plan.batch_size) + 1e-5


def update(model, data, plan, seed, first_step=0, learning_rate=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    random = KeyedGenerator.from_seed(seed)
    local_update(
        model, generator(), optimizer, Unchecked(*data), plan, first_step=first_step, random=random, engine=LayerEngine
    )


def assert_all_close(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", [LayerEngine, OpacusEngine])
@pytest.mark.parametrize("samples", [100, 4, 1])
@pytest.mark.parametrize("clipping_norm", [0.1, 100.0])
def test_summed_gradient_equals_a_loop_over_single_samples(engine, samples, clipping_norm):
    reals, fakes = images_and_labels(6, 1), images_and_labels(5, 2)
    expected = looped(discriminator(), reals, fakes, clipping_norm)
    with passes_of(samples):
        found = summed_gradient(engine(discriminator()), reals, fakes, clipping_norm, Fixed())[0]
    assert length(expected) > 0.05
    assert_all_close(found, expected)


def test_without_reals_the_sum_is_that_of_the_fakes():
    reals, fakes = images_and_labels(0), images_and_labels(4, 2)
    found = summed_gradient(LayerEngine(discriminator()), reals, fakes, 0.1, Fixed())[0]
    assert_all_close(found, looped(discriminator(), reals, fakes, 0.1))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    records=st.integers(1, 6),
    scale=st.sampled_from([1.0, 50.0, 1e4, 1e38]),
    samples=st.sampled_from([3, 100]),
    clipping_norm=st.sampled_from([0.02, 0.3]),
    data=st.data(),
)
def test_sensitivity_one_record_moves_the_sum_by_at_most_c(seed, records, scale, samples, clipping_norm, data):
    who = data.draw(st.integers(0, records - 1))
    images, labels = images_and_labels(records, seed)
    images[who] *= scale  # the record that comes or goes may be anything
    fakes = images_and_labels(3, seed + 1)
    others = torch.arange(records) != who
    with passes_of(samples):
        wrapped = LayerEngine(discriminator())
        larger = summed_gradient(wrapped, (images, labels), fakes, clipping_norm, Fixed())[0]
        smaller = summed_gradient(wrapped, (images[others], labels[others]), fakes, clipping_norm, Fixed())[0]
    moved = length([a.double() - b.double() for a, b in zip(larger, smaller, strict=True)])
    assert moved <= clipping_norm * (1 + 1e-5)
    if scale == 1.0:
        assert moved == pytest.approx(clipping_norm, rel=1e-3)  # C binds, so the bound is tested


@pytest.mark.parametrize("first_step", [0, 3])
def test_one_step_equals_a_computation_by_hand(first_step):
    plan, (images, labels), model = site_plan(), images_and_labels(20), discriminator()
    drawn, expected = by_hand(discriminator(), images, labels, plan, first_step, KeyedGenerator.from_seed(11))
    assert drawn > 0
    update(model, (images, labels), plan, 11, first_step)
    assert_all_close(model.parameters(), expected, rounding(plan))


def test_the_steps_of_an_update_follow_one_another_with_their_own_clipping_norms():
    images, labels = images_and_labels(20)
    once, model, random = site_plan(), discriminator(), KeyedGenerator.from_seed(12)
    both = draw_fakes(generator(), 2 * once.batch_size, random)  # small batches of fakes are drawn together
    for step, *fakes in zip((2, 3), *(part.split(once.batch_size) for part in both), strict=True):
        _, expected = by_hand(model, images, labels, once, step, random, tuple(fakes))
        with torch.no_grad():
            for p, new in zip(model.parameters(), expected, strict=True):
                p.copy_(new)
    found = discriminator()
    update(found, (images, labels), site_plan(d_steps=2, rounds=2), 12, first_step=2)
    assert_all_close(found.parameters(), list(model.state_dict().values()), rounding(once, steps=2))


@pytest.mark.parametrize("records", [0, 2])
def test_invariant_7_an_empty_poisson_batch_is_noised_and_steps(records):
    plan = site_plan(declared_size=900, batch_size=1)
    images, labels = images_and_labels(records)
    drawn, expected = by_hand(discriminator(), images, labels, plan, 0, KeyedGenerator.from_seed(13))
    assert drawn == 0
    model = discriminator()
    update(model, (images, labels), plan, 13)
    assert_all_close(model.parameters(), expected, rounding(plan))
    quiet = looped(discriminator(), images_and_labels(0), images_and_labels(1), 0.5)
    moved = length([a - b for a, b in zip(discriminator().parameters(), model.parameters(), strict=True)])
    assert moved > 2 * length(quiet) / (2 * plan.batch_size)  # twice what the fake alone could do: noise was added


def test_invariant_7_every_step_of_an_update_steps_the_optimizer():
    plan, model = site_plan(declared_size=900, batch_size=1, d_steps=4), discriminator()
    optimizer = torch.optim.Adam(model.parameters())
    random = KeyedGenerator.from_seed(13)
    local_update(model, generator(), optimizer, Records(*images_and_labels(0)), plan, first_step=0, random=random)
    assert all(int(state["step"]) == 4 for state in optimizer.state.values())
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("value", [1e38, -1e38, float("nan"), float("inf")])
def test_a_record_that_overflows_the_gradient_changes_neither_finiteness_nor_shapes(value):
    plan = site_plan(batch_size=20)  # q = 1: the record is in the batch
    images, labels = images_and_labels(20)
    images[3] = value
    model = discriminator()
    update(model, (images, labels), plan, 14)
    for p, before in zip(model.parameters(), discriminator().parameters(), strict=True):
        assert p.shape == before.shape
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before)


def test_an_oversized_batch_takes_several_passes_and_equals_one_pass():
    # a site with 10 times its declared size: the Poisson sample is far above what one pass takes
    plan = site_plan(declared_size=4, batch_size=2, clipping=Fixed(c=0.3), delta=1e-4)
    images, labels = images_and_labels(40)
    drawn, expected = by_hand(discriminator(), images, labels, plan, 0, KeyedGenerator.from_seed(15))
    assert drawn + plan.batch_size > 12
    model, sizes = discriminator(), []
    model.features.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    with passes_of(6):
        update(model, (images, labels), plan, 15)
    assert_all_close(model.parameters(), expected, rounding(plan))
    assert len(sizes) > 2 and max(sizes) <= 6
    assert sum(sizes) >= drawn + plan.batch_size


def test_hooks_and_per_sample_gradients_are_gone_after_an_update():
    model, fresh = discriminator(), discriminator()
    update(model, images_and_labels(20), site_plan(d_steps=2), 16)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert not getattr(module, "activations", [])  # Opacus leaves the list; no record may be left in it
    for p in model.parameters():
        assert not hasattr(p, "grad_sample")
        assert not hasattr(p, "_forward_counter")
    assert set(vars(model)) == set(vars(fresh))


def test_hooks_are_gone_after_an_update_that_failed():
    model = discriminator()
    with pytest.raises(RuntimeError):  # images of two channels
        update(model, (torch.zeros(20, 2, 28, 28), torch.zeros(20, dtype=torch.int64)), site_plan(batch_size=20), 16)
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_no_record_is_left_on_the_discriminator_after_an_update_that_failed():
    model, (images, _) = discriminator(), images_and_labels(20)
    with pytest.raises(RuntimeError):  # no such label
        update(model, (images, torch.full((20,), 7)), site_plan(batch_size=20), 16)
    assert not any(getattr(module, "activations", []) for module in model.modules())


def test_the_same_key_gives_the_same_update_and_another_key_another():
    models = [discriminator() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        update(model, images_and_labels(20), site_plan(d_steps=2), seed)
    same, again, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_fakes_come_from_the_generator_in_evaluation_mode_and_leave_it_as_it_was():
    g = generator().train()
    before = {key: value.clone() for key, value in g.state_dict().items()}
    images, labels = draw_fakes(g, 6, KeyedGenerator.from_seed(1))
    assert images.shape == (6, 1, 28, 28) and labels.shape == (6,)
    assert not images.requires_grad
    assert set(labels.tolist()) <= {0, 1, 2}
    assert all(torch.equal(value, before[key]) for key, value in g.state_dict().items())
