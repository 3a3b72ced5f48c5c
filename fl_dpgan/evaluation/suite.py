"""The full evaluation of a generator: utility, fidelity and robustness, each beside the same figure of real images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_dpgan.config import EvaluationConfig
from fl_dpgan.data import ImageData
from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.evaluation import fidelity, robustness, utility

STEPS = ("svm", "mlp", "cnn", "fidelity", "robustness")  # of a reference, and of a generator's evaluation

OnStep = Callable[[str], None]

#: Section of the result, key, name, what it is.
MEASURES = (
    ("utility", "mean_accuracy", "accuracy, mean", "mean of the next three, on the real test images"),
    ("utility", "svm_accuracy", "accuracy, SVM", utility.SETTINGS["svm"]),
    ("utility", "mlp_accuracy", "accuracy, MLP", utility.SETTINGS["mlp"]),
    ("utility", "cnn_accuracy", "accuracy, CNN", utility.SETTINGS["cnn"]),
    ("utility", "mean_auc", "AUC, mean", "area under the ROC curve of the decision scores, mean of the next three"),
    ("utility", "svm_auc", "AUC, SVM", ""),
    ("utility", "mlp_auc", "AUC, MLP", ""),
    ("utility", "cnn_auc", "AUC, CNN", ""),
    ("fidelity", "fid", "FID", "Frechet distance of features (arXiv 1706.08500); 0 is best"),
    ("fidelity", "kid", "KID", f"squared MMD of features (arXiv 1801.01401), {fidelity.SETTINGS['kid']}; 0 is best"),
    ("fidelity", "precision", "precision",
     f"share of synthetic images among real ones, k = {fidelity.NEIGHBOURS} (arXiv 1904.06991)"),
    ("fidelity", "recall", "recall", f"share of real images among synthetic ones, k = {fidelity.NEIGHBOURS}"),
    ("fidelity", "diversity_min", "diversity, least",
     "mean distance of two synthetic images of a class over that of two real ones, least class; 0 is one image"),
    ("fidelity", "diversity_mean", "diversity, mean", "the same, mean over classes"),
    ("robustness", "fgsm_success", "ASR, FGSM",
     f"share of the CNN's correct answers that FGSM flips (arXiv 1412.6572), {robustness.SETTINGS['fgsm']}"),
    ("robustness", "pgd_success", "ASR, PGD", f"the same with PGD (arXiv 1706.06083), {robustness.SETTINGS['pgd']}"),
)  # fmt: skip


@dataclass(frozen=True)
class RealReference:
    """What does not depend on the generator, built once for many: what real images reach, and the feature network.

    Attributes:
        test: real images that neither a generator nor `cnn` has seen, in a random order.
        cnn: trained on real training images; its penultimate layer gives the features.
        features: of the test images, (n, FEATURES) per class.
        figures: those of real training images, in the same keys as a generator's.
    """

    test: ImageData
    cnn: nn.Sequential
    features: list[Tensor]
    figures: dict[str, dict[str, Any]]

    @classmethod
    def build(
        cls,
        train: ImageData,
        test: ImageData,
        settings: EvaluationConfig,
        *,
        seed: int,
        on_step: OnStep = lambda step: None,
    ) -> "RealReference":
        """Train on as many real images as a generator is asked for (all of them where there are fewer).

        Fidelity of training against test images is that of images which the CNN has not seen, as far as there are any.

        Args:
            test: the real images to test on; any others than `train`. on_step: told of each of `STEPS` as it begins.

        Raises:
            ConfigError, DataError: too few images of a class for a figure.
        """
        per_class = settings.images // len(test.classes)
        if per_class < fidelity.FEWEST:
            raise ConfigError(
                f"evaluation.images = {settings.images} is too few for {len(test.classes)} classes; "
                f"set it to at least {fidelity.FEWEST * len(test.classes)}"
            )
        train, test = _shuffled(train, seed), _shuffled(test, seed)
        learnt = train.subset(np.arange(min(settings.images, len(train))))
        _check_classes(learnt, "training")
        _check_classes(test, "test")
        cnn, useful = utility.utility(learnt, test, epochs=settings.epochs, seed=seed, on_step=on_step)
        on_step("fidelity")
        features = fidelity.features_by_class(cnn, test, per_class)
        last = train.subset(np.arange(len(train))[::-1])
        close = fidelity.compare(fidelity.features_by_class(cnn, last, per_class), features, seed=seed)
        on_step("robustness")
        robust = robustness.robustness(cnn, test)
        return cls(test, cnn, features, {"utility": useful, "fidelity": close, "robustness": robust})


def evaluate_generator(
    generator: nn.Module,
    reference: RealReference,
    settings: EvaluationConfig,
    *,
    seed: int,
    on_step: OnStep = lambda step: None,
) -> dict[str, Any]:
    """Every figure of a generator, with those of real images under `real`; JSON-able, None where one is not defined.

    Args:
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.
        settings: those of the reference. on_step: told of each of `STEPS` as it begins.

    Raises:
        ConfigError: the generator has other classes than the real images.
    """
    test = reference.test
    if generator.num_classes != len(test.classes):
        raise ConfigError(
            f"the generator has {generator.num_classes} classes and the real images have {len(test.classes)}; "
            "give the data that it was trained on"
        )
    images = utility.synthetic_images(generator, settings.images, test.classes, seed=seed + 2)
    cnn, useful = utility.utility(images, test, epochs=settings.epochs, seed=seed, on_step=on_step)
    on_step("fidelity")
    features = fidelity.features_by_class(reference.cnn, images, settings.images // len(test.classes))
    close = fidelity.compare(features, reference.features, seed=seed)
    on_step("robustness")
    robust = robustness.robustness(cnn, test)
    return {
        "utility": useful,
        "fidelity": close,
        "robustness": robust,
        "real": reference.figures,
        "settings": {
            **utility.SETTINGS,
            "cnn epochs": settings.epochs,
            "features": f"penultimate layer of a CNN trained on {reference.figures['utility']['images']} images of "
            "the real training set; comparable within this project only",
            **fidelity.SETTINGS,
            **robustness.SETTINGS,
        },
    }


def _shuffled(data: ImageData, seed: int) -> ImageData:
    """The images in a random order of which each stretch has the classes in the same proportions as the whole."""
    order = np.random.default_rng(seed).permutation(len(data))
    place: NDArray[np.float64] = np.empty(len(data))
    for label in np.unique(data.labels):
        rows = np.flatnonzero(data.labels[order] == label)
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return data.subset(order[np.argsort(place, kind="stable")])


def _check_classes(data: ImageData, name: str) -> None:
    for label, count in enumerate(np.bincount(data.labels, minlength=len(data.classes)).tolist()):
        if count < fidelity.FEWEST:
            raise DataError(
                f"class {data.classes[label]} has {count} of the {len(data)} {name} images in use, and the full suite "
                f"needs {fidelity.FEWEST}; use --suite quick, or more images"
            )
