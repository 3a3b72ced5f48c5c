"""Sums of clipped per-sample gradients: our own engine for convolutions and linear layers, Opacus for the rest.

Clipping needs each sample's norm over all layers before anything is added up. `LayerEngine` takes one forward and one
backward pass, down to the layers' outputs. From each layer's input and output gradient it takes the norms, a few
samples at a time, and drops their gradients again; then one weighted pass per layer gives the clipped sum.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad, pixel_unshuffle
from torch.nn.grad import conv2d_weight

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule, Fixed
from fl_dpgan.privacy.gradients import clipped_sum, clipping_factors, per_sample

#: Samples whose weight gradients are held at once: so few that they stay in a processor's cache.
_CHUNK = 16


class Engine(Protocol):
    """Sums the clipped gradients of the samples' losses on D: binary cross-entropy of its logit with the target."""

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """Clip each sample's gradient, over all parameters together, to L2 norm at most C, and add them up.

        A sample whose gradient is not finite counts as zero: whether and how a site answers must not depend on a
        record.

        Args:
            images: (n, channels, size, size). labels, targets: (n,). clipping_norm: C > 0. rule: how it is clipped.

        Returns:
            One (*shape) tensor per parameter, in the parameters' order; and the norms before clipping (n,), infinite
            where a gradient is not finite.
        """

    def close(self) -> None:
        """Take the hooks off the discriminator, and drop whatever is left of the records."""


class OpacusEngine:
    """Per-sample gradients by Opacus' hooks, all held at once.

    Raises:
        ConfigError: Opacus has no per-sample gradient for one of the discriminator's layers.
    """

    def __init__(self, discriminator: nn.Module) -> None:
        self._wrapped = per_sample(discriminator)

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """As `Engine.clipped_sum`."""
        wrapped, parameters = self._wrapped, list(self._wrapped.parameters())
        wrapped.zero_grad(set_to_none=True)
        binary_cross_entropy_with_logits(wrapped(images, labels), targets, reduction="sum").backward()
        result = clipped_sum([p.grad_sample for p in parameters], clipping_norm, rule)
        for parameter in parameters:
            parameter.grad_sample = None
        return result

    def close(self) -> None:
        """As `Engine.close`."""
        module = self._wrapped.to_standard_module()  # hooks must not pile up over rounds
        for layer in module.modules():
            layer.__dict__.pop("activations", None)  # Opacus keeps them, and so records, when a pass fails half-way


class LayerEngine:
    """Norms and sums layer by layer, where all parameters belong to plain `Conv2d` and `Linear` layers.

    Raises:
        ConfigError: a parameter belongs to something else, or a layer is used otherwise than once.
    """

    def __init__(self, discriminator: nn.Module) -> None:
        self._module = discriminator
        self._layers = [m for m in discriminator.modules() if next(m.parameters(recurse=False), None) is not None]
        for layer in self._layers:
            if not _supported(layer):
                raise ConfigError(
                    f"{type(layer).__name__} is not a plain convolution or linear layer; use OpacusEngine"
                )
        self._seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._hooks = [layer.register_forward_hook(self._remember) for layer in self._layers]

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """As `Engine.clipped_sum`."""
        self._seen = {layer: [] for layer in self._layers}
        loss = binary_cross_entropy_with_logits(self._module(images, labels), targets, reduction="sum")
        if any(len(calls) != 1 for calls in self._seen.values()):
            raise ConfigError("a layer of the discriminator is used more than once, or not at all; use OpacusEngine")
        inputs, outputs = zip(*(self._seen[layer][0] for layer in self._layers), strict=True)
        self._seen = {}
        gradients = torch.autograd.grad(loss, outputs)
        squares = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        for layer, x, g in zip(self._layers, inputs, gradients, strict=True):
            squares += _squared_norms(layer, x, g)
        norms = squares.sqrt()
        factors, finite = clipping_factors(norms, clipping_norm, rule)
        sums: dict[Tensor, Tensor] = {}
        for layer, x, g in zip(self._layers, inputs, gradients, strict=True):
            weighted = g * factors.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
            if not bool(finite.all()):  # 0 times infinity would be NaN
                x, weighted = (torch.where(finite.view(-1, *[1] * (t.dim() - 1)), t, 0.0) for t in (x, weighted))
            sums |= _summed(layer, x, weighted)
        return [sums[p] for p in self._module.parameters()], torch.where(finite, norms, torch.inf)

    def close(self) -> None:
        """As `Engine.close`."""
        for hook in self._hooks:
            hook.remove()
        self._seen = {}

    def _remember(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._seen[layer].append((inputs[0].detach(), output))


def fastest(discriminator: nn.Module, images: Tensor, labels: Tensor) -> Callable[[nn.Module], Engine]:
    """The engine for this discriminator: ours where it can be used and agrees with Opacus on the probes, else Opacus.

    Args:
        images: (n, channels, size, size) public probes. labels: (n,).

    Raises:
        ConfigError: no engine can train it.
    """
    targets = (torch.arange(len(labels), device=images.device) % 2).to(images)
    try:
        expected = _once(OpacusEngine, discriminator, images, labels, targets)
    except RuntimeError as error:  # an activation in place, say
        raise ConfigError(f"the discriminator cannot be trained privately: {str(error).splitlines()[0]}") from error
    try:
        found = _once(LayerEngine, discriminator, images, labels, targets)
    except ConfigError:
        return OpacusEngine
    agree = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))
    return LayerEngine if agree else OpacusEngine


def _once(
    engine: Callable[[nn.Module], Engine], discriminator: nn.Module, images: Tensor, labels: Tensor, targets: Tensor
) -> list[Tensor]:
    made = engine(discriminator)
    try:
        return made.clipped_sum(images, labels, targets, 1.0, Fixed())[0]
    finally:
        made.close()


def _supported(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        same_stride = layer.stride[0] == layer.stride[1] and all(k % layer.stride[0] == 0 for k in layer.kernel_size)
        return plain and same_stride and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _squared_norms(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """Each sample's squared gradient norm at this layer (n,), from the layer's input and output gradient."""
    if isinstance(layer, nn.Linear):
        if x.dim() != 2:
            raise ConfigError("a linear layer on more than a vector per sample; use OpacusEngine")
        squared_x = _norm(x).square()
        return _norm(g).square() * (squared_x if layer.bias is None else squared_x + 1)
    assert isinstance(layer, nn.Conv2d)  # `_supported` let it in
    parts = zip(x.split(_CHUNK), g.split(_CHUNK), strict=True)
    weight = torch.cat([_conv_squared_norms(layer, part_x, part_g) for part_x, part_g in parts])
    return weight if layer.bias is None else weight + _norm(g.sum((2, 3))).square()


def _conv_squared_norms(layer: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """As `_squared_norms`, for a convolution's weight.

    With stride s and a kernel of m s pixels, the convolution is one of stride 1 and m taps on the input's s x s blocks
    taken as channels. A tap's weight gradient is the product of g with the blocks shifted by the tap; in rows laid end
    to end a shift is an offset, so nothing is copied.
    """
    (kernel_h, kernel_w), s = layer.kernel_size, layer.stride[0]
    taps_h, taps_w = kernel_h // s, kernel_w // s
    out_h, out_w = g.shape[2:]
    rows, columns = out_h + taps_h - 1, out_w + taps_w - 1
    pad_h, pad_w = (int(p) for p in layer.padding)
    padded = pad(x, (pad_w, pad_w, pad_h, pad_h))[:, :, : s * rows, : s * columns]
    blocks = pixel_unshuffle(padded, s).flatten(2)  # (n, s s channels, rows * columns)
    length = out_h * columns - (taps_w - 1)
    spread = pad(g, (0, taps_w - 1)).flatten(2)[:, :, :length]  # (n, out channels, length): zeros where a row ends
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for tap in range(taps_h * taps_w):
        start = tap // taps_w * columns + tap % taps_w
        gradient = torch.bmm(spread, blocks[:, :, start : start + length].transpose(1, 2))
        total += _norm(gradient.flatten(1)).square()
    return total


def _summed(layer: nn.Module, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
    """The layer's gradients, summed over the samples, from its input and its (weighted) output gradient."""
    if isinstance(layer, nn.Conv2d):
        weight = conv2d_weight(x, layer.weight.shape, g, layer.stride, layer.padding)
        return {layer.weight: weight} | ({} if layer.bias is None else {layer.bias: g.sum((0, 2, 3))})
    assert isinstance(layer, nn.Linear)  # `_supported` let it in
    return {layer.weight: g.T @ x} | ({} if layer.bias is None else {layer.bias: g.sum(0)})


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return norm
