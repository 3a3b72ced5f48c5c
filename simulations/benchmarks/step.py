"""Times a private D step: our engine against every mode of Opacus and a plain step, interleaved in one process.

The peers get the better of two forms of the same D: the project's, where the label enters as one product, and plain
torch layers, where it comes as maps beside the image; and the better of two memory formats. Before anything is timed,
all must give the same gradient when there is no noise; modes of Opacus that give another one (1.6's hooks and ghost
clipping do, where a convolution's channels lie last) or refuse are left out.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from rich.table import Table
from torch import Tensor, nn

from fl_dpgan.networks import Discriminator
from simulations.benchmarks import stock
from simulations.benchmarks.common import (
    Result,
    distance,
    fastest,
    interleaved,
    milliseconds,
    ratio,
    table,
    torch_threads,
)
from simulations.benchmarks.kinds import MODES, Batch, Step, opacus, ours, plain

TOLERANCE = 1e-4
REFERENCE = "opacus/hooks/product/contiguous"


def concatenated(width: int, parameters: list[Tensor]) -> list[Tensor]:
    """Our D's parameters, or their gradients, as those of `stock.Discriminator`."""
    first, bias, *hidden, maps, head, head_bias = parameters
    taps = maps.detach().view(16, width, stock.CLASSES).permute(1, 2, 0).reshape(width, stock.CLASSES, 4, 4)
    return [torch.cat([first, taps], dim=1), bias, *hidden, head, head_bias]


def variants(width: int, batch: Batch, noise: float) -> dict[str, tuple[nn.Module, Step]]:
    """Every kind of step, each on its own copy of D: ours, plain//form/format, and opacus/mode/form/format."""
    d = Discriminator(size=28, channels=1, num_classes=stock.CLASSES, width=width, labels="input")
    other = stock.Discriminator(width)
    with torch.no_grad():
        for target, source in zip(other.parameters(), concatenated(width, list(d.parameters())), strict=True):
            target.copy_(source)
    made: dict[str, tuple[nn.Module, Step]] = {}

    def add(name: str, model: nn.Module, step: Callable[[nn.Module, Batch], Step]) -> None:
        mine = copy.deepcopy(model)
        made[name] = mine, step(mine, batch)

    add("ours", d, partial(ours, noise=noise))
    for (form, model), layout in product((("product", d), ("maps", other)), stock.FORMATS):
        laid_out = partial(_laid_out, layout=stock.FORMATS[layout])
        add(f"plain//{form}/{layout}", model, partial(laid_out, plain))
        for mode in MODES:
            if (mode, form) != ("no-op", "product"):  # torch.func cannot map over the `one_hot` in our D
                kind = partial(opacus, noise=noise, mode=mode)
                add(f"opacus/{mode}/{form}/{layout}", model, partial(laid_out, kind))
    return made


def _laid_out(
    kind: Callable[[nn.Module, Batch], Step], model: nn.Module, batch: Batch, layout: torch.memory_format
) -> Step:
    """A step whose network and images lie in memory in this way."""
    images, *others = batch
    return kind(model.to(memory_format=layout), (images.contiguous(memory_format=layout), *others))


def random_batch(samples: int) -> Batch:
    """Random images, half of them real as far as D knows."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(samples, 1, 28, 28, generator=random) * 2 - 1
    return images, torch.arange(samples) % stock.CLASSES, (torch.arange(samples) % 2).float()


def wrong(width: int, batch: Batch) -> dict[str, str]:
    """The variants that cannot be timed, and why: without noise, all private steps must give the same gradient.

    A rounding can turn over one LeakyReLU, and with it more than the tolerance; not at every seed, though.
    """
    found: dict[str, str] = {}
    for seed in range(3):
        torch.manual_seed(seed)
        errors = _errors(width, batch)
        found = {name: why for name, why in errors.items() if why and (not seed or name in found)}
    if fatal := [name for name in found if not name.startswith("opacus/")]:
        raise AssertionError(f"{fatal[0]}: {found[fatal[0]]}; its time would mean nothing")
    return found


def _errors(width: int, batch: Batch) -> dict[str, str]:
    """What is wrong with each variant at zero noise; nothing where that is empty."""
    gradients, errors = {}, {}
    for name, (model, step) in variants(width, batch, noise=0.0).items():
        try:
            step()
        except RuntimeError as error:
            errors[name] = str(error).splitlines()[0]
            continue
        found = [parameter.grad for parameter in model.parameters()]
        gradients[name] = found if isinstance(model, stock.Discriminator) else concatenated(width, found)
    for name, found in gradients.items():
        expected = gradients["plain//product/contiguous" if name.startswith("plain") else REFERENCE]
        off = distance(found, expected)
        errors[name] = "" if off <= TOLERANCE else f"another gradient: off by {off:.2g}"
    return errors


def measure(widths: list[int], threads: list[int], samples: int, rounds: int) -> Result:
    """The medians, a row per D and number of threads."""
    rows, batch = [], random_batch(samples)
    for width in widths:
        left_out = wrong(width, batch)
        for count in threads:
            with torch_threads(count):
                made = variants(width, batch, noise=1.0)
                steps = {name: step for name, (_, step) in made.items() if name not in left_out}
                found = interleaved(steps, rounds, following=True)
            base, best = fastest(found, "plain/"), fastest(found, "opacus/")
            rows.append(
                {
                    "width": width, "threads": count, "plain": base, "opacus": best,
                    "ours_to_plain": ratio(found, "ours", base), "opacus_to_ours": ratio(found, best, "ours"),
                    "left_out": left_out,
                    "milliseconds": {name: milliseconds(seconds) for name, seconds in found.items()},
                }
            )  # fmt: skip
    return {"samples": samples, "rounds": rounds, "rows": rows}


def render(result: Result) -> Table:
    """A row per D and number of threads."""
    made = table(
        f"One D step, 2B = {result['samples']}, 28 x 28, fp32, Adam included; medians of {result['rounds']} rounds, ms",
        "D", "threads", "plain", "ours", "best of Opacus", "ours / plain", "Opacus / ours", *MODES,
    )  # fmt: skip
    for row in result["rows"]:
        ms, width = row["milliseconds"], row["width"]
        _, _, *settings = row["plain"].split("/")
        _, *best = row["opacus"].split("/")
        others = [min(value for name, value in ms.items() if name.startswith(f"opacus/{mode}/")) for mode in MODES]
        made.add_row(
            f"{width}, {2 * width}", str(row["threads"]), f"{ms[row['plain']]:.1f} ({', '.join(settings)})",
            f"{ms['ours']:.1f}", f"{ms[row['opacus']]:.1f} ({', '.join(best)})", f"{row['ours_to_plain']:.2f}",
            f"{row['opacus_to_ours']:.2f}", *(f"{value:.1f}" for value in others),
        )  # fmt: skip
    left_out = sorted({name.removeprefix("opacus/") for row in result["rows"] for name in row["left_out"]})
    made.caption = f"left out, since wrong or refused: {', '.join(left_out)}" if left_out else None
    return made
