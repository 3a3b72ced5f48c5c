"""Our own per-sample gradient engine, for discriminators whose parameters belong to convolutions and linear layers.

A pass runs D forward and backward through the library's own convolutions, down to the layers' outputs, and forms each
sample's weight gradients from the layers' inputs and output gradients. It holds a bounded number of them, and is filled
up with samples that do not count, so that Poisson batches of any size meet the same few shapes.

A layer's norm and sum are taken from the *same* tensors. Ghost clipping (Li et al., arXiv 2110.05679, section 4) takes
the norm from another formula than the sum: for weights chosen to make large terms cancel in one of them it rounds
otherwise, and a clipped gradient could be far longer than C.
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule
from fl_dpgan.privacy.gradients import clipping_factors, exact_products

#: Bytes of per-sample convolution gradients that a pass may hold, by device.
_HELD = {"cpu": 2**26, "cuda": 2**30}
#: No pass takes more samples, and each is filled up to a multiple of `_MULTIPLE`, so that shapes recur.
_LARGEST, _MULTIPLE = 512, 8

#: Numbers whose squares are added in single precision, before double takes over.
_RUN = 64
#: Norms are taken this much longer: more than 64 roundings of 2^-24 can have shortened them by.
_ROUNDING = 1 + 3e-6


class _Layer(Protocol):
    """One layer's per-sample gradients of the samples at hand, and the sum so far."""

    def take(self, inputs: Tensor, gradients: Tensor, count: int) -> Tensor:
        """Form the gradients of the first `count` samples; gives their squared norms (count,) in double precision."""

    def add(self, factors: Tensor) -> None:
        """Add these samples' gradients, times their factors (count,), to the sum."""

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far, by parameter."""

    def clear(self) -> None:
        """Start a new sum."""


class LayerEngine:
    """Norms and sums layer by layer, where all parameters belong to plain `Conv2d` and `Linear` layers.

    Raises:
        ConfigError: a parameter belongs to something else, or a layer is used otherwise than once.
    """

    def __init__(self, discriminator: nn.Module) -> None:
        self._module = discriminator
        self._layers: dict[nn.Module, _Layer] = {}
        for layer in discriminator.modules():
            if next(layer.parameters(recurse=False), None) is None:
                continue
            if type(layer) is nn.Linear:
                self._layers[layer] = _LinearGradients(layer)
            elif type(layer) is nn.Conv2d and _plain(layer):
                self._layers[layer] = _ConvolutionGradients(layer)
            else:
                raise ConfigError(
                    f"{type(layer).__name__} is not a plain convolution or linear layer; use OpacusEngine"
                )
        convolutions = [layer for layer in self._layers if isinstance(layer, nn.Conv2d)]
        self._last_convolution = convolutions[-1] if convolutions else None
        held = sum(4 * layer.weight.numel() for layer in convolutions)
        device = next(discriminator.parameters()).device.type
        self._samples = min(max(_HELD.get(device, _HELD["cpu"]) // max(held, 1), 1), _LARGEST)
        self._seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self._hooks = [layer.register_forward_hook(self._remember) for layer in self._layers]

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """As `Engine.clipped_sum`."""
        for gradients in self._layers.values():
            gradients.clear()
        norms = [torch.zeros(0, dtype=torch.float64, device=images.device)]
        with exact_products():
            for start in range(0, len(images), self._samples):
                part = slice(start, start + self._samples)
                norms.append(self._pass(images[part], labels[part], targets[part], clipping_norm, rule))
        sums = {p: total for gradients in self._layers.values() for p, total in gradients.sums().items()}
        return [sums[parameter] for parameter in self._module.parameters()], torch.cat(norms)

    def close(self) -> None:
        """As `Engine.close`."""
        for hook in self._hooks:
            hook.remove()
        self._seen, self._layers = {}, {}

    def _pass(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> Tensor:
        count = len(images)
        missing = -count % _MULTIPLE
        filled = pad(images, (0,) * (2 * images.dim() - 1) + (missing,))
        self._seen = {layer: [] for layer in self._layers}
        logits = self._module(filled.contiguous(memory_format=torch.channels_last), pad(labels, (0, missing)))
        loss = binary_cross_entropy_with_logits(logits, pad(targets, (0, missing)), reduction="sum")
        if any(len(calls) != 1 for calls in self._seen.values()):
            raise ConfigError("a layer of the discriminator is used more than once, or not at all; use OpacusEngine")
        inputs, outputs = zip(*(calls[0] for calls in self._seen.values()), strict=True)
        self._seen = {}
        gradients = torch.autograd.grad(loss, outputs)
        squares = torch.zeros(count, dtype=torch.float64, device=images.device)
        for layer, x, g in zip(self._layers.values(), inputs, gradients, strict=True):
            squares += layer.take(x, g, count)
        norms = squares.sqrt() * _ROUNDING
        factors, finite = clipping_factors(norms, clipping_norm, rule)
        for layer in self._layers.values():
            layer.add(factors)
        return torch.where(finite, norms, torch.inf)

    def _remember(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Note what goes through a layer, and have it go on in the layout that what follows is fastest with.

        Between convolutions channels lie last, which of a grey image's only channel cannot be seen; after the last one
        they lie first, as whatever flattens them wants.
        """
        if isinstance(layer, nn.Conv2d):
            last = layer is self._last_convolution
            output = output.contiguous(memory_format=torch.contiguous_format if last else torch.channels_last)
        self._seen[layer].append((inputs[0].detach(), output))
        return output


def _plain(layer: nn.Conv2d) -> bool:
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str)


class _ConvolutionGradients:
    """A sample's weight gradient is the product of its output gradient (out, places) with its patches (places, taps).

    With the channels last, the pixels that a row of the kernel covers lie side by side, so that the patches are copied
    in long runs.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        self._layer = layer
        self._taps = math.prod(layer.kernel_size) * layer.in_channels
        self._held = self._padded = self._patches = self._biases = layer.weight.new_empty(0)
        self.clear()

    def clear(self) -> None:
        layer = self._layer
        self._sum = layer.weight.new_zeros(layer.out_channels * self._taps)
        self._bias_sum = layer.weight.new_zeros(layer.out_channels)

    def take(self, inputs: Tensor, gradients: Tensor, count: int) -> Tensor:
        left = gradients.flatten(2)  # (n, out_channels, places), whichever way the channels lie
        patches = self._cut(inputs, gradients.shape[2], gradients.shape[3]).view(len(inputs), -1, self._taps)
        if len(self._held) != len(inputs):
            self._held = left.new_empty(len(inputs), left.shape[1], self._taps)
        torch.bmm(left, patches, out=self._held)
        self._biases = left.sum(2)
        squares = _squares(self._held[:count])
        return squares if self._layer.bias is None else squares + _squares(self._biases[:count])

    def add(self, factors: Tensor) -> None:
        _add(self._sum, self._held[: len(factors)].flatten(1), factors)
        _add(self._bias_sum, self._biases[: len(factors)], factors)

    def sums(self) -> dict[Tensor, Tensor]:
        layer = self._layer
        weight = self._sum.view(layer.out_channels, *layer.kernel_size, layer.in_channels).permute(0, 3, 1, 2)
        found: dict[Tensor, Tensor] = {layer.weight: weight.contiguous()}
        return found if layer.bias is None else found | {layer.bias: self._bias_sum}

    def _cut(self, inputs: Tensor, rows: int, columns: int) -> Tensor:
        """The patches (n, rows, columns, kernel height, kernel width x channels), each pixel's channels last."""
        (kernel_h, kernel_w), (stride_h, stride_w) = self._layer.kernel_size, self._layer.stride
        pad_h, pad_w = (int(p) for p in self._layer.padding)
        n, channels, height, width = inputs.shape
        shape = (n, height + 2 * pad_h, width + 2 * pad_w, channels)
        if self._padded.shape != shape:
            self._padded = inputs.new_zeros(shape)  # the border stays zero
        self._padded[:, pad_h : pad_h + height, pad_w : pad_w + width] = inputs.permute(0, 2, 3, 1)
        line = shape[2] * channels
        view = self._padded.as_strided(
            (n, rows, columns, kernel_h, kernel_w * channels),
            (shape[1] * line, stride_h * line, stride_w * channels, line, 1),
        )
        if self._patches.shape != view.shape:
            self._patches = view.new_empty(view.shape)
        return self._patches.copy_(view)


class _LinearGradients:
    """A sample's weight gradient is g x^T, so its norm is |g| |x|, and nothing can cancel in it."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._x = self._g = self._length_x = self._length_g = layer.weight.new_empty(0)
        self.clear()

    def clear(self) -> None:
        self._sum, self._bias_sum = (
            self._layer.weight.new_zeros(shape) for shape in (self._layer.weight.shape, self._layer.out_features)
        )

    def take(self, inputs: Tensor, gradients: Tensor, count: int) -> Tensor:
        if inputs.dim() != 2:
            raise ConfigError("a linear layer on more than a vector per sample; use OpacusEngine")
        self._x, self._g = inputs[:count], gradients[:count]
        self._length_x, self._length_g = _squares(self._x).sqrt(), _squares(self._g).sqrt()
        squares = (self._length_g * self._length_x).square()
        return squares if self._layer.bias is None else squares + self._length_g.square()

    def add(self, factors: Tensor) -> None:
        # unit vectors times the clipped length: g times a small factor could be subnormal, and so be rounded up
        lengths = torch.where(factors > 0, factors * self._length_g, 0.0)
        direction = _unit(self._g, self._length_g)
        left = direction * torch.where(factors > 0, lengths * self._length_x, 0.0).to(direction)[:, None]
        self._sum.addmm_(left.T, _unit(self._x, self._length_x))
        self._bias_sum += (direction * lengths.to(direction)[:, None]).sum(0)

    def sums(self) -> dict[Tensor, Tensor]:
        layer = self._layer
        found: dict[Tensor, Tensor] = {layer.weight: self._sum}
        return found if layer.bias is None else found | {layer.bias: self._bias_sum}


def _squares(values: Tensor) -> Tensor:
    """Squared norms (n,) of (n, ...): short runs in single precision, which is fast, their sum in double precision.

    Squares too large for single precision become infinite, and the sample counts as zero; those too small become zero,
    where they are far below any clipping norm.
    """
    flat = values.flatten(1)
    run = max(length for length in range(1, _RUN + 1) if flat.shape[1] % length == 0)
    runs = torch.linalg.vector_norm(flat.view(len(flat), flat.shape[1] // run, run), dim=2)
    total: Tensor = runs.double().square().sum(1)
    return total


def _add(total: Tensor, rows: Tensor, factors: Tensor) -> None:
    """Add the rows (n, p) times the factors (n,) to the total (p,); a row with factor 0 may be infinite."""
    if bool((factors == 0).any()):
        rows = torch.where((factors > 0)[:, None], rows, 0.0)
    total.addmv_(rows.T, factors.to(rows.dtype))


def _unit(values: Tensor, lengths: Tensor) -> Tensor:
    """Each row divided by its length; zeros where there is no length, or no finite one."""
    short = lengths.to(values.dtype)
    fine = (short > 0) & torch.isfinite(short)
    return torch.where(fine[:, None], values / torch.where(fine, short, 1.0)[:, None], 0.0)
