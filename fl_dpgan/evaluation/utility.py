"""Utility: the accuracy on real images of a CNN trained on synthetic ones only, for a fixed number of epochs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_dpgan.config import EvaluationConfig
from fl_dpgan.training.generator import draw


def classifier(channels: int, size: int, num_classes: int) -> nn.Module:
    """A small CNN: two convolutions of 32 and 64 channels, each halved by max pooling, and one hidden layer of 128."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes),
    )  # fmt: skip


def train_classifier(
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    epochs: int,
    seed: int,
    on_epoch: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train the CNN with Adam (1e-3, batches of 128). The length is fixed: no epoch is chosen by looking at test data.

    Args:
        images: (n, channels, size, size) in [-1, 1]. labels: (n,).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classifier(images.shape[1], images.shape[2], num_classes).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(labels)), 128):
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            on_epoch()
    return model.eval()


def classifier_of(
    generator: nn.Module, settings: EvaluationConfig, *, seed: int, on_epoch: Callable[[], None] = lambda: None
) -> nn.Module:
    """The CNN trained on `settings.images` images drawn from this generator, all classes in equal numbers."""
    num_classes = int(generator.num_classes)  # type: ignore[arg-type]
    labels = torch.arange(settings.images) % num_classes
    images = draw(generator, labels, seed=seed + 2)
    return train_classifier(images, labels, num_classes, epochs=settings.epochs, seed=seed, on_epoch=on_epoch)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of correctly classified images, in [0, 1]."""
    with torch.no_grad():
        parts = [model(images[i : i + 1000]).argmax(1) for i in range(0, len(labels), 1000)]
    return float((torch.cat(parts) == labels).double().mean())
