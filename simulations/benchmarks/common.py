"""What the benchmarks share: interleaved timing, medians, the machine's description, and how a result is kept."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Result = dict[str, Any]
Seconds = dict[str, list[float]]

ROOT = Path(__file__).resolve().parents[2]


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def interleaved(actions: dict[str, Callable[[], object]], rounds: int, *, following: bool = False) -> Seconds:
    """Seconds of each action, an entry per round; a slow moment of the machine hits all that are in its round.

    One more round comes first and is not counted: it builds what is built lazily. With `following`, each timed action
    comes right after one of its own kind, as a step does in training, and not after another's use of the caches.
    """
    found: Seconds = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            if following:
                action()
            seconds = timed(action)
            if number:
                found[name].append(seconds)
    return found


def ratio(found: Seconds, over: str, under: str) -> float:
    """Median over the rounds of the ratio within the round."""
    return statistics.median(a / b for a, b in zip(found[over], found[under], strict=True))


def fastest(found: Seconds, prefix: str = "") -> str:
    """The action of the smallest median, of those whose names begin so."""
    return min((name for name in found if name.startswith(prefix)), key=lambda name: statistics.median(found[name]))


def milliseconds(seconds: list[float]) -> float:
    """The median."""
    return 1000 * statistics.median(seconds)


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative L2 distance of all tensors together."""
    a, b = (torch.cat([part.detach().flatten() for part in parts]) for parts in (found, expected))
    return float((a - b).norm() / b.norm())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes afterwards; in the checkout, since /tmp may be memory, where fsync costs nothing."""
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=runs, prefix="benchmark-") as folder:
        yield Path(folder)


def table(title: str, *headings: str) -> Table:
    """An empty table, whose first column is text and whose others are figures."""
    made = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    return made


def environment() -> Result:
    """What a figure depends on beside the code's arguments."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "opacus", "flwr", "ray")},
    }


def show(name: str, result: Result, render: Callable[[Result], Table], started: Result, file: Path | None) -> None:
    """Print a result's table and what it was measured on; keep all of it in a JSON file where one is wanted."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(render(result))
    versions = ", ".join(f"{package} {number}" for package, number in started["versions"].items())
    console.print(
        f"{started['cpu']}, {started['cores']} cores, load {started['load'][0]:.1f} at the start; {versions}; "
        f"commit {started['commit']}, {started['date']}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    if file:
        kept = {"benchmark": name, "environment": started, **result}
        file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        console.print(f"{file} written", soft_wrap=True)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
