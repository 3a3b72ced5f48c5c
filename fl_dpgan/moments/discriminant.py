"""A classifier that follows from a moment release alone: quadratic discriminants of the low frequencies.

Released second moments E[u u^T] of each class, of vectors u of norm 1, describe a Gaussian of mean zero for each class;
Bayes' rule between them (Bishop, "Pattern Recognition and Machine Learning", section 4.2) is post-processing. G is
drawn towards images that it puts into their own class.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_dpgan.moments.features import FeatureMap

#: Scores are divided by it: Gaussians of low frequencies are too sure of themselves.
_TEMPERATURE = 2.0
#: The least variance along a direction, as a share of the largest possible one.
_LEAST = 1e-4


class Discriminant(nn.Module):
    """Scores of images under each class's Gaussian, and the cross-entropy that draws G's images into their classes.

    Args:
        features: the release's map, with a part of second moments. classes: how many there are.

    Raises:
        ConfigError: the release has no second moments.
    """

    def __init__(self, features: FeatureMap, classes: int) -> None:
        super().__init__()
        self._part, self._place, self._weight = features.second_moments()
        side = self._part.side
        self.precision: Tensor
        self.offset: Tensor
        self.register_buffer("precision", torch.zeros(classes, side, side))
        self.seen: Tensor
        self.register_buffer("offset", torch.zeros(classes))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))

    def fit(self, means: Tensor, seen: Tensor, counts: Tensor, noise_sd: float) -> None:
        """Take the Gaussians from the classes' mean features.

        A direction in which a class varies by less than the noise has an eigenvalue that says nothing; it is taken to
        be of three standard deviations of the noise in a matrix's entry.

        Args:
            means: (classes, length). seen: classes (classes,) that take part; the others never win.
            counts: units of each class (classes,), as released. noise_sd: of each of the release's numbers.
        """
        self.seen.copy_(seen)
        for label in torch.nonzero(seen).flatten().tolist():
            moments = self._part.matrix(means[label, self._place] / self._weight).double()
            spread = noise_sd / float(counts[label]) / self._weight / math.sqrt(2)
            values, vectors = torch.linalg.eigh(moments)
            values = values.clamp(min=max(_LEAST, 3 * spread))
            self.precision[label] = ((vectors / values) @ vectors.T).float()
            self.offset[label] = -0.5 * float(values.log().sum())

    def scores(self, images: Tensor) -> Tensor:
        """Log-likelihoods (n, classes) of images (n, channels, size, size) in [-1, 1], up to a common constant."""
        u = self._part.directions((images + 1) / 2)
        found = self.offset - 0.5 * torch.einsum("ni,cij,nj->nc", u, self.precision, u)
        return torch.where(self.seen, found, -1e6)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the scores with the labels (n,), over those images whose class takes part."""
        losses = cross_entropy(self.scores(images) / _TEMPERATURE, labels, reduction="none")
        part = self.seen[labels]
        mean: Tensor = torch.where(part, losses, 0.0).sum() / part.sum().clamp(min=1)
        return mean
