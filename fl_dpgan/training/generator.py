"""The server's part: generator steps on a loss of fakes, and draws. No real image is within reach."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

#: Of fakes (n, channels, size, size) and their labels (n,): a number that G makes small.
Loss = Callable[[Tensor, Tensor], Tensor]


def adversarial(discriminator: nn.Module) -> Loss:
    """The non-saturating loss (Goodfellow et al., arXiv 1406.2661, section 3) against a D that stays as it is."""
    discriminator.eval()
    state = {name: tensor.detach() for name, tensor in discriminator.state_dict().items()}

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = functional_call(discriminator, state, (images, labels))
        return softplus(-logits).mean()

    return loss


def cosine(step: int, steps: int, rate: float) -> float:
    """The learning rate at `step` (0-based) of `steps`: up within 20 steps, then along a cosine to a 20th of `rate`."""
    return rate * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


class GeneratorTrainer:
    """Keeps G, its optimiser and an exponential moving average (EMA) of G.

    Args:
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.
        ema_decay: weight of the past in the EMA, in [0, 1).
    """

    def __init__(self, generator: nn.Module, *, ema_decay: float) -> None:
        self.generator = generator
        self.average = copy.deepcopy(generator).eval().requires_grad_(False)
        self._decay = ema_decay
        self.restart()

    def restart(self) -> None:
        """Begin with a new optimiser: G's loss is another from here on."""
        self.optimizer = torch.optim.Adam(self.generator.parameters(), betas=(0.5, 0.99))

    def preview(self, *, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """The images and labels of `update`'s first step with this seed; G stays as it is, its buffers too."""
        generator = self.generator.train()
        z, labels = self._batch(batch_size, torch.Generator().manual_seed(seed))
        buffers = {name: buffer.clone() for name, buffer in generator.named_buffers()}
        with torch.no_grad():
            return functional_call(generator, buffers, (z, labels)), labels

    def update(self, loss: Loss, rates: Sequence[float], *, batch_size: int, seed: int) -> float:
        """Take a step on `loss` at each of these learning rates, with every class as often as the others.

        Returns:
            The last step's loss, a number about fakes alone.
        """
        generator = self.generator.train()
        random = torch.Generator().manual_seed(seed)
        value = torch.zeros(())
        for rate in rates:
            z, labels = self._batch(batch_size, random)
            value = loss(generator(z, labels), labels)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad(set_to_none=True)
            value.backward()
            self.optimizer.step()
            self._average()
        return float(value.detach())

    def _batch(self, size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        generator, device = self.generator, next(self.generator.parameters()).device
        latent_dim, num_classes = int(generator.latent_dim), int(generator.num_classes)  # type: ignore[arg-type]
        z = torch.randn(size, latent_dim, generator=random).to(device)
        first = int(torch.randint(num_classes, (), generator=random))  # small batches take the classes in turn
        return z, ((torch.arange(size) + first) % num_classes).to(device)

    def _average(self) -> None:
        with torch.no_grad():
            for mean, new in zip(self.average.state_dict().values(), self.generator.state_dict().values(), strict=True):
                if mean.is_floating_point():
                    mean.lerp_(new, 1 - self._decay)
                else:
                    mean.copy_(new)


def draw(generator: nn.Module, labels: Tensor, *, seed: int) -> Tensor:
    """One image per label, (n, channels, size, size) in [-1, 1], in the CPU's memory wherever G is."""
    random = torch.Generator().manual_seed(seed)
    device = next(generator.parameters()).device
    z = torch.randn(len(labels), int(generator.latent_dim), generator=random).to(device)  # type: ignore[arg-type]
    labels = labels.to(device)
    with torch.no_grad():
        return torch.cat([generator(z[i : i + 512], labels[i : i + 512]).cpu() for i in range(0, len(labels), 512)])
