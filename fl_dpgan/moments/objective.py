"""What G is trained on with a moment release: the classes' moments, and the classifier that follows from them."""

import torch
from torch import Tensor, nn

from fl_dpgan.config import Plan
from fl_dpgan.moments.discriminant import Discriminant
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.matching import MomentMatching, class_means
from fl_dpgan.training.generator import draw


class MomentObjective(nn.Module):
    """A loss for G. All that it knows of real images is one release, so its use costs no budget.

    Args:
        features: the release's map. classes: how many there are.
        guidance: weight of the classifier's cross-entropy beside the moments; 0 for none.

    Attributes:
        shape: of the sums that a site releases.

    Raises:
        ConfigError: guidance is asked for, and the release has no second moments.
    """

    def __init__(self, features: FeatureMap, classes: int, *, guidance: float) -> None:
        super().__init__()
        self.shape = (classes, features.length + 1)
        self._count_weight, self._guidance = features.count_weight, guidance
        self.matching = MomentMatching(features, classes)
        self.discriminant = Discriminant(features, classes) if guidance else None

    def aim(self, sums: Tensor, noise_sd: float) -> None:
        """Take noised sums (`shape`), added up over the sites, with noise of this standard deviation in each number."""
        means, seen = class_means(sums, self._count_weight, noise_sd)
        counts = (sums[:, -1] / self._count_weight).float()
        means, seen, counts = (tensor.to(self.matching.target.device) for tensor in (means, seen, counts))
        self.matching.aim(means, seen)
        if self.discriminant is not None:
            self.discriminant.fit(means, seen, counts, noise_sd)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of images (n, channels, size, size) of G with labels (n,)."""
        loss: Tensor = self.matching(images, labels)
        if self.discriminant is not None:
            loss = loss + self._guidance * self.discriminant(images, labels)
        return loss


def objective_of(plan: Plan, generator: nn.Module) -> MomentObjective | None:
    """What G will be trained on once the moments of this plan are released; None where it asks for none."""
    moments = plan.privacy.moments
    if moments is None:
        return None
    device = next(generator.parameters()).device
    shape = tuple(draw(generator.eval(), torch.zeros(1, dtype=torch.int64), seed=0).shape[1:])
    classes = int(generator.num_classes)  # type: ignore[arg-type]
    features = FeatureMap(moments.features, shape)
    return MomentObjective(features, classes, guidance=plan.matching.guidance).to(device)
