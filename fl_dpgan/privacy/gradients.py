"""Per-sample gradients through Opacus, and their clipped sum: the quantity whose sensitivity is C."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule

if TYPE_CHECKING:
    from opacus.grad_sample import GradSampleModule

# images need no gradient here, which PyTorch says at every step of Opacus' hooks
warnings.filterwarnings("ignore", message="Full backward hook is firing")


def check_separable(discriminator: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Refuse a discriminator in which the output for one sample depends on another.

    Args:
        images: (n, channels, size, size) public probes, n >= 2. labels: (n,).

    Raises:
        ConfigError: it mixes samples (batch norm, say), so clipping each sample would not bound its influence.
    """
    mixing = [
        name for name, module in discriminator.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    state = {key: value.clone() for key, value in discriminator.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in discriminator.named_buffers()}
    training = discriminator.training
    mixed = mixes_samples(discriminator.train(), images, labels)
    remembers = [name for name, buffer in discriminator.named_buffers() if not torch.equal(buffer, buffers[name])]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in discriminator.parameters():  # a path between samples may be shut at first
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    mixed = mixed or mixes_samples(discriminator, images, labels)
    discriminator.load_state_dict(state)
    discriminator.train(training)
    if remembers and not mixing:
        raise ConfigError(
            f"the discriminator's buffer {remembers[0]} takes up what a forward pass sees; leave it out: a record must "
            "act on one step alone"
        )
    if mixing or mixed:
        layers = f" (layers {', '.join(mixing)})" if mixing else ""
        raise ConfigError(
            f"the discriminator's output for one sample depends on another{layers}; "
            "replace batch norm by group norm, or leave it out"
        )


def mixes_samples(module: nn.Module, images: Tensor, *others: Tensor) -> bool:
    """Whether the module's output for the first image changes when the other images do."""
    changed = images.clone()
    changed[1:] = -3 * changed[1:] + 1
    outputs = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for batch in (images, changed):
            torch.manual_seed(0)
            outputs.append(module(batch, *others)[0])
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


def per_sample(module: nn.Module) -> "GradSampleModule":
    """Wrap a discriminator so that a backward pass of a summed loss leaves `grad_sample` (n, *shape) on its parameters.

    Raises:
        ConfigError: Opacus has no per-sample gradient for one of its layers.
    """
    from opacus.grad_sample import GradSampleModule  # takes seconds, and most discriminators do without

    try:
        return GradSampleModule(module, loss_reduction="sum", strict=True)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"the discriminator cannot be trained privately: {str(error).splitlines()[0]}") from error


def clipped_sum(
    grad_samples: Sequence[Tensor], clipping_norm: float, rule: ClippingRule
) -> tuple[list[Tensor], Tensor]:
    """Clip each sample's gradient, over all parameters together, to L2 norm at most C, and add them up.

    A sample whose gradient is not finite counts as zero: whether and how a site answers must not depend on a record.
    Norms are taken in double precision, so a large but finite gradient does not overflow.

    Args:
        grad_samples: one (n, *shape) tensor per parameter. clipping_norm: C > 0. rule: says how it is clipped.

    Returns:
        One (*shape) tensor per parameter, and the norms before clipping (n,), infinite where a gradient is not finite.
    """
    per_parameter = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in grad_samples]
    norms = torch.linalg.vector_norm(torch.stack(per_parameter), dim=0)  # (n,)
    factors, finite = clipping_factors(norms, clipping_norm, rule)
    sums = []
    for g in grad_samples:
        clean = torch.where(finite.view(-1, *[1] * (g.dim() - 1)), g, 0.0)  # 0 times infinity would be NaN
        sums.append(torch.einsum("n,n...->...", factors.to(g.dtype), clean))
    return sums, torch.where(finite, norms, torch.inf)


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full single precision, whatever the process allows elsewhere (TF32, bfloat16).

    With ten bits of mantissa a clipped gradient could be longer than C by one part in a thousand.
    """
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def clipping_factors(norms: Tensor, clipping_norm: float, rule: ClippingRule) -> tuple[Tensor, Tensor]:
    """What each sample's gradient is multiplied by, (n,), and whether it is finite; one that is not gets 0."""
    finite = torch.isfinite(norms)
    factors = torch.where(finite, rule.factors(norms, clipping_norm), 0.0)
    return torch.where(factors < 1e-37, 0.0, factors), finite  # subnormal in single precision, where it could round up
