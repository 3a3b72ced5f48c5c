"""Times a private D step: our engine against Opacus' hooks and a plain step, interleaved in one process.

Run as `python -m simulations.benchmarks.step [--threads N]`. Each ratio is a median over rounds of the ratio within the
round, so that a slow moment of the machine hits all three alike.
"""

import statistics
import time
from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.networks import Discriminator
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.engines import Engine, LayerEngine, OpacusEngine

SAMPLES = 256  # 2 B: reals and fakes
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """A step without privacy."""
    images, labels, targets = batch
    optimizer.zero_grad(set_to_none=True)
    binary_cross_entropy_with_logits(model(images, labels), targets).backward()
    optimizer.step()


def private_step(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """A step with clipping and noise."""
    sums, _ = engine.clipped_sum(*batch, 1.0, Fixed())
    for parameter, summed in zip(model.parameters(), sums, strict=True):
        parameter.grad = (summed + torch.randn_like(summed)) / SAMPLES
    optimizer.step()


def batch() -> Batch:
    """Random images, half of them real as far as D knows."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(SAMPLES, 1, 28, 28, generator=random) * 2 - 1
    return images, torch.arange(SAMPLES) % 10, (torch.arange(SAMPLES) % 2).float()


def timed(step: Callable[[], None]) -> float:
    """Seconds that a step takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure(width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind of step, one entry per round."""
    model = Discriminator(size=28, channels=1, num_classes=10, width=width)
    optimizer, data = torch.optim.Adam(model.parameters()), batch()
    found: dict[str, list[float]] = {"plain": [], "ours": [], "opacus": []}
    for number in range(rounds + 1):
        found["plain"].append(timed(lambda: plain_step(model, optimizer, data)))
        for name, kind in (("ours", LayerEngine), ("opacus", OpacusEngine)):
            engine = kind(model)
            engine.clipped_sum(*(part[:2] for part in data), 1.0, Fixed())  # Opacus builds its hooks' state here
            found[name].append(timed(lambda engine=engine: private_step(engine, model, optimizer, data)))
            engine.close()
        if number == 0:
            found = {name: [] for name in found}
    return found


def main(threads: int = 1, rounds: int = 21) -> None:
    """Print a row per width of D."""
    torch.set_num_threads(threads)
    table = Table(
        title=f"One D step, 2B = {SAMPLES}, 28 x 28, fp32, Adam included; {threads} thread(s), {rounds} rounds"
    )
    for heading in ("D", "plain ms", "ours ms", "Opacus ms", "ours / plain", "Opacus / ours"):
        table.add_column(heading, justify="right")
    for width in (16, 32, 64):
        found = measure(width, rounds)
        ratios = [
            statistics.median(a / b for a, b in zip(found[over], found[under], strict=True))
            for over, under in (("ours", "plain"), ("opacus", "ours"))
        ]
        milliseconds = [f"{1000 * statistics.median(found[name]):.1f}" for name in ("plain", "ours", "opacus")]
        table.add_row(f"{width}, {2 * width}", *milliseconds, *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
