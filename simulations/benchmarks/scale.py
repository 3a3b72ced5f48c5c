"""Measures how a simulation grows with its sites: seconds a round, and the peak memory of all its processes."""

import subprocess
import time
from pathlib import Path

import psutil
from rich.table import Table

from simulations.benchmarks.common import ROOT, Result, scratch, table
from simulations.benchmarks.simulated import round_seconds, simulate, sites_per_node, write_images

RECORDS, BATCH, D_STEPS, ROUNDS = 60, 8, 5, 2
_EVERY = 0.5  # seconds between two looks at the memory


def measure(numbers: list[int], data_dir: Path | None) -> Result:
    """A row per number of sites; random images where no folder of MNIST is given."""
    with scratch() as folder:
        data = data_dir.absolute() if data_dir else folder / "images.npz"
        if not data_dir:
            write_images(data, max(numbers) * RECORDS)
        rows = [_row(folder, data, sites) for sites in numbers]
    return {
        "records": RECORDS, "batch_size": BATCH, "d_steps": D_STEPS,
        "data": "MNIST" if data_dir else "random", "rows": rows,
    }  # fmt: skip


def _row(folder: Path, data: Path, sites: int) -> Result:
    out = folder / f"run-{sites}"
    command = simulate(out, data, sites=sites, records=RECORDS, batch_size=BATCH, d_steps=D_STEPS, rounds=ROUNDS)
    with (folder / "output.txt").open("w+", encoding="utf-8") as output:
        began = time.perf_counter()
        running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        peak = watched(running)
        whole = time.perf_counter() - began
        if running.returncode:
            output.seek(0)
            raise RuntimeError(f"{sites} sites: the simulation failed:\n{output.read()[-2000:]}")
    first, second = round_seconds(out, sites)
    return {
        "sites": sites, "sites_per_node": sites_per_node(sites), "seconds": whole, "first_round": first,
        "second_round": second, "site_steps_per_second": sites * D_STEPS / second,
        "ms_per_site_step": 1000 * second / (sites * D_STEPS), "peak_bytes": peak,
    }  # fmt: skip


def watched(running: subprocess.Popen[bytes]) -> int:
    """Wait for the process to end; gives the peak of its and its descendants' memory, in bytes."""
    peak, root = 0, psutil.Process(running.pid)
    while True:
        peak = max(peak, _memory(root))
        try:
            running.wait(_EVERY)
            return peak
        except subprocess.TimeoutExpired:
            continue


def _memory(root: psutil.Process) -> int:
    """PSS of the process tree: a page that n processes share counts a n-th in each."""
    total = 0
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in family:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
            continue
    return total


def render(result: Result) -> Table:
    """A row per number of sites."""
    made = table(
        f"A simulation by its sites: {result['records']} records each ({result['data']}), {result['d_steps']} D steps "
        f"of B = {result['batch_size']}",
        "sites", "a node", "whole command s", "round 1 s", "round 2 s", "site-steps / s", "ms per site-step",
        "peak memory GB",
    )  # fmt: skip
    for row in result["rows"]:
        made.add_row(
            str(row["sites"]), str(row["sites_per_node"]), f"{row['seconds']:.1f}", f"{row['first_round']:.2f}",
            f"{row['second_round']:.2f}", f"{row['site_steps_per_second']:.0f}", f"{row['ms_per_site_step']:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )  # fmt: skip
    return made


def draw(result: Result, file: Path) -> None:
    """Seconds a round and peak memory against the number of sites, 900 x 400 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    rows = result["rows"]
    sites = [row["sites"] for row in rows]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), dpi=100, layout="constrained")
    curves = (
        ("Seconds per round (the second)", "seconds", [row["second_round"] for row in rows]),
        ("Peak memory of all processes", "GB (PSS)", [row["peak_bytes"] / 1e9 for row in rows]),
    )
    for panel, (title, unit, values) in zip(panels, curves, strict=True):
        panel.loglog(sites, values, marker="o")
        panel.set(title=title, xlabel="sites", ylabel=unit)
        panel.set_xticks(sites, [str(number) for number in sites])
        panel.set_ylim(min(values) / 2, max(values) * 2)
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(ScalarFormatter())
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter(NullFormatter())
        for x, y in zip(sites, values, strict=True):
            panel.annotate(f"{y:.2g}", (x, y), textcoords="offset points", xytext=(0, 7), ha="center")
        panel.grid(True, alpha=0.3)
    figure.savefig(file)
    pyplot.close(figure)
