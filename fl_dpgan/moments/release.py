"""A site's moment release: noised sums of its units' features, class by class, one Gaussian mechanism."""

import torch
from torch import Tensor

from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.noise import KeyedGenerator, noised
from fl_dpgan.training.records import Records


def noised_sums(features: FeatureMap, data: Records, num_classes: int, event: Event, random: KeyedGenerator) -> Tensor:
    """For each class the sum of its units' vectors (features, weighted count of 1), plus noise.

    The caller has charged `event`. A unit (a patient through one image, drawn uniformly) adds one vector of norm at
    most 1 to one class's row, so adding or removing it moves the whole by at most 1 (Harder, Adamczewski, Park, arXiv
    2002.11603, section 4, with the relation add/remove), and noise of standard deviation sigma on each number makes it
    a Gaussian mechanism of noise multiplier sigma.

    Args:
        features: of `length` numbers. event: a `moment_release` with q = 1.

    Returns:
        (num_classes, length + 1) in double precision; the last column is the weighted count.
    """
    chosen = data.units.records(torch.arange(len(data.units)).numpy(), random)
    sums = torch.zeros(num_classes, features.length + 1, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(chosen), 128):
            images, labels = data.batch(chosen[start : start + 128])
            # one at a time: how a kernel rounds depends on what else is in a batch, and where a small difference
            # decides (the cosine of a large angle), one record would change what another adds
            vectors = torch.cat([unit_vectors(features, image) for image in images.split(1)])
            sums.index_add_(0, labels.cpu(), vectors.cpu())
    return noised(sums, event.noise_multiplier, random)


def unit_vectors(features: FeatureMap, images: Tensor) -> Tensor:
    """Each image's features and weighted count, (n, length + 1) in double precision, of norm at most 1.

    A vector that is not finite counts as zero: whether and how a site answers must not depend on a record.
    """
    found = features(images).double()
    weights = found.new_full((len(found), 1), features.count_weight)
    vectors = torch.cat([found, weights], dim=1)
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    bounded = vectors / norms.clamp(min=1.0)  # rounding alone can have made them longer
    return torch.where(torch.isfinite(norms), bounded, 0.0)
