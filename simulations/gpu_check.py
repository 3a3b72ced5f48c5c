"""Checks fl_dpgan on a GPU and measures what it does there, in one run of a few minutes.

Run as `python -m simulations.gpu_check [--device cuda] [--seconds 420] [--json FILE]`. Each section has a share of the
seconds and measures nothing more when they are used up; one that fails is reported, and the others go on. The file is
written anew after each section. Exits with 1 where a section fails or the engines disagree, with 2 without the device.
With `--device cpu` the work is tiny and its figures mean nothing: it tries the script.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from fl_dpgan.config import EvaluationConfig, ModelConfig, Scenario, load_scenario
from fl_dpgan.data import load, partition, to_tensor
from fl_dpgan.evaluation.utility import accuracy, classifier_of
from fl_dpgan.federation.averaging import RunningMean
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.generator import GeneratorTrainer, adversarial
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records
from simulations.benchmarks import kinds
from simulations.benchmarks.step import random_batch

Row = dict[str, Any]

TOLERANCE = 1e-4  # as in `engines.fastest`
RAY_NEEDS = 40.0  # seconds without which Ray is not started
NO_TIME = "no time left"
FULL_PRECISION = partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=False)  # of convolutions on a GPU
OPACUS = {mode: partial(kinds.opacus, mode=mode) for mode in ("hooks", "ew", "functorch", "ghost")}


@dataclass(frozen=True)
class Run:
    """Where a section works, and until when by `time.monotonic`."""

    device: torch.device
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether this is more than a trial of the script."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds that the section may still take."""
        return self.deadline - time.monotonic()

    @property
    def peak(self) -> float | None:
        """The most MiB that tensors took on the GPU at once."""
        return round(torch.cuda.max_memory_allocated(self.device) / 2**20, 1) if self.on_gpu else None

    def seconds(self, action: Callable[[], object]) -> float:
        """How long it takes, on the device too."""
        wait = partial(torch.cuda.synchronize, self.device) if self.on_gpu else lambda: None
        wait()
        began = time.perf_counter()
        action()
        wait()
        return time.perf_counter() - began


def machine(run: Run) -> list[Row]:
    """The device and the versions; which precision the library's convolutions take bears on agreement."""
    found = {"device": run.device, "CPU cores": os.cpu_count(), "torch threads": torch.get_num_threads()}
    if run.on_gpu:
        properties = torch.cuda.get_device_properties(run.device)
        found |= {"name": properties.name, "memory GiB": round(properties.total_memory / 2**30, 1)}
    found |= {"torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    found |= {package: _version(package) for package in ("opacus", "flwr", "ray")}
    found |= {"TF32 in convolutions": torch.backends.cudnn.allow_tf32}
    return [{"what": what, "value": str(value)} for what, value in found.items()]


def agreement(run: Run) -> list[Row]:
    """How far our engine's sums without noise are from those of Opacus' hooks, as a share of their norm."""
    rows: list[Row] = []
    for width in (32, 64) if run.on_gpu else (2, 4):
        usual, engine = _disagreement(width, run), _engine(width, run)
        with FULL_PRECISION():
            exact = _disagreement(width, run)
        rows.append({"D": width, "difference": f"{usual:.1e}", "agree": usual <= TOLERANCE,
                     "difference in full precision": f"{exact:.1e}", "a site takes": engine})  # fmt: skip
    return rows


def d_steps(run: Run) -> list[Row]:
    """Median milliseconds of a D step, plain and private, our way and in each of Opacus' modes."""
    steps: dict[str, Callable[..., kinds.Step]] = {"plain": kinds.plain}
    steps |= {"ours": partial(kinds.ours, noise=1.0), "ours, no noise": partial(kinds.ours, noise=0.0)}
    steps |= {mode: partial(kind, noise=1.0) for mode, kind in OPACUS.items()}
    return [
        {"D": width, "2B": samples, "step": name, **_timed(kind, width, samples, run)}
        for width in ((32, 64) if run.on_gpu else (2, 4))
        for samples in ((256, 1024) if run.on_gpu else (16, 32))
        for name, kind in steps.items()
    ]


def many_sites(run: Run) -> list[Row]:
    """D steps per second of a pack: one site after the other takes the networks that a process shares."""
    privacy = PrivacyConfig(batch_size=8, noise_multiplier=1.0)
    plan, models = SitePlan.derive(privacy, declared_size=60, d_steps=5, rounds=30), _models(ModelConfig(), 0, run)
    d, start = models.discriminator, copy.deepcopy(models.discriminator.state_dict())

    def answer(number: int, data: Records) -> None:
        d.load_state_dict(start)
        random = KeyedGenerator.from_seed(0, number)
        local_update(d, models.generator, kinds.adam(d), data, plan, first_step=0, random=random, engine=models.engine)

    rows: list[Row] = []
    for sites in (10, 100, 1000) if run.on_gpu else (2, 5):
        pixels = torch.randint(256, (sites, 60, 1, 28, 28), dtype=torch.uint8).to(run.device)
        data = [Records(images, torch.arange(60, device=run.device) % 10) for images in pixels]
        answer(-1, data[0])
        done, seconds = 0, 0.0
        while done < sites and run.left > 0:
            seconds += run.seconds(partial(answer, done, data[done]))
            done += 1
        rate = {"sites x D steps per second": round(plan.d_steps * done / seconds, 1)} if done else {}
        rows.append({"sites": sites, "answered": done, **rate, "peak memory MiB": run.peak,
                     "note": NO_TIME if done < sites else None})  # fmt: skip
    return rows


def training(run: Run) -> list[Row]:
    """A run on the digits without Flower, as long as half of the time allows, and its CNN accuracy."""
    if run.left < 0:
        return [{"note": NO_TIME}]
    tiny = ["training.d_steps=1", "training.g_steps=1", "privacy.batch_size=8", "model.d_width=2", "model.g_width=2"]
    settings, evaluation = ([], EvaluationConfig()) if run.on_gpu else (tiny, EvaluationConfig(images=100, epochs=1))
    first = load_scenario("digits", [*settings, "training.rounds=1"])
    _trained(first, run)  # the first round on a device takes longer
    half, one = run.left / 2, run.seconds(lambda: _trained(first, run))
    rounds = min(max(int(half / one), 1), load_scenario("digits").training.rounds if run.on_gpu else 2)
    scenario = load_scenario("digits", [*settings, f"training.rounds={rounds}"])
    began = time.monotonic()
    generator = _trained(scenario, run).cpu()  # as `fl-dpgan evaluate` has it: `draw` makes its numbers there
    seconds = time.monotonic() - began
    cnn, test = classifier_of(generator, evaluation, seed=0), load("digits", split="test", size=28, channels=1)
    share = accuracy(cnn, to_tensor(test.images), torch.from_numpy(test.labels))
    return [{"rounds": rounds, "seconds per round": round(seconds / rounds, 3), "CNN accuracy": round(share, 4),
             "synthetic images": evaluation.images, "peak memory MiB": run.peak}]  # fmt: skip


def simulation(run: Run) -> list[Row]:
    """Flower's simulation of four sites that share the GPU, in a process of its own, which can be ended."""
    for lacking, why in (
        (not run.on_gpu, "no GPU to share"), (not _version("ray"), "Ray is not installed"),
        (run.left < RAY_NEEDS, NO_TIME),
    ):  # fmt: skip
        if lacking:
            return [{"note": f"skipped: {why}"}]
    settings = ("federation.sites=4", "data.declared_size=359", "training.rounds=2", "simulation.gpu_fraction=0.25")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, errors, most = Path(folder) / "run", Path(folder) / "stderr", 0
        command = [sys.executable, "-m", "fl_dpgan.cli", "simulate", "digits", f"--out={out}"]
        command += [f"--set={setting}" for setting in settings]
        began, (free, _) = time.monotonic(), torch.cuda.mem_get_info(run.device)
        with errors.open("wb") as log, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as running:
            while running.poll() is None and run.left > 0:
                most = max(most, free - torch.cuda.mem_get_info(run.device)[0])
                time.sleep(0.2)
            running.kill()  # what it started goes with it (`fl_dpgan.federation.reaper`)
        took = time.monotonic() - began
        rows = [{"round": record["round"], "seconds": record["seconds"],
                 "sites trained": sum(site["status"] == "trained" for site in record["sites"].values())}
                for record in RunFolder(out).rounds() if "seconds" in record]  # fmt: skip
        if running.returncode:
            reason = NO_TIME if run.left <= 0 else errors.read_text(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"after {took:.0f} s and {len(rows)} rounds: {reason}")
    return [*rows, {"note": f"{took:.0f} s in all; the memory in use rose by up to {most >> 20} MiB"}]


#: Title, share of the seconds, and what it measures.
SECTIONS: dict[str, tuple[str, float, Callable[[Run], list[Row]]]] = {
    "machine": ("1. The machine", 0.0, machine),
    "agreement": ("2a. Our engine beside Opacus' hooks, without noise (at most 1e-4)", 0.05, agreement),
    "steps": ("2b. A D step: labels at the input, 28 x 28, fp32, Adam included", 0.25, d_steps),
    "sites": ("3. Sites of 60 records in one process, B = 8, 5 D steps each", 0.25, many_sites),
    "training": ("4. The digits scenario without Flower", 0.2, training),
    "simulation": ("5. The digits scenario on Flower and Ray, 4 sites on one GPU", 0.25, simulation),
}


def _models(model: ModelConfig, seed: int, run: Run) -> Models:
    """The networks on the device. The engine is chosen in full precision; the table of 2a tells what a site takes."""
    with FULL_PRECISION():
        return Models(*from_config(model, seed), device=run.device)


def _engine(width: int, run: Run) -> str:
    try:
        networks = from_config(ModelConfig(d_width=width, d_labels="input"), 0)
        return Models(*networks, device=run.device).engine.__name__
    except Exception as error:
        return _first_line(error)


def _made(kind: Callable[..., kinds.Step], width: int, samples: int, run: Run) -> tuple[nn.Module, kinds.Step]:
    """A D on the device and a step on it, the same each time but for noise."""
    _, d = from_config(ModelConfig(d_width=width, d_labels="input"), 0)
    images, labels, targets = (part.to(run.device) for part in random_batch(samples))
    return d.to(run.device), kind(d, (images, labels, targets))


def _disagreement(width: int, run: Run) -> float:
    gradients = []
    for kind in (kinds.ours, OPACUS["hooks"]):
        d, take = _made(partial(kind, noise=0.0), width, 256 if run.on_gpu else 16, run)
        take()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in d.parameters()]))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def _timed(kind: Callable[..., kinds.Step], width: int, samples: int, run: Run) -> Row:
    """Median milliseconds of a step of this kind, or why there are none."""
    if run.left < 0:
        return {"note": NO_TIME}
    try:
        _, take = _made(kind, width, samples, run)
        warmed_up = [run.seconds(take) for _ in range(18 if run.on_gpu else 10)][3:]
        return {"ms": round(1000 * statistics.median(warmed_up), 3)}
    except Exception as error:  # one of Opacus' modes may not take this D
        return {"note": _first_line(error)}


def _trained(scenario: Scenario, run: Run) -> nn.Module:
    """The EMA of G after the scenario's rounds in this process; every site keeps its optimiser, as `Site` does."""
    training, seed, plan = scenario.training, scenario.seed, scenario.site_plan(scenario.declared_size(0))
    images = load(scenario.data.source, split="train", size=28, channels=1)
    models = _models(scenario.model, seed, run)
    generator, average = models.generator, models.discriminator
    trainer = GeneratorTrainer(generator, ema_decay=training.ema_decay)
    rates = [training.g_learning_rate] * training.g_steps
    sites: list[tuple[Records, nn.Module, torch.optim.Optimizer]] = []
    for part in partition(images.labels, kind="iid", num_sites=scenario.federation.sites, seed=seed):
        pixels, labels = (torch.from_numpy(array[part]).to(run.device) for array in (images.images, images.labels))
        d = copy.deepcopy(average)
        optimizer = torch.optim.Adam(d.parameters(), lr=training.d_learning_rate, betas=(0.5, 0.99))
        sites.append((Records(pixels, labels), d, optimizer))
    for number in range(training.rounds):
        mean = RunningMean()
        for index, (data, d, optimizer) in enumerate(sites):
            d.load_state_dict(average.state_dict())
            local_update(d, generator, optimizer, data, plan, first_step=number * plan.d_steps,
                         random=KeyedGenerator.from_seed(seed, index, number), engine=models.engine)  # fmt: skip
            mean.add(d.state_dict(), plan.declared_size)
        average.load_state_dict(mean.result())
        trainer.update(adversarial(average), rates, batch_size=training.g_batch_size, seed=number)
    return trainer.average


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _table(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if row.get(column) is None else str(row[column]) for column in columns))
    return table


def check(device: torch.device, seconds: float, file: Path | None) -> int:
    """Run every section, print its table, and give the exit code."""
    console, began, shares = Console(width=140), time.monotonic(), 0.0
    report: dict[str, list[Row]] = {}
    for key, (title, share, measure) in SECTIONS.items():
        shares += share  # what a section leaves is for the next one
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            report[key] = measure(Run(device, began + seconds * shares))
        except Exception as error:  # the device may be lent once: the other sections are wanted all the same
            traceback.print_exc()
            report[key] = [{"failed": _first_line(error)}]
        console.print(title, _table(report[key]), sep="\n")
        if file:
            file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return int(any("failed" in row or row.get("agree") is False for rows in report.values() for row in rows))


def main(
    device: str = "cuda",
    seconds: float = 420.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go as well.")] = None,
) -> None:
    """Check fl_dpgan on the device, and measure what it does there."""
    warnings.filterwarnings("ignore")  # PyTorch's and Opacus' own; a fault shows in the tables
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        print("PyTorch finds no CUDA GPU here; --device cpu tries the script itself", file=sys.stderr)
        raise typer.Exit(2)
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)  # for such tiny work the threads would wait for each other
    raise typer.Exit(check(torch.device(device), seconds, json_file))


if __name__ == "__main__":
    typer.run(main)
