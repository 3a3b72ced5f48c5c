"""The server's part: generator steps against the averaged discriminator, and draws. No real image is within reach."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class GeneratorTrainer:
    """Keeps G, its optimiser and an exponential moving average (EMA) of G.

    Args:
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.
        learning_rate, batch_size: of the G steps. ema_decay: weight of the past in the EMA, in [0, 1).
    """

    def __init__(self, generator: nn.Module, *, learning_rate: float, batch_size: int, ema_decay: float) -> None:
        self.generator = generator
        self.average = copy.deepcopy(generator).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(generator.parameters(), lr=learning_rate, betas=(0.5, 0.99))
        self._batch_size, self._decay = batch_size, ema_decay

    def update(self, discriminator: nn.Module, steps: int, *, seed: int) -> float:
        """Take `steps` steps on the non-saturating loss (Goodfellow et al., arXiv 1406.2661, section 3).

        Returns:
            The last step's loss, a number about fakes alone.
        """
        generator, device = self.generator, next(self.generator.parameters()).device
        random = torch.Generator().manual_seed(seed)
        latent_dim, num_classes = int(generator.latent_dim), int(generator.num_classes)  # type: ignore[arg-type]
        generator.train()
        discriminator.eval().requires_grad_(False)
        loss = torch.zeros(())
        for _ in range(steps):
            z = torch.randn(self._batch_size, latent_dim, generator=random).to(device)
            labels = torch.randint(num_classes, (self._batch_size,), generator=random).to(device)
            loss = softplus(-discriminator(generator(z, labels), labels)).mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self._average()
        discriminator.requires_grad_(True)
        return float(loss.detach())

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
