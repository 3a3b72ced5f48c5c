"""The suite on images whose classes anyone can tell apart, with generators that are good, collapsed or noise."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from fl_dpgan.config import EvaluationConfig
from fl_dpgan.data import ImageData
from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.evaluation.suite import MEASURES, STEPS, RealReference, evaluate_generator

SETTINGS = EvaluationConfig(images=120, epochs=3)


def bars(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A bar on the left or on the right, of a height and brightness that z gives; (n, 1, 28, 28) in [-1, 1]."""
    images = torch.full((len(labels), 1, 28, 28), -1.0)
    for image, (tall, bright), label in zip(images, torch.sigmoid(z[:, :2]).tolist(), labels.tolist(), strict=True):
        image[0, : 6 + int(22 * tall), 4 + 14 * label : 12 + 14 * label] = bright
    return images


class Drawing(nn.Module):
    """A generator of bars; `spread` = 0 gives one image per class, and noise ignores the class."""

    latent_dim = 2

    def __init__(self, *, spread: float = 1.0, noise: bool = False, num_classes: int = 2) -> None:
        super().__init__()
        self.num_classes, self.noise = num_classes, noise
        self.spread = nn.Parameter(torch.tensor(spread))

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.noise:
            return torch.rand(len(z), 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return bars(z * self.spread, labels)


def real(count: int, seed: int) -> ImageData:
    labels = torch.arange(count) % 2
    images = bars(torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)), labels)
    return ImageData(((images + 1) * 127.5).round().byte().numpy(), labels.numpy(), ("left", "right"))


@pytest.fixture(scope="module")
def reference() -> RealReference:
    return RealReference.build(real(400, 1), real(200, 2), SETTINGS, seed=0)


def test_a_generator_as_good_as_real_images_gets_their_figures(reference):
    told: list[str] = []
    found = evaluate_generator(Drawing(), reference, SETTINGS, seed=0, on_step=told.append)
    assert told == list(STEPS)
    assert found["utility"]["mean_accuracy"] == found["real"]["utility"]["mean_accuracy"] == 1.0
    for side in (found, found["real"]):
        assert side["fidelity"]["precision"] > 0.7 and side["fidelity"]["recall"] > 0.7
        assert side["fidelity"]["diversity_min"] == pytest.approx(1, abs=0.25)
        assert side["fidelity"]["images"] == 120
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for section, key, _, _ in MEASURES:
        assert key in found[section] and key in found["real"][section]


def test_a_collapsed_generator_keeps_its_precision_and_loses_diversity(reference):
    found = evaluate_generator(Drawing(spread=0.0), reference, SETTINGS, seed=0)["fidelity"]
    assert found["diversity_min"] == found["diversity_mean"] == found["recall"] == 0
    assert found["precision"] == 1


def test_noise_is_neither_useful_nor_close(reference):
    found = evaluate_generator(Drawing(noise=True), reference, SETTINGS, seed=0)
    assert found["fidelity"]["precision"] == 0
    assert found["fidelity"]["kid"] > 3 * abs(found["real"]["fidelity"]["kid"])
    assert found["utility"]["mean_accuracy"] < 0.9


def test_the_order_of_real_images_does_not_matter_to_the_mix_of_classes():
    train, test = real(400, 1), real(200, 2)
    by_class = train.subset(np.argsort(train.labels, kind="stable"))  # its first 120 images are all of one class
    figures = RealReference.build(by_class, test, SETTINGS, seed=0).figures
    assert figures["utility"]["mean_accuracy"] == 1.0
    assert figures["utility"]["images"] == 120


def test_another_number_of_classes_is_refused(reference):
    with pytest.raises(ConfigError, match="3 classes and the real images have 2"):
        evaluate_generator(Drawing(num_classes=3), reference, SETTINGS, seed=0)


def test_too_few_images_of_a_class_are_named():
    train, test = real(400, 1), real(200, 2)
    few = test.subset([*np.flatnonzero(test.labels == 0), 1, 3, 5])
    with pytest.raises(DataError, match="class right has 3 of the 103 test images"):
        RealReference.build(train, few, SETTINGS, seed=0)
    many = ImageData(train.images, train.labels, tuple(map(str, range(31))))
    with pytest.raises(ConfigError, match="set it to at least 124"):
        RealReference.build(many, ImageData(test.images, test.labels, many.classes), SETTINGS, seed=0)
