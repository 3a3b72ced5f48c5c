"""The server's use of a moment release: the classes' mean features, and a loss that draws G's towards them."""

import torch
from torch import Tensor, nn

from fl_dpgan.config import Plan
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.training.generator import draw

#: A class counts where its noised count is so many standard deviations of its noise above zero.
_SEEN = 5.0


def class_means(sums: Tensor, count_weight: float, noise_sd: float) -> tuple[Tensor, Tensor]:
    """Mean features of each class from noised sums.

    Args:
        sums: (classes, length + 1), added up over the sites. count_weight: what one unit adds to the last column.
        noise_sd: standard deviation of the noise in each number.

    Returns:
        Means (classes, length) in single precision, and which classes (classes,) have a count that stands out of the
        noise; the others' means are zero.
    """
    counts = sums[:, -1]
    seen = counts > _SEEN * noise_sd
    means = sums[:, :-1] / torch.where(seen, counts / count_weight, 1.0)[:, None]
    return torch.where(seen[:, None], means, 0.0).float(), seen


class MomentMatching(nn.Module):
    """Half the gradient of |target - mean features of G|^2, summed over the classes, as a loss for G.

    The difference is taken from a running mean over G's last batches, not from the batch at hand: the square of a
    batch's own difference is biased, and rewards a G whose images differ less (Gretton et al., JMLR 13, 2012, lemma 6);
    and a running mean is less noisy. So the loss is linear in the batch's features, as with a critic. The running mean
    forgets by images, not by batches: small batches, of which G can have more, do not make it noisier.

    Args:
        features: the release's map. classes: how many there are. decay: an earlier image's weight in the running mean
            of its class after each further image of that class, in [0, 1).

    Attributes:
        shape: of the sums that a site releases.
    """

    def __init__(self, features: FeatureMap, classes: int, *, decay: float = 0.99) -> None:
        super().__init__()
        self.shape = (classes, features.length + 1)
        self._features, self._decay = features, decay
        self.target: Tensor
        self.seen: Tensor
        self.mean: Tensor
        self.weight: Tensor  # of all batches so far in the running mean: less than 1 at first
        self.register_buffer("target", torch.zeros(classes, features.length))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(classes, features.length))
        self.register_buffer("weight", torch.zeros(classes))

    def aim(self, sums: Tensor, noise_sd: float) -> None:
        """Take noised sums (`shape`), added up over the sites, with noise of this standard deviation in each number."""
        target, seen = class_means(sums, self._features.count_weight, noise_sd)
        self.target.copy_(target)
        self.seen.copy_(seen)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of images (n, channels, size, size) of G with labels (n,); the running mean moves on."""
        classes, _ = self.target.shape
        members = nn.functional.one_hot(labels, classes).to(images.dtype)
        counts = members.sum(0)
        means = members.T @ self._features(images) / counts.clamp(min=1)[:, None]
        # the running mean of earlier batches; in a class's first there is none, and it stands for itself
        before = torch.where(self.weight[:, None] > 0, self.mean / self.weight.clamp(min=1e-9)[:, None], means.detach())
        difference = (self.target - before) * self.seen[:, None]
        share = 1 - self._decay**counts
        self.mean = self.mean + share[:, None] * (means.detach() - self.mean)
        self.weight = self.weight + share * (1 - self.weight)
        loss: Tensor = -(difference * means).sum() / self.seen.sum().clamp(min=1)
        return loss


def matching_of(plan: Plan, generator: nn.Module) -> MomentMatching | None:
    """What G will be trained on once the moments of this plan are released; None where it asks for none."""
    moments = plan.privacy.moments
    if moments is None:
        return None
    shape = tuple(draw(generator.eval(), torch.zeros(1, dtype=torch.int64), seed=0).shape[1:])
    classes = int(generator.num_classes)  # type: ignore[arg-type]
    device = next(generator.parameters()).device
    return MomentMatching(FeatureMap(moments.features, shape), classes).to(device)
