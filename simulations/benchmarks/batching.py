"""Times clipped sums of several sites: one site after another, as in a pack, against all sites in batched kernels.

Each site has its own weights, so that a batch of sites becomes grouped convolutions, and all the sites' per-sample
gradients are held at once, where a site's own stay nearer to the processor.
"""

from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, leaky_relu, unfold

from fl_dpgan.networks import Discriminator
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.layers import LayerEngine
from simulations.benchmarks.common import Result, distance, interleaved, milliseconds, ratio, table, torch_threads

C = 1.0
Sites = tuple[Tensor, Tensor, Tensor]  # images (m, n, 1, 28, 28), labels (m, n), targets (m, n)
#: Each gives a tensor (m, *shape) per parameter, in the parameters' order.
Sums = Callable[[], list[Tensor]]


def one_by_one(networks: list[nn.Module], data: Sites) -> Sums:
    """The project's engine, on one network that takes each site's weights in turn, as the sites of a pack do."""
    shared = Discriminator(size=28, channels=1, num_classes=10, width=networks[0].features[0].out_channels)
    engine, states = LayerEngine(shared), [network.state_dict() for network in networks]

    def sums() -> list[Tensor]:
        found = []
        for state, images, labels, targets in zip(states, *data, strict=True):
            shared.load_state_dict(state)
            found.append(engine.clipped_sum(images, labels, targets, C, Fixed(c=C))[0])
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    return sums


def grouped(networks: list[nn.Module], data: Sites) -> Sums:
    """Convolutions with a group per site, and one batched product a layer for all samples' gradients."""
    images, labels, targets = data
    m, n = labels.shape
    stacked, _ = stack_module_state(networks)
    x = images.transpose(0, 1).reshape(n, m, 28, 28).contiguous()
    chosen, wanted = labels.T[..., None].contiguous(), targets.T.contiguous()  # (n, m, 1), (n, m)

    def convolution(inputs: Tensor, name: str) -> Tensor:
        weight, bias = stacked[f"{name}.weight"].flatten(0, 1), stacked[f"{name}.bias"].flatten()
        return conv2d(inputs, weight, bias, stride=2, padding=1, groups=m)

    def sums() -> list[Tensor]:
        first = convolution(x, "features.0")
        hidden = leaky_relu(first, 0.2)
        second = convolution(hidden, "features.2")
        flat = leaky_relu(second, 0.2).view(n, m, -1)
        logits = torch.baddbmm(
            stacked["head.bias"][:, None], flat.transpose(0, 1), stacked["head.weight"].transpose(1, 2)
        )
        scores = logits.transpose(0, 1).gather(2, chosen).squeeze(2)
        loss = binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        *outputs, g = torch.autograd.grad(loss, (first, second, logits))
        with torch.no_grad():
            held = []
            for inputs, gradient in zip((x, hidden), outputs, strict=True):
                patches = unfold(inputs, 4, padding=1, stride=2)  # (n, m x taps, places)
                left = gradient.flatten(2).view(n * m, -1, patches.shape[2])
                held.append(torch.bmm(left, patches.view(n * m, -1, patches.shape[2]).transpose(1, 2)))
                held.append(left.sum(2))
            squares = sum(part.flatten(1).square().sum(1) for part in held).view(n, m)
            g = g.transpose(0, 1)  # (n, m, classes)
            lengths = g.square().sum(2)
            factors = C / (squares + lengths * (1 + flat.square().sum(2))).sqrt().clamp(min=C)
            parts = [torch.einsum("nm,nmk->mk", factors, part.view(n, m, -1)) for part in held]
            clipped = factors[..., None] * g
            return [*parts, torch.einsum("nmc,nmf->mcf", clipped, flat), clipped.sum(0)]

    return sums


def mapped(networks: list[nn.Module], data: Sites) -> Sums:
    """`torch.func`: the gradient of one sample, mapped over samples and over sites."""
    stacked, _ = stack_module_state(networks)
    stacked = {name: parameter.detach() for name, parameter in stacked.items()}
    skeleton = networks[0]

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor, target: Tensor) -> Tensor:
        logit = functional_call(skeleton, parameters, (image[None], label[None]))
        return binary_cross_entropy_with_logits(logit, target[None])

    per_sample = vmap(vmap(grad(loss), in_dims=(None, 0, 0, 0)))

    def sums() -> list[Tensor]:
        gradients = [g.flatten(2) for g in per_sample(stacked, *data).values()]  # (m, n, numbers)
        factors = C / sum(g.square().sum(2) for g in gradients).sqrt().clamp(min=C)
        return [torch.einsum("mn,mnk->mk", factors, g) for g in gradients]

    return sums


METHODS = {"one by one": one_by_one, "grouped": grouped, "torch.func": mapped}


def measure(widths: list[int], batches: list[int], samples: int, rounds: int) -> Result:
    """A row per width of D and samples per site, one thread; all three must give the same sums."""
    rows = []
    with torch_threads(1):
        for width in widths:
            for batch in batches:
                m = samples // batch
                torch.manual_seed(0)
                networks = [Discriminator(size=28, channels=1, num_classes=10, width=width) for _ in range(m)]
                images = torch.rand(m, batch, 1, 28, 28) * 2 - 1
                data = (images, torch.randint(10, (m, batch)), torch.randint(2, (m, batch)).float())
                methods = {name: method(networks, data) for name, method in METHODS.items()}
                expected = methods["one by one"]()
                for name, method in methods.items():
                    off = distance(method(), expected)
                    if not off <= 1e-4:
                        raise AssertionError(f"{name} gives other sums: off by {off:.2g}")
                found = interleaved(methods, rounds)
                rows.append(
                    {
                        "width": width, "sites": m, "batch": batch,
                        "ms": {name: milliseconds(taken) for name, taken in found.items()},
                        "to_one_by_one": {name: ratio(found, name, "one by one") for name in METHODS},
                    }
                )  # fmt: skip
    return {"samples": samples, "rounds": rounds, "rows": rows}


def render(result: Result) -> Table:
    """A row per width and samples per site."""
    others = list(METHODS)[1:]
    made = table(
        f"Clipped sums of {result['samples']} samples in all, one thread, ms; medians of {result['rounds']} rounds",
        "D", "sites x samples", *METHODS, *(f"{name} / one by one" for name in others),
    )  # fmt: skip
    for row in result["rows"]:
        made.add_row(
            f"{row['width']}, {2 * row['width']}", f"{row['sites']} x {row['batch']}",
            *(f"{row['ms'][name]:.1f}" for name in METHODS),
            *(f"{row['to_one_by_one'][name]:.2f}" for name in others),
        )  # fmt: skip
    return made
