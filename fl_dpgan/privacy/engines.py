"""Sums of clipped per-sample gradients: our own engine for convolutions and linear layers, Opacus for the rest.

`LayerEngine` takes one forward and one backward pass, down to the layers' outputs, and forms each sample's weight
gradients from the layers' inputs and output gradients. Norm and sum are taken from the *same* tensors: were the sum
computed anew, with the factor inside, then for weights chosen to make large terms cancel in the norm it would round
otherwise, and a clipped gradient could be far longer than C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad, pixel_unshuffle

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule, Fixed
from fl_dpgan.privacy.gradients import clipped_sum, clipping_factors, per_sample

#: Samples that are worked on at once: so few that what belongs to them stays in a processor's cache.
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
        self._layers: list[nn.Conv2d | nn.Linear] = []
        for layer in discriminator.modules():
            if next(layer.parameters(recurse=False), None) is None:
                continue
            if not isinstance(layer, nn.Conv2d | nn.Linear) or not _supported(layer):
                raise ConfigError(
                    f"{type(layer).__name__} is not a plain convolution or linear layer; use OpacusEngine"
                )
            self._layers.append(layer)
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
        pieces = [
            _of_convolution(layer, x, g) if isinstance(layer, nn.Conv2d) else _of_linear(layer, x, g)
            for layer, x, g in zip(self._layers, inputs, gradients, strict=True)
        ]
        norms = torch.stack([square for piece in pieces for square in piece.squares]).sum(0).sqrt()
        factors, finite = clipping_factors(norms, clipping_norm, rule)
        sums: dict[Tensor, Tensor] = {}
        for piece in pieces:
            sums |= piece.summed(factors)
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


@dataclass(frozen=True)
class _Piece:
    """One layer's per-sample gradients: their squared norms (n,), and how they are summed with the samples' factors."""

    squares: list[Tensor]
    summed: Callable[[Tensor], dict[Tensor, Tensor]]


def _of_linear(layer: nn.Linear, x: Tensor, g: Tensor) -> _Piece:
    """A sample's weight gradient is g x^T, so its norm is |g| |x| and nothing can cancel in it."""
    if x.dim() != 2:
        raise ConfigError("a linear layer on more than a vector per sample; use OpacusEngine")
    length_x, length_g = _norm(x), _norm(g)

    def summed(factors: Tensor) -> dict[Tensor, Tensor]:
        # unit vectors times the clipped length: g times a small factor could be subnormal, and so be rounded up
        scale = torch.where(factors > 0, factors * length_g * length_x, 0.0)
        left, right = (_unit(g, length_g) * scale[:, None]).to(x), _unit(x, length_x).to(x)
        sums: dict[Tensor, Tensor] = {layer.weight: left.T @ right}
        if layer.bias is not None:
            bias = _unit(g, length_g) * torch.where(factors > 0, factors * length_g, 0.0)[:, None]
            sums[layer.bias] = bias.sum(0).to(x)
        return sums

    weight = (length_g * length_x).square()
    return _Piece([weight] if layer.bias is None else [weight, length_g.square()], summed)


def _of_convolution(layer: nn.Conv2d, x: Tensor, g: Tensor) -> _Piece:
    """With stride s and a kernel of m s pixels, the convolution is one of stride 1 and m taps on blocks of s x s.

    The blocks' pixels are taken as channels. A tap's weight gradient is the product of g with the blocks shifted by the
    tap; in rows laid end to end a shift is an offset, so nothing is copied.
    """
    (kernel_h, kernel_w), s = layer.kernel_size, layer.stride[0]
    taps_h, taps_w = kernel_h // s, kernel_w // s
    rows, columns = g.shape[2] + taps_h - 1, g.shape[3] + taps_w - 1
    pad_h, pad_w = (int(p) for p in layer.padding)
    length = g.shape[2] * columns - (taps_w - 1)
    taps = [row * columns + column for row in range(taps_h) for column in range(taps_w)]
    held = x.new_empty(len(x), len(taps), layer.out_channels, s * s * layer.in_channels)
    squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        padded = pad(x[part], (pad_w, pad_w, pad_h, pad_h))[:, :, : s * rows, : s * columns]
        blocks = pixel_unshuffle(padded, s).flatten(2)  # (chunk, s s in_channels, rows * columns)
        spread = pad(g[part], (0, taps_w - 1)).flatten(2)[:, :, :length]  # zeros where a row ends
        for tap, offset in enumerate(taps):
            held[part, tap] = torch.bmm(spread, blocks[:, :, offset : offset + length].transpose(1, 2))
        squares[part] = _norm(held[part].flatten(1)).square()
    biases = g.sum((2, 3))

    def summed(factors: Tensor) -> dict[Tensor, Tensor]:
        flat = _weighted_sum(held.flatten(1), factors)
        # (taps, out, in, s, s) to (out, in, kernel_h, kernel_w)
        weight = flat.view(taps_h, taps_w, layer.out_channels, layer.in_channels, s, s)
        sums: dict[Tensor, Tensor] = {layer.weight: weight.permute(2, 3, 0, 4, 1, 5).reshape(layer.weight.shape)}
        if layer.bias is not None:
            sums[layer.bias] = _weighted_sum(biases, factors)
        return sums

    return _Piece([squares] if layer.bias is None else [squares, _norm(biases).square()], summed)


def _weighted_sum(rows: Tensor, factors: Tensor) -> Tensor:
    """The sum of the rows (n, p) times the factors (n,); a row with factor 0 may be infinite."""
    if bool((factors == 0).any()):
        rows = torch.where((factors > 0)[:, None], rows, 0.0)
    return factors.to(rows.dtype) @ rows


def _unit(values: Tensor, lengths: Tensor) -> Tensor:
    """Each row divided by its length, in double precision; zeros where there is no length, or no finite one."""
    fine = (lengths > 0) & torch.isfinite(lengths)
    return torch.where(fine[:, None], values.double() / torch.where(fine, lengths, 1.0)[:, None], 0.0)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return norm
