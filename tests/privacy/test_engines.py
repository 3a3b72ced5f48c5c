"""Our engine gives what Opacus and a loop of autograd give; what it cannot do is left to Opacus."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.errors import ConfigError
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.clipping import Automatic, Fixed
from fl_dpgan.privacy.engines import OpacusEngine, fastest
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.training.models import Models
from tests.conftest import passes_of

torch.set_num_threads(1)
ENGINES = [LayerEngine, OpacusEngine]


class Plain(nn.Module):
    """Convolutions of several shapes, called as a discriminator is."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images, labels):
        return self.layers(images).flatten(1).sum(1) / 20


def shipped(size=28, channels=1, width=3, labels="output"):
    torch.manual_seed(1)
    return Discriminator(size=size, channels=channels, num_classes=4, width=width, labels=labels)


def convolution(**options):
    torch.manual_seed(2)
    return Plain(nn.Conv2d(2, 3, **options), nn.LeakyReLU(0.2))


SHAPES = {
    "4, stride 2": {"kernel_size": 4, "stride": 2, "padding": 1},
    "3": {"kernel_size": 3, "padding": 1},
    "5, no padding, no bias": {"kernel_size": 5, "bias": False},
    "1": {"kernel_size": 1},
    "wide": {"kernel_size": (2, 6), "stride": 2, "padding": (0, 2)},
    "stride leaves a rest": {"kernel_size": 4, "stride": 4, "padding": 1},
    "stride 3": {"kernel_size": 6, "stride": 3, "padding": 2},
    "strides differ": {"kernel_size": (3, 5), "stride": (1, 2), "padding": 1},
    "kernel not a multiple of the stride": {"kernel_size": 3, "stride": 2},
    "kernel shorter than the stride": {"kernel_size": 2, "stride": 3},
}


def batch(n, channels=1, size=28, seed=0):
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(n, channels, size, size, generator=random) * 2 - 1
    return images, torch.arange(n) % 4, (torch.arange(n) % 2).float()


def result(engine, model, data, c=0.3, rule=None):
    made = engine(model)
    try:
        return made.clipped_sum(*data, c, rule or Fixed())
    finally:
        made.close()


def looped(model, images, labels, targets, c):
    """Norms and clipped sum, sample by sample."""
    parameters, norms = list(model.parameters()), []
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(labels)):
        loss = binary_cross_entropy_with_logits(model(images[i : i + 1], labels[i : i + 1]), targets[i : i + 1])
        grads = torch.autograd.grad(loss, parameters)
        norms.append(float(torch.cat([g.flatten() for g in grads]).double().norm()))
        total = [t + min(1.0, c / norms[-1]) * g for t, g in zip(total, grads, strict=True)]
    return total, torch.tensor(norms, dtype=torch.float64)


def length(tensors):
    return float(torch.cat([t.detach().double().flatten() for t in tensors]).norm())


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1)])
@pytest.mark.parametrize("c", [0.05, 100.0])
def test_norms_and_sum_are_those_of_a_loop_of_autograd(engine, size, channels, c):
    data = batch(37, channels, size)
    expected = looped(shipped(size, channels), *data, c)
    for samples in (100, 16):
        with passes_of(samples):
            assert_same(result(engine, shipped(size, channels), data, c), expected)


@pytest.mark.parametrize("labels", ["output", "input"])
def test_our_engine_trains_the_shipped_discriminator(labels):
    generator = Generator(size=28, channels=1, num_classes=4, latent_dim=3, width=2)
    assert Models(generator, shipped(labels=labels)).engine is LayerEngine


@pytest.mark.parametrize("engine", ENGINES)
def test_labels_at_the_input_are_told_apart_and_trained_alike(engine):
    images, labels, targets = batch(7)
    model = shipped(labels="input")
    assert not torch.allclose(model(images, labels), model(images, (labels + 1) % 4))
    expected = looped(model, images, labels, targets, 0.3)
    assert_same(result(engine, model, (images, labels, targets)), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [12, 13])
def test_convolutions_of_every_supported_shape_agree_with_opacus(shape, size):
    data = batch(18, 2, size)
    assert fastest(convolution(**SHAPES[shape]), *data[:2]) is LayerEngine
    expected = result(OpacusEngine, convolution(**SHAPES[shape]), data)
    assert length(expected[0]) > 0.01
    assert_same(result(LayerEngine, convolution(**SHAPES[shape]), data), expected)


@pytest.mark.parametrize("rule", [Fixed(), Automatic()], ids=["fixed", "automatic"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-3, 1.0, 50.0, 1e4]), c=st.floats(1e-2, 10))
def test_a_single_clipped_gradient_is_no_longer_than_c(rule, seed, scale, c):
    images, labels, targets = batch(1, seed=seed)
    sums, _ = result(LayerEngine, shipped(), (images * scale, labels, targets), c, rule)
    assert length(sums) <= c * (1 + 1e-6)


def cancelling(scale):
    """A discriminator whose weights make huge terms cancel exactly in the second convolution's gradients."""
    model = Discriminator(size=28, channels=1, num_classes=10, width=16)
    random = torch.Generator().manual_seed(1)
    terms = torch.randint(-1000, 1000, (10, 32, 5, 5), generator=random).float()
    terms[..., 4, 4] -= terms.sum((2, 3))
    weights = torch.zeros(10, 32, 7, 7)
    weights[:, :, 1:6, 1:6] = terms * scale
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.features[0].bias.fill_(1.0)
        model.features[2].bias.fill_(1.0)
        model.head.weight.copy_(weights.flatten(1))
        model.head.bias.fill_(-1e30)
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1.0, 2.0**20, 2.0**40, 2.0**60])
def test_sensitivity_holds_for_weights_under_which_huge_terms_cancel(engine, scale):
    # norm and sum must come from the same tensors: computed twice, they round differently, and the bound is void
    image = torch.full((1, 1, 28, 28), -1.0)
    sums, norms = result(engine, cancelling(scale), (image, torch.tensor([3]), torch.ones(1)), 1.0)
    assert float(norms[0]) > 0
    assert length(sums) <= 1 + 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    weights=st.sampled_from([1e-30, 1e-15, 1.0, 1e10, 1e18]),
    pixels=st.sampled_from([1e-30, 1e-3, 1.0, 1e15, 1e37]),
    c=st.sampled_from([1e-6, 1e-5, 1.0, 1e6]),
)
def test_sensitivity_holds_whatever_the_scale_of_weights_and_pixels(engine, seed, weights, pixels, c):
    torch.manual_seed(seed)
    model = Discriminator(size=28, channels=1, num_classes=4, width=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= weights
    images, labels, targets = batch(1, seed=seed)
    sums, _ = result(engine, model, (images * pixels, labels, targets), c)
    assert length(sums) <= c * (1 + 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38])
def test_a_sample_whose_gradient_is_not_finite_counts_as_zero_and_leaves_the_others(engine, value):
    images, labels, targets = batch(6)
    spoiled = images.clone()
    spoiled[2] = value
    others = torch.arange(6) != 2
    sums, norms = result(engine, shipped(), (spoiled, labels, targets))
    expected, _ = result(engine, shipped(), (images[others], labels[others], targets[others]))
    assert norms[2] == torch.inf or length(sums) <= 6 * 0.3
    assert all(torch.isfinite(s).all() for s in sums)
    if norms[2] == torch.inf:
        for a, b in zip(sums, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_samples_add_up_to_zeros(engine):
    sums, norms = result(engine, shipped(), batch(0))
    assert [s.shape for s in sums] == [p.shape for p in shipped().parameters()]
    assert length(sums) == 0 and len(norms) == 0


class Tied(Plain):
    """One convolution, used twice."""

    def forward(self, images, labels):
        return self.layers(self.layers(images)).flatten(1).sum(1)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3)],
        [nn.Conv2d(2, 4, 3, groups=2)],
        [nn.Conv2d(2, 4, 3, dilation=2)],
        [nn.Conv2d(2, 4, 3, padding="same")],
        [nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(100, 3)],
    ],
    ids=["group norm", "groups", "dilation", "same", "linear on rows"],
)
def test_a_discriminator_that_our_engine_cannot_train_is_left_to_opacus(layers):
    model, data = Plain(*layers), batch(6, 2, 12)
    assert fastest(model, *data[:2]) is OpacusEngine
    assert_same(result(OpacusEngine, model, data), looped(model, *data, 0.3))


def test_a_discriminator_that_no_engine_can_train_is_a_config_error():
    model = Plain(nn.Conv2d(2, 3, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True))
    with pytest.raises(ConfigError, match="cannot be trained privately"):
        fastest(model, *batch(4, 2, 12)[:2])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_discriminator_with_dropout_is_trained_by_our_engine_and_drops():
    model, data = Plain(nn.Conv2d(2, 3, 3), nn.Dropout(0.5), nn.LeakyReLU(0.2)).train(), batch(6, 2, 12)
    assert fastest(model, *data[:2]) is LayerEngine and model.training
    torch.manual_seed(0)
    one, other = (result(LayerEngine, model, data)[1] for _ in range(2))
    assert not torch.allclose(one, other)


def test_a_layer_that_is_used_twice_is_left_to_opacus():
    model = Tied(nn.Conv2d(2, 2, 3, padding=1))
    assert fastest(model, *batch(4, 2, 12)[:2]) is OpacusEngine
    with pytest.raises(ConfigError, match="more than once"):
        result(LayerEngine, model, batch(4, 2, 12))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_on_the_discriminator(engine):
    model = shipped()
    result(engine, model, batch(5))
    for module in model.modules():
        assert not module._forward_hooks and not module._backward_hooks
        assert not getattr(module, "activations", [])
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_sensitivity_holds_where_the_process_allows_coarser_products(engine, precision):
    images, labels, targets = batch(1)
    torch.set_float32_matmul_precision(precision)
    try:
        sums, _ = result(engine, shipped(labels="input"), (images * 50, labels, targets), 0.1)
        assert torch.get_float32_matmul_precision() == precision  # nobody else's setting is changed
    finally:
        torch.set_float32_matmul_precision("highest")
    assert length(sums) <= 0.1 * (1 + 1e-6)


def test_a_discriminator_that_wants_its_channels_first_is_left_to_opacus():
    class Viewing(Plain):
        def forward(self, images, labels):
            hidden = self.layers[0](images)
            return self.layers[1](hidden.view(len(images), -1).view(hidden.shape)).flatten(1).sum(1)

    model = Viewing(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3))
    assert fastest(model, *batch(4, 2, 12)[:2]) is OpacusEngine


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), others=st.integers(0, 7))  # a pass is filled up to 8: the same shape throughout
def test_a_sample_is_clipped_to_the_same_bits_whatever_samples_are_beside_it(seed, others):
    images, labels, targets = batch(others + 1, seed=seed)
    alone, _ = result(LayerEngine, shipped(), tuple(part[:1] for part in (images, labels, targets)))
    images[1:] = float("nan")  # what counts as zero leaves the first one's sum
    beside, _ = result(LayerEngine, shipped(), (images, labels, targets))
    for a, b in zip(alone, beside, strict=True):
        assert a.equal(b)


class Borrowing(Plain):
    """Uses a layer's weight beside the layer, where no hook sees it."""

    def forward(self, images, labels):
        first = self.layers[0]
        return super().forward(images, labels) + first.weight.sum() * images.flatten(1).mean(1)


def test_a_discriminator_of_which_every_engine_sees_a_part_of_the_gradient_is_refused():
    model = Borrowing(nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.2))
    with pytest.raises(ConfigError, match="gradients differ from autograd's"):
        fastest(model, *batch(4, 2, 12)[:2])
    assert fastest(Plain(*model.layers), *batch(4, 2, 12)[:2]) is LayerEngine
