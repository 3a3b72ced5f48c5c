"""The networks that a site trains with, checked once; sites that share a process share them."""

import copy

import torch
from torch import nn

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.engines import fastest
from fl_dpgan.privacy.gradients import check_separable, mixes_samples


class Models:
    """Copies of a federation's networks, of which only the shapes matter: every request brings its own weights.

    Args:
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`, gives images
            (n, channels, size, size).
        discriminator: called as `discriminator(images, labels)`, gives logits (n,).
        classifier: called as `classifier(images)`, gives logits (n, classes); takes part in evaluation counts.
        device: where they work.

    Attributes:
        initial_discriminator: D as it was given, which no request changes.
        num_classes: labels that the federation has. image_shape: (channels, size, size). device: where they are.
        engine: makes what sums D's clipped gradients.

    Raises:
        ConfigError: the discriminator or the classifier mixes samples, or D cannot be trained privately.
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        classifier: nn.Module | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.generator = copy.deepcopy(generator).to(device)
        self.discriminator = copy.deepcopy(discriminator).to(device)
        self.initial_discriminator = copy.deepcopy(self.discriminator)
        self.classifier = copy.deepcopy(classifier).to(device) if classifier else None
        self.num_classes = int(generator.num_classes)  # type: ignore[arg-type]
        labels = torch.zeros(2, dtype=torch.int64, device=device)
        with torch.no_grad():
            z = torch.zeros(2, int(generator.latent_dim), device=device)  # type: ignore[arg-type]
            image = self.generator.eval()(z, labels)[0]
        self.image_shape, self.device = tuple(image.shape), image.device
        probe = torch.linspace(-1, 1, 2 * image.numel(), device=device).view(2, *image.shape)
        check_separable(self.discriminator, probe, labels)
        self.engine = fastest(self.discriminator, probe, labels)
        if self.classifier and mixes_samples(self.classifier.eval(), probe):
            raise ConfigError("the classifier's output for one image depends on another; use another classifier")
