"""Engines that sum clipped per-sample gradients: their interface, Opacus' hooks behind it, and which one to take."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.modules.dropout import _DropoutNd

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule, Fixed
from fl_dpgan.privacy.gradients import clipped_sum, exact_products, per_sample
from fl_dpgan.privacy.layers import LayerEngine

#: Samples whose gradients Opacus holds at once.
_PASS = 256


class Engine(Protocol):
    """Sums the clipped gradients of the samples' losses on D: binary cross-entropy of its logit with the target."""

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """Clip each sample's gradient, over all parameters together, to L2 norm at most C, and add them up.

        However many samples there are, all count; an engine takes as many passes as it needs. A sample whose gradient
        is not finite counts as zero: whether and how a site answers must not depend on a record.

        Args:
            images: (n, channels, size, size). labels, targets: (n,). clipping_norm: C > 0. rule: how it is clipped.

        Returns:
            One (*shape) tensor per parameter, in the parameters' order; and the norms before clipping (n,), infinite
            where a gradient is not finite.
        """

    def close(self) -> None:
        """Take the hooks off the discriminator, and drop whatever is left of the records."""


class OpacusEngine:
    """Per-sample gradients by Opacus' hooks, those of a pass held at once.

    Raises:
        ConfigError: Opacus has no per-sample gradient for one of the discriminator's layers.
    """

    def __init__(self, discriminator: nn.Module) -> None:
        self._wrapped = per_sample(discriminator)

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """As `Engine.clipped_sum`."""
        sums = [torch.zeros_like(p) for p in self._wrapped.parameters()]
        norms = [torch.zeros(0, dtype=torch.float64, device=images.device)]
        with exact_products():
            for start in range(0, len(images), _PASS):
                part = slice(start, start + _PASS)
                of_part, norms_of_part = self._pass(images[part], labels[part], targets[part], clipping_norm, rule)
                sums = [a + b for a, b in zip(sums, of_part, strict=True)]
                norms.append(norms_of_part)
        return sums, torch.cat(norms)

    def _pass(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        wrapped, parameters = self._wrapped, list(self._wrapped.parameters())
        wrapped.zero_grad(set_to_none=True)
        # contiguous: where channels lie last, Opacus 1.6 takes other gradients than the images give
        loss = binary_cross_entropy_with_logits(wrapped(images.contiguous(), labels), targets, reduction="sum")
        loss.backward()
        result = clipped_sum([p.grad_sample for p in parameters], clipping_norm, rule)
        for parameter in parameters:
            parameter.grad_sample = None
        return result

    def close(self) -> None:
        """As `Engine.close`."""
        module = self._wrapped.to_standard_module()  # hooks must not pile up over rounds
        for layer in module.modules():
            layer.__dict__.pop("activations", None)  # Opacus keeps them, and so records, when a pass fails half-way


def fastest(discriminator: nn.Module, images: Tensor, labels: Tensor) -> Callable[[nn.Module], Engine]:
    """The engine for this discriminator: ours where it can be used, else Opacus; checked against autograd on probes.

    Args:
        images: (n, channels, size, size) public probes. labels: (n,).

    Raises:
        ConfigError: no engine can train it.
    """
    targets = (torch.arange(len(labels), device=images.device) % 2).to(images)
    cudnn, modes = torch.backends.cudnn, [(module, module.training) for module in discriminator.modules()]
    for module in discriminator.modules():
        module.training = not isinstance(module, _DropoutNd)  # it would give every engine other gradients
    with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):  # its ten bits would pass for a disagreement
        try:
            expected = _sample_by_sample(discriminator, images, labels, targets)
            try:
                if _agrees(LayerEngine, expected, discriminator, images, labels, targets):
                    return LayerEngine
            except (ConfigError, RuntimeError):  # the latter where D cannot take images whose channels lie last
                pass
            if _agrees(OpacusEngine, expected, discriminator, images, labels, targets):
                return OpacusEngine
        except RuntimeError as error:  # an activation in place, say
            raise ConfigError(f"the discriminator cannot be trained privately: {str(error).splitlines()[0]}") from error
        finally:
            for module, mode in modes:
                module.training = mode
    raise ConfigError(
        "the discriminator cannot be trained privately: Opacus' per-sample gradients differ from autograd's"
    )


def _agrees(
    engine: Callable[[nn.Module], Engine],
    expected: list[Tensor],
    discriminator: nn.Module,
    images: Tensor,
    labels: Tensor,
    targets: Tensor,
) -> bool:
    made = engine(discriminator)
    try:
        sums = made.clipped_sum(images, labels, targets, 1.0, Fixed())[0]
    finally:
        made.close()
    found = torch.cat([part.flatten() for part in sums])
    lengths = torch.stack([gradient.norm() for gradient in expected])  # of the sum nothing may be left
    return bool((found - torch.stack(expected).sum(0)).norm() <= 1e-4 * lengths.sum())


def _sample_by_sample(discriminator: nn.Module, images: Tensor, labels: Tensor, targets: Tensor) -> list[Tensor]:
    """Each sample's gradient over all parameters, clipped to norm 1, from a backward pass of its own."""
    found = []
    for number in range(len(labels)):
        one = slice(number, number + 1)
        loss = binary_cross_entropy_with_logits(discriminator(images[one], labels[one]), targets[one])
        gradients = torch.autograd.grad(loss, list(discriminator.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
        found.append(flat / flat.norm().clamp(min=1.0))
    return found
