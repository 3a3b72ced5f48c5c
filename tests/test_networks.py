"""The networks' own layers give what the library's plain ones give."""

import pytest
import torch
from torch import nn

from fl_dpgan.networks import Discriminator, Generator, _ToImage


def images_and_labels(channels, size, classes, n=6):
    random = torch.Generator().manual_seed(3)
    return torch.rand(n, channels, size, size, generator=random) * 2 - 1, torch.arange(n) % classes


@pytest.mark.parametrize("channels", [1, 3])
def test_the_layer_to_an_image_is_the_librarys_transposed_convolution(channels):
    torch.manual_seed(0)
    ours = _ToImage(5, channels)
    plain = nn.ConvTranspose2d(5, channels, 4, 2, 1)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 7, 7)
    given = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found, expected = ours(given[0]), plain(given[1])
    torch.testing.assert_close(found, expected)
    for out in (found, expected):
        out.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad)


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1)])
def test_labels_at_the_input_are_maps_beside_the_image(size, channels):
    classes, width = 4, 3
    torch.manual_seed(0)
    model = Discriminator(size=size, channels=channels, num_classes=classes, width=width, labels="input")
    images, labels = images_and_labels(channels, size, classes)
    plain = nn.Conv2d(channels + classes, width, 4, 2, 1)
    with torch.no_grad():
        plain.bias.copy_(model.features[0].bias)
        plain.weight[:, :channels] = model.features[0].weight
        plain.weight[:, channels:] = model.maps.weight.weight.view(4, 4, width, classes).permute(2, 3, 0, 1)
    maps = nn.functional.one_hot(labels, classes).float()[:, :, None, None].expand(-1, -1, size, size)
    hidden = plain(torch.cat([images, maps], dim=1))
    expected = model.head(model.features[1:](hidden)).squeeze(1)
    torch.testing.assert_close(model(images, labels), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("labels", ["output", "input"])
@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (64, 1)])
def test_shapes_for_every_size(labels, size, channels):
    g = Generator(size=size, channels=channels, num_classes=4, latent_dim=5, width=3)
    d = Discriminator(size=size, channels=channels, num_classes=4, width=3, labels=labels)
    made = g(torch.randn(6, 5), torch.arange(6) % 4)
    assert made.shape == (6, channels, size, size) and float(made.detach().abs().max()) <= 1
    assert d(made, torch.arange(6) % 4).shape == (6,)
