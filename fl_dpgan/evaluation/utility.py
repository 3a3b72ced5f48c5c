"""Utility: the accuracy on real images of classifiers trained on synthetic ones only, always for the same length."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_dpgan.config import EvaluationConfig
from fl_dpgan.data import ImageData, to_tensor
from fl_dpgan.report.synthetic import to_pixels
from fl_dpgan.training.generator import draw

FEATURES = 128  # width of the CNN's hidden layer
SVM_IMAGES = 5_000  # with 10,000 it alone would take half of the suite's time
SVM_C = 1.0
MLP_HIDDEN = 100
MLP_EPOCHS = 20
#: How each classifier is trained, in words.
SETTINGS = {
    "svm": f"radial kernel, C = {SVM_C:g}, gamma = 1 / (pixels x their variance), at most {SVM_IMAGES} images",
    "mlp": f"one hidden layer of {MLP_HIDDEN}, Adam (1e-3, batches of 200), {MLP_EPOCHS} epochs",
    "cnn": f"two convolutions (32, 64), one hidden layer of {FEATURES}, Adam (1e-3, batches of 128)",
}


def classifier(channels: int, size: int, num_classes: int) -> nn.Sequential:
    """A small CNN: two convolutions of 32 and 64 channels, each halved by max pooling, and one hidden layer of 128."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, FEATURES), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(FEATURES, num_classes),
    )  # fmt: skip


def train_classifier(
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    epochs: int,
    seed: int,
    layout: torch.memory_format = torch.contiguous_format,
    on_epoch: Callable[[], None] = lambda: None,
) -> nn.Sequential:
    """Train the CNN with Adam (1e-3, batches of 128). The length is fixed: no epoch is chosen by looking at test data.

    Args:
        images: (n, channels, size, size) in [-1, 1]. labels: (n,). layout: of the weights in memory.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classifier(images.shape[1], images.shape[2], num_classes).to(memory_format=layout).train()
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


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """What the network gives for each image, (n, outputs), without gradients and 1,000 images at a time."""
    with torch.no_grad():
        return torch.cat([model(part) for part in torch.split(images, 1000)])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of correctly classified images, in [0, 1]."""
    return float((outputs(model, images).argmax(1) == labels).double().mean())


def synthetic_images(generator: nn.Module, count: int, classes: tuple[str, ...], *, seed: int) -> ImageData:
    """Draw images in the 8-bit pixels of an export, all classes in equal numbers: `count`, rounded down to that."""
    labels = torch.arange(count - count % len(classes)) % len(classes)
    pixels = to_pixels(draw(generator, labels, seed=seed))
    return ImageData(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels.numpy(), classes)


def utility(
    train: ImageData,
    test: ImageData,
    *,
    epochs: int,
    seed: int,
    on_step: Callable[[str], None] = lambda step: None,
) -> tuple[nn.Sequential, dict[str, float]]:
    """Train an SVM, an MLP and a CNN on `train`, test them on `test`.

    Esteban et al., arXiv 1706.02633, "Train on Synthetic, Test on Real". The headline is the mean of the
    three. For two classes there is also the area under the ROC curve (AUC) of each one's decision scores.

    Args:
        train: every class is in it. An SVM takes the first `SVM_IMAGES`. epochs: of the CNN.

    Returns:
        The CNN, and `<classifier>_accuracy` (and `<classifier>_auc`) with `mean` for the mean over classifiers.
    """
    vectors, targets = _vectors(test), test.labels
    found: dict[str, float] = {}
    for name, model, most in _library_classifiers(len(train), seed):
        on_step(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a fixed length of training is not convergence
            model.fit(_vectors(train)[:most], train.labels[:most])
        found[f"{name}_accuracy"] = float((model.predict(vectors) == targets).mean())
        if len(train.classes) == 2:
            scores = model.decision_function(vectors) if name == "svm" else model.predict_proba(vectors)[:, 1]
            found[f"{name}_auc"] = _auc(targets, scores)
    on_step("cnn")
    labels = torch.from_numpy(train.labels)
    cnn = train_classifier(
        to_tensor(train.images), labels, len(train.classes), epochs=epochs, seed=seed,
        layout=torch.channels_last,  # takes half the time on a CPU
    )  # fmt: skip
    logits = outputs(cnn, to_tensor(test.images)).numpy()
    found["cnn_accuracy"] = float((logits.argmax(1) == targets).mean())
    if len(train.classes) == 2:
        found["cnn_auc"] = _auc(targets, logits[:, 1] - logits[:, 0])
    for kind in ("accuracy", "auc") if len(train.classes) == 2 else ("accuracy",):
        found[f"mean_{kind}"] = float(np.mean([found[f"{name}_{kind}"] for name in SETTINGS]))
    return cnn, {"images": len(train), **found}


def _library_classifiers(count: int, seed: int) -> list[tuple[str, Any, int]]:
    """scikit-learn's classifiers: name, unfitted, and how many images it takes."""
    from sklearn.neural_network import MLPClassifier  # takes a second, which a site's process need not spend
    from sklearn.svm import SVC

    # Left alone, the MLP stops when its loss stalls; so many epochs of patience make its length fixed.
    mlp = MLPClassifier((MLP_HIDDEN,), max_iter=MLP_EPOCHS, n_iter_no_change=MLP_EPOCHS, random_state=seed)
    return [("svm", SVC(C=SVM_C, gamma="scale"), min(count, SVM_IMAGES)), ("mlp", mlp, count)]


def _vectors(data: ImageData) -> NDArray[np.float32]:
    """(n, pixels) in [0, 1]."""
    return data.images.reshape(len(data), -1).astype(np.float32) / np.float32(255)


def _auc(labels: NDArray[np.int64], scores: NDArray[Any]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))
