"""Classifiers on images whose classes anyone can tell apart: the accuracies and AUCs are known beforehand."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fl_dpgan.data import ImageData
from fl_dpgan.evaluation import utility


def halves(count: int, *, seed: int = 0) -> ImageData:
    """Class 0 is bright on the left, class 1 on the right."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 60, (count, 1, 28, 28), dtype=np.uint8)
    labels = np.arange(count) % 2
    images[labels == 0, :, :, :14] += 150
    images[labels == 1, :, :, 14:] += 150
    return ImageData(images, labels, ("left", "right"))


def relabelled(data: ImageData, labels: np.ndarray) -> ImageData:
    return ImageData(data.images, labels, data.classes)


KEYS = ("svm", "mlp", "cnn", "mean")


def test_classes_that_can_be_told_apart_are_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cnn, found = utility.utility(halves(200), halves(60, seed=1), epochs=3, seed=0)
    assert found == {"images": 200} | {f"{key}_{kind}": 1.0 for key in KEYS for kind in ("accuracy", "auc")}
    assert not cnn.training


def test_labels_the_wrong_way_round_give_zero():
    test = halves(60, seed=1)
    _, found = utility.utility(halves(200), relabelled(test, 1 - test.labels), epochs=3, seed=0)
    assert [found[f"{key}_{kind}"] for key in KEYS for kind in ("accuracy", "auc")] == [0.0] * 8


def test_three_classes_have_accuracies_alone_and_a_quarter_of_wrong_labels_shows():
    train, test = halves(300), halves(40, seed=1)
    for data in (train, test):
        data.images[2::3] = 250
        data.labels[2::3] = 2
    train, test = (ImageData(data.images, data.labels, ("a", "b", "c")) for data in (train, test))
    wrong = np.where(np.arange(40) % 4 == 0, (test.labels + 1) % 3, test.labels)
    _, found = utility.utility(train, relabelled(test, wrong), epochs=5, seed=0)
    assert found == {"images": 300} | {f"{key}_accuracy": 0.75 for key in KEYS}


def test_the_svm_takes_the_first_images_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(utility, "SVM_IMAGES", 40)
    data = halves(200)
    labels = np.where(np.arange(200) < 40, data.labels, 1 - data.labels)
    _, found = utility.utility(relabelled(data, labels), halves(60, seed=1), epochs=1, seed=0)
    assert found["svm_accuracy"] == 1.0
    assert found["mlp_accuracy"] < 0.5


class Shade(nn.Module):
    """Draws one grey for each class."""

    latent_dim, num_classes = 1, 3

    def __init__(self) -> None:
        super().__init__()
        self.shades = nn.Parameter(torch.tensor([-1.0, 0.001, 1.0]))

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.shades[labels].view(-1, 1, 1, 1).expand(-1, 1, 28, 28)


@pytest.mark.parametrize("count, drawn", [(9, 9), (11, 9)])
def test_synthetic_images_have_the_pixels_of_an_export_and_equal_classes(count, drawn):
    data = utility.synthetic_images(Shade(), count, ("a", "b", "c"), seed=0)
    assert data.images.shape == (drawn, 1, 28, 28) and data.images.dtype == np.uint8
    assert data.labels.tolist() == [0, 1, 2] * 3
    # 0.001 is 127.6275 on the scale of pixels
    assert [np.unique(data.images[data.labels == label]).tolist() for label in range(3)] == [[0], [128], [255]]
