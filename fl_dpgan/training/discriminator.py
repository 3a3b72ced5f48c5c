"""A site's local update: DP-SGD steps on the discriminator, each one Poisson-subsampled Gaussian mechanism.

Bie, Kamath, Zhang, "Private GANs, Revisited" (arXiv 2302.02936), section 3: exactly B fakes join the Poisson sample of
reals in one per-sample gradient pass, every sample is clipped by itself, the sum is noised once, the divisor is 2B.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fl_dpgan.privacy.clipping import ClippingRule, Quantile
from fl_dpgan.privacy.engines import Engine, OpacusEngine
from fl_dpgan.privacy.noise import KeyedGenerator, noised
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.records import Records

#: Fakes of one pass of G, if a D step does not take more.
_FAKES = 256


def draw_fakes(generator: nn.Module, count: int, random: KeyedGenerator) -> tuple[Tensor, Tensor]:
    """`count` images from G in evaluation mode, with z and labels from the public prior.

    Args:
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.

    Returns:
        Images (count, channels, size, size) and labels (count,).
    """
    device = next(generator.parameters()).device
    latent_dim, num_classes = int(generator.latent_dim), int(generator.num_classes)  # type: ignore[arg-type]
    z = torch.from_numpy(random.normal(count * latent_dim)).float().view(count, latent_dim).to(device)
    labels = torch.from_numpy(random.integers(count, num_classes)).to(device)
    generator.eval()
    with torch.no_grad():
        return generator(z, labels), labels


def summed_gradient(
    engine: Engine,
    reals: tuple[Tensor, Tensor],
    fakes: tuple[Tensor, Tensor],
    clipping_norm: float,
    rule: ClippingRule,
) -> tuple[list[Tensor], float]:
    """Sum over all samples of the clipped gradient of the loss on D; adding or removing one real moves it by at most C.

    Args:
        reals, fakes: images (n, channels, size, size) and labels (n,); n may be 0 for the reals.
        rule: says how a gradient is brought to a norm of at most C.

    Returns:
        One tensor per parameter, in the parameters' order; and the sum over the reals of 1/2 where the norm is at most
        C, and of -1/2 elsewhere, which one real moves by 1/2.
    """
    images = torch.cat([reals[0], fakes[0]])
    labels = torch.cat([reals[1], fakes[1]])
    targets = torch.cat([torch.ones(len(reals[1])), torch.zeros(len(fakes[1]))]).to(images)
    total, norms = engine.clipped_sum(images, labels, targets, clipping_norm, rule)
    short = norms[: len(reals[1])] <= clipping_norm
    return total, float(short.sum()) - len(short) / 2


def local_update(
    discriminator: nn.Module,
    generator: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Records,
    plan: SitePlan,
    *,
    first_step: int,
    random: KeyedGenerator,
    followed: float | None = None,
    engine: Callable[[nn.Module], Engine] = OpacusEngine,
) -> float | None:
    """Take `plan.d_steps` private steps on D in place. The caller has charged `plan.event` already.

    Args:
        discriminator: a plain module; its parameters are the optimiser's.
        data: the site's records.
        first_step: D steps that the run has already charged to this site: where C_t stands.
        random: source of the sample, the fakes and the noise.
        followed: what the previous round returned; None in the run's first.
        engine: makes what sums the clipped gradients.

    Returns:
        What `Quantile` gives after the last step; the next round's `followed`.
    """
    discriminator.train()
    sums = engine(discriminator)
    rule, drawn = plan.clipping, _fakes(generator, plan, random)
    try:
        for step in range(first_step, first_step + plan.d_steps):
            c = plan.clipping_norm(step, followed)
            fakes = next(drawn)
            reals = data.batch(plan.sample(data.units, random))
            total, count = summed_gradient(sums, reals, fakes, c, rule)
            for parameter, clipped in zip(discriminator.parameters(), total, strict=True):
                parameter.grad = plan.noised(clipped, c, random) / (2 * plan.batch_size)
            if isinstance(rule, Quantile):
                counted = noised(torch.tensor(count, dtype=torch.float64), rule.count_noise, random)
                followed = rule.following(c, float(counted), plan.batch_size)
            optimizer.step()
    finally:
        sums.close()
    return followed


def _fakes(generator: nn.Module, plan: SitePlan, random: KeyedGenerator) -> Iterator[tuple[Tensor, Tensor]]:
    """Each D step's B fakes; those of several steps are drawn at once, since small batches waste a pass of G."""
    at_once = max(1, _FAKES // plan.batch_size)
    for first in range(0, plan.d_steps, at_once):
        images, labels = draw_fakes(generator, plan.batch_size * min(at_once, plan.d_steps - first), random)
        yield from zip(images.split(plan.batch_size), labels.split(plan.batch_size), strict=True)
