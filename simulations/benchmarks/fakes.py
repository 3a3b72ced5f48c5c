"""Times G's passes: the project's, whose last layer is one product, against the library's last layer.

`fl_dpgan.networks._ToImage` is there for what this shows.
"""

import copy
from functools import partial

import torch
from rich.table import Table
from torch import nn

from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.training.generator import GeneratorTrainer, adversarial
from simulations.benchmarks.common import Result, distance, interleaved, milliseconds, ratio, table, torch_threads
from simulations.benchmarks.stock import FORMATS

OURS = "ours"


def generators() -> dict[str, Generator]:
    """Ours, and the same network with the library's last layer in both memory formats."""
    ours = Generator(size=28, channels=1, num_classes=10)
    made = {OURS: ours}
    for layout, memory_format in FORMATS.items():
        made[layout] = copy.deepcopy(ours)
        *_, last, _ = ours.upsample
        plain = nn.ConvTranspose2d(last.in_channels, last.out_channels, last.kernel_size, last.stride, last.padding)
        plain.load_state_dict(last.state_dict())
        made[layout].upsample[-2] = plain
        made[layout].to(memory_format=memory_format)
    return made


def measure(fakes: int, batch_size: int, rounds: int, threads: int) -> Result:
    """Medians of a pass for fakes, and of a step of G, each network's by turns."""
    torch.manual_seed(0)
    z, labels = torch.randn(fakes, 64), torch.arange(fakes) % 10
    d = Discriminator(size=28, channels=1, num_classes=10)
    networks = generators()
    trainers = {
        name: partial(GeneratorTrainer(copy.deepcopy(g), ema_decay=0.99).update, adversarial(d), [5e-4], seed=0)
        for name, g in networks.items()
    }
    with torch_threads(threads):
        with torch.no_grad():
            for name, g in networks.items():
                off = distance([g.eval()(z, labels)], [networks[OURS].eval()(z, labels)])
                if not off <= 1e-4:
                    raise AssertionError(f"{name} gives other images: off by {off:.2g}")
            forward = interleaved({name: partial(g, z, labels) for name, g in networks.items()}, rounds)
        steps = interleaved({name: partial(step, batch_size=batch_size) for name, step in trainers.items()}, rounds)
    rows = [
        {"what": what, "ms": {name: milliseconds(found[name]) for name in found},
         "to_ours": {name: ratio(found, name, OURS) for name in FORMATS}}
        for what, found in ((f"{fakes} fakes", forward), (f"a G step of {batch_size}", steps))
    ]  # fmt: skip
    return {"rounds": rounds, "threads": threads, "rows": rows}


def render(result: Result) -> Table:
    """A row per kind of pass."""
    made = table(
        f"G, {result['threads']} thread(s), medians of {result['rounds']} rounds; ConvTranspose2d in both formats",
        "what", "ours ms", *(f"{layout} ms" for layout in FORMATS), *(f"{layout} / ours" for layout in FORMATS),
    )  # fmt: skip
    for row in result["rows"]:
        made.add_row(
            row["what"], f"{row['ms'][OURS]:.1f}", *(f"{row['ms'][layout]:.1f}" for layout in FORMATS),
            *(f"{row['to_ours'][layout]:.2f}" for layout in FORMATS),
        )  # fmt: skip
    return made
