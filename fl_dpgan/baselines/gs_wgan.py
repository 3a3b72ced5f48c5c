"""GS-WGAN at a site: a critic that stays there, and noised gradients with respect to fakes, one Gaussian mechanism.

Chen, Orekondy, Fritz, "GS-WGAN" (arXiv 2006.08265), without the paper's amplification by subsampling, for which it must
stay secret which critic answers: a federated server knows whom it asks.
"""

import math

import torch
from torch import Tensor, nn

from fl_dpgan.privacy.accountant import Event, best_order, epsilon
from fl_dpgan.privacy.clipping import ClippingRule
from fl_dpgan.privacy.noise import KeyedGenerator, noised
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.records import Records

#: Weight of the gradient penalty (Gulrajani et al., arXiv 1704.00028, Algorithm 1).
_PENALTY = 10.0


def critic_steps(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Records,
    fakes: tuple[Tensor, Tensor],
    steps: int,
    random: KeyedGenerator,
) -> None:
    """Steps on the critic in place, each on as many reals, drawn uniformly, as there are fakes. No noise: it stays.

    Args:
        fakes: images (B, channels, size, size) and labels (B,).
    """
    critic.train()
    for _ in range(steps):
        drawn = random.integers(len(fakes[1]), len(data.units))
        reals = data.batch(data.units.records(drawn, random))
        shares = torch.from_numpy(random.uniform(len(fakes[1]))).to(fakes[0])
        optimizer.zero_grad(set_to_none=True)
        critic_loss(critic, reals, fakes, shares).backward()
        optimizer.step()


def critic_loss(
    critic: nn.Module, reals: tuple[Tensor, Tensor], fakes: tuple[Tensor, Tensor], shares: Tensor
) -> Tensor:
    """Mean score of the fakes less that of the reals, and the gradient penalty between them.

    Args:
        reals, fakes: images (n, channels, size, size) and labels (n,).
        shares: the real's share in each point at which the penalty is taken, (n,) in (0, 1).
    """
    part = shares.view(-1, 1, 1, 1)
    between = (part * reals[0] + (1 - part) * fakes[0]).requires_grad_()
    labels = torch.where(shares > 0.5, reals[1], fakes[1])  # of the image that the point is nearer to
    (slopes,) = torch.autograd.grad(critic(between, labels).sum(), between, create_graph=True)
    penalty = ((slopes.flatten(1).norm(dim=1) - 1) ** 2).mean()
    loss: Tensor = critic(*fakes).mean() - critic(*reals).mean() + _PENALTY * penalty
    return loss


def clipped_gradients(critic: nn.Module, images: Tensor, labels: Tensor, c: float, rule: ClippingRule) -> Tensor:
    """The gradient of -critic(image, label) with respect to each image, clipped to a norm of at most C.

    One that is not finite counts as zero: whether and how a site answers must not depend on a record.

    Args:
        critic: no image's score depends on another image. images: (B, channels, size, size). labels: (B,).

    Returns:
        (B, channels, size, size) in double precision.
    """
    critic.eval()
    points = images.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(-critic(points, labels).sum(), points)
    rows = found.double().flatten(1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    clipped = rows * rule.factors(norms, c)[:, None]
    return torch.where(torch.isfinite(norms)[:, None], clipped, 0.0).view_as(found)


def noise_sd(noise_multiplier: float, c: float, batch_size: int) -> float:
    """The standard deviation of the noise in each number of the answer: sigma times the sensitivity 2 C sqrt(B).

    A site's critic is whatever its records have made of it, and one record more or less can make it any other. So each
    of the B clipped gradients can turn from one vector of norm C to another, which moves it by at most 2 C, and the
    whole batch by at most (B (2 C)^2)^(1/2) = 2 C sqrt(B).
    """
    return noise_multiplier * 2 * c * math.sqrt(batch_size)


def sanitised_gradient(
    critic: nn.Module, images: Tensor, labels: Tensor, plan: SitePlan, random: KeyedGenerator
) -> Tensor:
    """What a site answers with: each image's clipped gradient plus noise. The caller has charged `plan.event`.

    Args:
        images: (B, channels, size, size), with B the plan's batch size. labels: (B,).

    Returns:
        (B, channels, size, size) in single precision, in the CPU's memory.
    """
    c = plan.clipping.largest
    clipped = clipped_gradients(critic, images, labels, c, plan.clipping)
    return noised(clipped, noise_sd(plan.noise_multiplier, c, plan.batch_size), random).float()


def paper_epsilon(plan: SitePlan, sites: int) -> float:
    """What the paper's own accounting would claim for the whole plan. No guarantee in a federation.

    The authors' `privacy_analysis.py` counts each image of each G step as a Gaussian step of sensitivity C whose
    critic is drawn in secret from all K: B T steps at q = 1 / K, of noise multiplier sd / C (1.07 in the paper).
    Ours says what that claims with this repository's bound for such steps, which is lower than the one they use. It
    fails here, for the server knows which site answers, and every site does in every round; a record can turn a
    gradient round, which takes 2 C, not C; and one draw decides for all B images of a step.

    Args:
        sites: K, at least 1.
    """
    sigma = plan.noise_multiplier * 2 * math.sqrt(plan.batch_size)
    event = Event(1 / sites, sigma, plan.rounds * plan.batch_size, "image_gradient")
    return epsilon([event], best_order([event], plan.delta), plan.delta)
