import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.errors import ConfigError
from fl_dpgan.networks import Discriminator
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.gradients import check_separable, clipped_sum, per_sample

torch.set_num_threads(1)


def clip(grads, clipping_norm):
    return clipped_sum(grads, clipping_norm, Fixed())[0]


def small_discriminator():
    torch.manual_seed(3)
    return Discriminator(size=28, channels=1, num_classes=3, width=2)


def batch(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 28, 28, generator=random) * 2 - 1
    return images, torch.randint(3, (count,), generator=random)


class WithNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(1, 4, 4, 4), norm, nn.Linear(4 * 49, 1)

    def forward(self, images, labels):
        return self.head(self.norm(self.convolution(images)).flatten(1)).squeeze(1)


class MinusBatchMean(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


def length(tensors):
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


def random_grads(count, seed, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, *shape, generator=random) * scale for shape in [(3, 2), (5,), (1, 2, 2)]]


@pytest.mark.parametrize("clipping_norm", [0.05, 1.0, 1e3])
def test_clipped_sum_equals_a_loop_over_single_samples(clipping_norm):
    model, (images, labels) = small_discriminator(), batch(6)
    targets = torch.tensor([1.0, 0.0] * 3)
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for i in range(6):
        loss = binary_cross_entropy_with_logits(model(images[i : i + 1], labels[i : i + 1]), targets[i : i + 1])
        grads = torch.autograd.grad(loss, parameters)
        factor = min(1.0, clipping_norm / length(grads))
        expected = [e + factor * g for e, g in zip(expected, grads, strict=True)]

    wrapped = per_sample(model)
    binary_cross_entropy_with_logits(wrapped(images, labels), targets, reduction="sum").backward()
    found = clip([p.grad_sample for p in wrapped.parameters()], clipping_norm)

    assert length(expected) > 0.01
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-3, 1.0, 1e4, 1e15]), clipping=st.floats(1e-2, 10))
def test_a_single_clipped_gradient_is_no_longer_than_c(seed, scale, clipping):
    assert length(clip(random_grads(1, seed, scale), clipping)) <= clipping * (1 + 1e-6)


def test_a_gradient_shorter_than_c_is_left_alone():
    grads = random_grads(1, 0)
    for found, given_ in zip(clip(grads, 2 * length(grads)), grads, strict=True):
        assert torch.equal(found, given_[0])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 8), scale=st.sampled_from([0.1, 1.0, 1e4]), data=st.data())
def test_removing_one_sample_moves_the_sum_by_at_most_c(seed, count, scale, data):
    removed, clipping = data.draw(st.integers(0, count - 1)), data.draw(st.floats(1e-2, 10))
    grads = random_grads(count, seed, scale)
    kept = [torch.cat([g[:removed], g[removed + 1 :]]) for g in grads]
    pairs = zip(clip(grads, clipping), clip(kept, clipping), strict=True)
    assert length([a.double() - b.double() for a, b in pairs]) <= clipping * (1 + 1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_sample_that_is_not_finite_counts_as_zero_and_leaves_the_others(bad):
    grads = random_grads(4, 1)
    spoiled = [g.clone() for g in grads]
    spoiled[1][2, 0] = bad  # one entry of one parameter is enough
    others = [torch.cat([g[:2], g[3:]]) for g in grads]
    for found, expected in zip(clip(spoiled, 0.5), clip(others, 0.5), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_huge_finite_gradient_is_clipped_to_c_and_does_not_overflow():
    grads = [torch.full((1, 100), 1e30), torch.full((1, 3, 3), -1e30)]
    assert length(clip(grads, 1.0)) == pytest.approx(1.0, rel=1e-5)


def test_a_gradient_near_the_largest_float_is_no_longer_than_c():
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        grads = [torch.rand(1, 20_000, generator=random) * (1 + 2 * seed / 20) * 1e38]
        assert length(clip(grads, 1e-2)) <= 1e-2 * (1 + 1e-5)


def test_no_samples_add_up_to_zeros_of_the_parameters_shapes():
    sums = clip([torch.zeros(0, 3, 2), torch.zeros(0, 5)], 1.0)
    assert [tuple(s.shape) for s in sums] == [(3, 2), (5,)]
    assert length(sums) == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), MinusBatchMean()], ids=["batch norm", "minus batch mean"])
def test_a_discriminator_that_mixes_samples_is_refused(norm):
    with pytest.raises(ConfigError, match="depends on another"):
        check_separable(WithNorm(norm), *batch(4))


def test_a_batch_norm_is_named_in_the_refusal():
    with pytest.raises(ConfigError, match="layers norm"):
        check_separable(WithNorm(nn.BatchNorm2d(4)), *batch(4))


@pytest.mark.parametrize("model", [small_discriminator(), WithNorm(nn.GroupNorm(2, 4))], ids=["shipped", "group norm"])
def test_a_separable_discriminator_is_accepted_and_left_as_it_was(model):
    model.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_separable(model, *batch(4))
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_shipped_discriminator_gives_a_gradient_per_sample():
    wrapped = per_sample(small_discriminator())
    wrapped(*batch(5)).sum().backward()
    assert [tuple(p.grad_sample.shape) for p in wrapped.parameters()] == [
        (5, *p.shape) for p in small_discriminator().parameters()
    ]


def test_a_layer_without_per_sample_gradients_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot be trained privately"):
        per_sample(WithNorm(nn.BatchNorm2d(4)))
