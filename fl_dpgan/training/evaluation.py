"""A site's answer to "how good is this generator on your data": one noised count, a Gaussian mechanism."""

import torch
from torch import nn

from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.training.records import Records


def noised_count(classifier: nn.Module, data: Records, event: Event, random: KeyedGenerator) -> float:
    """How many units the classifier gets right, less half of all units, plus noise. The caller has charged `event`.

    Every unit contributes 1/2 or -1/2 (a patient through one image, drawn uniformly), so adding or removing one moves
    the sum by 1/2, and noise of standard deviation sigma / 2 makes it a Gaussian mechanism of noise multiplier sigma.

    Args:
        classifier: called as `classifier(images)`, gives logits (n, classes); trained on synthetic images alone.
        event: an `evaluation_count` with q = 1.
    """
    everyone = torch.arange(len(data.units)).numpy()
    chosen = data.units.records(everyone, random)
    classifier.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(chosen), 512):
            images, labels = data.batch(chosen[start : start + 512])
            # one at a time: rounding depends on what else is in a batch, and may decide between two classes
            answers = torch.cat([classifier(image).argmax(dim=1) for image in images.split(1)])
            right += int((answers == labels).sum())
    noised = right - len(chosen) / 2 + event.noise_multiplier / 2 * float(random.normal(1)[0])
    grid = event.noise_multiplier / 1024  # the lowest bits of a sum of floats can tell what was added
    return round(noised / grid) * grid
