"""Times a round of many sites: our simulation against Flower's with Opacus in each site, each run a process of its own.

Ray's start is on neither side: ours is the round log's seconds from the second round on, with charging and storing
and one G step in them; stock's is its own count after a short first round. Stock takes the Opacus mode and the memory
format of G that are the fastest here; both are measured first.
"""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

from rich.table import Table

from simulations.benchmarks import stock
from simulations.benchmarks.common import (
    ROOT,
    Result,
    fastest,
    interleaved,
    milliseconds,
    scratch,
    table,
    torch_threads,
)
from simulations.benchmarks.simulated import round_seconds, simulate, sites_per_node, write_images


def settings_of_stock(width: int, rounds: int = 5) -> Result:
    """Opacus' mode and G's memory format of the smallest medians: of a D step with its wrapping, and of B fakes."""
    data = stock.site_data(1)[0]
    with torch_threads(1):
        d = {mode: stock.Discriminator(width) for mode in get_args(stock.Mode)}
        g = {layout: stock.generator(layout) for layout in stock.FORMATS}
        fakes = interleaved({name: partial(stock.fakes, network) for name, network in g.items()}, rounds)
        layout = fastest(fakes)
        steps = interleaved(
            {name: partial(_steps, network, g[layout], data, name) for name, network in d.items()}, rounds
        )
    return {
        "mode": fastest(steps), "layout": layout,
        "ms_of_2_d_steps": {name: milliseconds(taken) for name, taken in steps.items()},
        "ms_of_fakes": {name: milliseconds(taken) for name, taken in fakes.items()},
    }  # fmt: skip


def _steps(d: stock.Discriminator, g: stock.Generator, data: object, mode: stock.Mode) -> None:
    """Two steps of a site, on a D as it comes in a message."""
    mine = stock.Discriminator(d.layers[0].out_channels)
    mine.load_state_dict(d.state_dict())
    stock.train(mine, g, data, 2, mode)


def run_ours(folder: Path, data: Path, sites: int, d_steps: int, rounds: int, width: int) -> list[float]:
    """Seconds of each round, the first one included."""
    _run(
        simulate(
            folder, data, sites=sites, records=stock.RECORDS, batch_size=stock.BATCH, d_steps=d_steps,
            rounds=rounds + 1, settings=("model.d_labels=input", f"model.d_width={width}"),
        )
    )  # fmt: skip
    return round_seconds(folder, sites)


def run_stock(sites: int, d_steps: int, rounds: int, width: int, mode: str, layout: str) -> list[float]:
    """Seconds of each round, a short first one left out."""
    options = {"sites": sites, "d-steps": d_steps, "rounds": rounds, "width": width, "mode": mode, "layout": layout}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    printed = _run([sys.executable, "-m", "simulations.benchmarks.stock", *arguments])
    found: list[float] = json.loads(printed.strip().splitlines()[-1])
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-2000:]}")
    return done.stdout


def measure(sites: int, d_steps: int, rounds: int, repeats: int, width: int) -> Result:
    """Seconds of the rounds of each run, ours and stock's by turns."""
    peer = settings_of_stock(width)
    runs: Result = {"ours": [], "ours_first_round": [], "stock": []}
    with scratch() as folder:
        data = folder / "images.npz"
        write_images(data, sites * stock.RECORDS)
        for number in range(repeats):
            first, *others = run_ours(folder / f"run-{number}", data, sites, d_steps, rounds, width)
            runs["ours_first_round"].append(first)
            runs["ours"].append(others)
            runs["stock"].append(run_stock(sites, d_steps, rounds, width, peer["mode"], peer["layout"]))
    medians = {name: [statistics.median(run) for run in runs[name]] for name in ("ours", "stock")}
    return {
        "sites": sites, "d_steps": d_steps, "batch_size": stock.BATCH, "records": stock.RECORDS, "width": width,
        "sites_per_node": sites_per_node(sites), "stock_settings": peer, "seconds": runs,
        "ours_median": statistics.median(medians["ours"]), "stock_median": statistics.median(medians["stock"]),
        "stock_to_ours": statistics.median(s / o for s, o in zip(medians["stock"], medians["ours"], strict=True)),
    }  # fmt: skip


def render(result: Result) -> Table:
    """A row for each side."""
    made = table(
        f"A round: {result['sites']} sites x {result['d_steps']} D steps of B = {result['batch_size']}, D of "
        f"{result['width']}, {2 * result['width']}; medians of {len(result['seconds']['ours'])} runs, by turns",
        "what", "s a round", "ms per site and step", "times ours", "s, each run's median",
    )  # fmt: skip
    peer = result["stock_settings"]
    stock_name = f"Flower + Opacus ({peer['mode']}; G {peer['layout']})"
    for name, key in (("ours", "ours"), (stock_name, "stock")):
        seconds, times = result[f"{key}_median"], result["stock_to_ours"] if key == "stock" else 1.0
        each = ", ".join(f"{statistics.median(run):.2f}" for run in result["seconds"][key])
        per_step = 1000 * seconds / (result["sites"] * result["d_steps"])
        made.add_row(name, f"{seconds:.2f}", f"{per_step:.2f}", f"{times:.2f}", each)
    first = result["seconds"]["ours_first_round"]
    made.add_row("ours, first round", f"{statistics.median(first):.2f}", "", "", ", ".join(f"{s:.2f}" for s in first))
    return made
