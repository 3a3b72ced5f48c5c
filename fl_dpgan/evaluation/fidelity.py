"""Fidelity and diversity: how close synthetic images are to real ones, in the features of a CNN trained on real ones.

The features stand in for Inception's, whose weights are not ours to ship and which never saw an X-ray or a digit. So
these figures can be compared with one another, and not with those of papers.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_dpgan.data import ImageData, to_tensor
from fl_dpgan.evaluation.utility import FEATURES, outputs

IMAGES = 10_000  # compared at most
NEIGHBOURS = 3  # k of precision and recall
FEWEST = NEIGHBOURS + 1  # images of a class
KID_SUBSETS = 20
KID_SUBSET = 1_000  # images in each, and at most half of those at hand
#: How each measure is taken, in words.
SETTINGS = {
    "kid": f"mean over {KID_SUBSETS} subsets of at most {KID_SUBSET} images (half of those at hand)",
    "precision and recall": f"k = {NEIGHBOURS} neighbours",
    "fid": f"given where there are more images than the {FEATURES} features, so that covariances have full rank",
}


def features_by_class(cnn: nn.Sequential, data: ImageData, most: int) -> list[Tensor]:
    """The CNN's penultimate layer for the first `most` images of each class: (n, FEATURES) per class.

    Over all classes they are no more than `IMAGES`.
    """
    body = cnn[:-2]  # without dropout and the last layer
    most = min(most, max(FEWEST, IMAGES // len(data.classes)))
    chosen = [np.flatnonzero(data.labels == label)[:most] for label in range(len(data.classes))]
    return [outputs(body, to_tensor(data.images[rows])).double() for rows in chosen]


def compare(fake: Sequence[Tensor], real: Sequence[Tensor], *, seed: int) -> dict[str, Any]:
    """All measures over all classes and for each class, on equally many images of a class from either side.

    Equal numbers matter: FID's bias depends on them, and classes in other proportions would count as a distance.

    Args:
        fake, real: features (n, d) per class, `FEWEST` images each or more.
    """
    pairs = []
    for one, other in zip(fake, real, strict=True):
        count = min(len(one), len(other))
        pairs.append((one[:count], other[:count]))
    classes = [_measures(one, other, seed) | {"diversity": diversity(one, other)} for one, other in pairs]
    spread = [row["diversity"] for row in classes]
    overall = _measures(torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs]), seed)
    return {
        **overall,
        "diversity_min": min(spread),
        "diversity_mean": float(np.mean(spread)),
        "per_class": classes,
    }


def _measures(fake: Tensor, real: Tensor, seed: int) -> dict[str, Any]:
    precision, recall = precision_recall(fake, real)
    mean, deviation = kid(fake, real, seed=seed)
    distance = fid(fake, real) if len(real) > real.shape[1] else None
    return {
        "images": len(real),
        "fid": distance,
        "kid": mean,
        "kid_std": deviation,
        "precision": precision,
        "recall": recall,
    }


def fid(fake: Tensor, real: Tensor) -> float:
    """Frechet distance between Gaussians fitted to the features (Heusel et al., arXiv 1706.08500, equation 6)."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(_Given(real.shape[1]), normalize=True)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return float(metric.compute())


def kid(fake: Tensor, real: Tensor, *, seed: int) -> tuple[float, float]:
    """Squared MMD with a cubic kernel, unbiased, and its deviation over subsets (Binkowski et al., arXiv 1801.01401).

    Section 4 there. Around 0 for two samples of one distribution, where it can be negative.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that it keeps the features
        torch.manual_seed(seed)
        size = min(KID_SUBSET, len(real) // 2)
        metric = KernelInceptionDistance(_Given(real.shape[1]), subsets=KID_SUBSETS, subset_size=size)
        metric.update(real, real=True)
        metric.update(fake, real=False)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def precision_recall(fake: Tensor, real: Tensor) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al., arXiv 1904.06991, section 2).

    Precision: the share of fakes within some real image's ball, which reaches to its k-th nearest real neighbour.
    Recall: the share of reals within some fake's ball.
    """
    return _covered(fake, real), _covered(real, fake)


def diversity(fake: Tensor, real: Tensor) -> float:
    """Mean distance between two fakes over that between two reals: 0 for one image, 1 for as diverse as real ones.

    Fakes that are unlike any real image can be further apart than reals, so read it beside the precision.
    """
    return float(torch.pdist(fake).mean() / torch.pdist(real).mean())


def _covered(points: Tensor, centres: Tensor) -> float:
    """The share of points within the ball of at least one centre."""
    from sklearn.neighbors import NearestNeighbors

    distances, _ = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(centres.numpy()).kneighbors()  # leaves out the centre
    radii = torch.from_numpy(distances[:, -1])
    return float(
        torch.cat([(torch.cdist(p, centres) <= radii).any(1) for p in torch.split(points, 1000)]).double().mean()
    )


class _Given(nn.Module):
    """Stands where torchmetrics wants a feature network: what it gets are features already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features
