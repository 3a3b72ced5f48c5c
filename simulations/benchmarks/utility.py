"""Utility: runs of `fl-dpgan simulate` by method, data, epsilon and seed, the full suite on each, and Markdown tables.

Every run leaves one JSON file; a run whose file is there is not repeated, and one that was cut off goes on.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from fl_dpgan.config import Scenario, load_scenario
from fl_dpgan.data import ImageData, load, withhold
from fl_dpgan.errors import ConfigError
from fl_dpgan.evaluation.attacks import attack_run
from fl_dpgan.evaluation.suite import RealReference, evaluate_generator
from fl_dpgan.report.synthetic import run_generator
from fl_dpgan.runs import RunFolder
from simulations.benchmarks.common import ROOT, Result, environment
from simulations.benchmarks.simulated import command

RESULTS = ROOT / "simulations" / "results" / "utility"
#: The ceiling: the same classifiers trained on real images. Nothing is simulated for it.
REAL = "real"


@dataclass(frozen=True)
class Trial:
    """One run: a scenario, one of its methods, and what differs from the file."""

    scenario: str
    method: str
    epsilon: float
    seed: int
    settings: tuple[str, ...] = ()
    label: str = ""  # tells trials of other settings apart

    @property
    def name(self) -> str:
        """The name of its result."""
        parts = [self.scenario, self.method, f"eps{self.epsilon:g}", *([self.label] if self.label else [])]
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def overrides(self) -> list[str]:
        """What `simulate` is told with `--set`."""
        own = [] if self.method == REAL else [f"method={self.method}", f"privacy.eps_max={self.epsilon:g}"]
        return [*own, f"seed={self.seed}", *self.settings]

    @property
    def resolved(self) -> Scenario:
        """The scenario as it is run."""
        return load_scenario(self.scenario, self.overrides)


@dataclass
class Bench:
    """Where data, runs and results are. With `withheld`, the trials are tested on withheld training images."""

    data_dir: Path | None
    withheld: bool = False
    results: Path = RESULTS
    runs: Path = ROOT / "runs" / "utility"
    tell: Callable[[str], None] = print
    _references: dict[str, tuple[RealReference, float]] = field(default_factory=dict)

    def run(self, trial: Trial) -> Path:
        """Simulate and evaluate the trial, unless its result is there; gives the result's file."""
        file = self.results / f"{trial.name}{'-withheld' if self.withheld else ''}.json"
        scenario, started = trial.resolved, environment()
        if file.exists():
            if json.loads(file.read_text(encoding="utf-8"))["settings"] != scenario.model_dump(mode="json"):
                raise ConfigError(f"{file} is of other settings than these; give a --label, or move the file away")
            self.tell(f"{file.name}: there already")
            return file
        kept: Result = {
            "scenario": trial.scenario, "method": trial.method, "epsilon": trial.epsilon, "seed": trial.seed,
            "label": trial.label, "overrides": trial.overrides, "settings": scenario.model_dump(mode="json"),
            "tested_on": "withheld training images" if self.withheld else "test images", "environment": started,
        }  # fmt: skip
        reference, seconds = self._reference(trial, scenario)
        if trial.method == REAL:
            kept |= {"evaluation": reference.figures, "evaluation_cpu_seconds": seconds}
        else:
            kept |= self._simulated(trial, scenario, reference)
        self.results.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        self.tell(f"{file.name}: {_figures(kept)}")
        return file

    def _simulated(self, trial: Trial, scenario: Scenario, reference: RealReference) -> Result:
        folder = self.runs / trial.name
        wall, cpu = simulate(trial, folder, self.data_dir)
        run = RunFolder.open(folder)
        generator, meta = run_generator(run)
        began = time.process_time()
        found = evaluate_generator(generator, reference, scenario.evaluation, seed=scenario.seed)
        found.pop("real")
        if not self.withheld:  # the attacks' non-members are test images, which are read once, at the end
            found["membership"] = attack_run(run, generator, self.data_dir, seed=scenario.seed)
        spent = [record for record in run.rounds() if "epsilon_max" in record]
        return {
            "round": meta["round"], "wall_seconds": wall, "cpu_seconds": cpu,
            "epsilon_spent": spent[-1]["epsilon_max"] if spent else None,
            "evaluation": found, "evaluation_cpu_seconds": time.process_time() - began,
        }  # fmt: skip

    def _reference(self, trial: Trial, scenario: Scenario) -> tuple[RealReference, float]:
        """What real images reach: built once for a scenario and a seed."""
        key = f"{trial.scenario} {trial.seed}"
        if key not in self._references:
            began = time.process_time()
            train, test = self._images(scenario)
            made = RealReference.build(train, test, scenario.evaluation, seed=scenario.seed)
            self._references[key] = made, time.process_time() - began
        return self._references[key]

    def _images(self, scenario: Scenario) -> tuple[ImageData, ImageData]:
        data, model = scenario.data, scenario.model
        where = {"size": model.size, "channels": model.channels, "data_dir": self.data_dir}
        train, withheld = withhold(load(data.source, split="train", **where), data.withheld)
        return train, withheld if self.withheld else load(data.source, split="test", **where)


def simulate(trial: Trial, folder: Path, data_dir: Path | None) -> tuple[float, float | None]:
    """Run the trial in a process of its own, or go on with one that was cut off; gives wall and CPU seconds.

    CPU seconds are those of all its processes, Ray's among them, as seen once a second; None of a run that was cut off.

    Raises:
        ConfigError: the folder holds a run of other settings.
    """
    file = folder / "seconds.json"
    if (folder / "scenario.json").exists() and RunFolder.open(folder).scenario != trial.resolved:
        raise ConfigError(f"{folder} is a run of other settings than these; delete it, or give a --label")
    if file.exists():
        wall, cpu = json.loads(file.read_text())
        return wall, cpu
    options = [*(["--data-dir", str(data_dir)] if data_dir else []), "--out", str(folder)]
    if resumed := (folder / "checkpoint.safetensors").exists():
        arguments = ["simulate", "--resume", *options]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        arguments = ["simulate", trial.scenario, *options, *(f"--set={override}" for override in trial.overrides)]
    began, seconds = time.perf_counter(), {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([*command(), *arguments], stdout=subprocess.DEVNULL, stderr=errors) as running,
    ):
        while running.poll() is None:
            seconds |= _cpu_seconds(running.pid)
            time.sleep(1)
        errors.seek(0)
        if running.returncode:
            raise RuntimeError(f"{trial.name}: {errors.read().strip()}")
    rounds = [record["seconds"] for record in RunFolder.open(folder).rounds() if "seconds" in record]
    # of a run that was cut off, the rounds' seconds are all that is known of the first part
    wall = max(time.perf_counter() - began, sum(rounds))
    cpu = None if resumed else sum(seconds.values())
    file.write_text(json.dumps([wall, cpu]))
    return wall, cpu


def _cpu_seconds(pid: int) -> dict[tuple[int, float], float]:
    """CPU seconds so far of a process and all below it, by process."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
    return found


def trials(
    scenarios: Sequence[str], methods: Sequence[str], epsilons: Sequence[float], seeds: Sequence[int],
    settings: Sequence[str], label: str,
) -> Iterator[Trial]:  # fmt: skip
    """Every combination, one seed after the other, so that a series cut off has all rows once."""
    for seed, scenario, method, epsilon in product(seeds, scenarios, methods, epsilons):
        yield Trial(scenario, method, epsilon, seed, tuple(settings), label)


def results(folder: Path = RESULTS, *, withheld: bool = False) -> list[Result]:
    """The results on test images, or those on withheld ones."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return [one for one in found if (one["tested_on"] != "test images") == withheld]


#: Heading, section and key of each figure in the tables.
_COLUMNS = (
    ("mean", "utility", "mean_accuracy"), ("SVM", "utility", "svm_accuracy"), ("MLP", "utility", "mlp_accuracy"),
    ("CNN", "utility", "cnn_accuracy"), ("FID", "fidelity", "fid"), ("precision", "fidelity", "precision"),
    ("recall", "fidelity", "recall"), ("diversity, least", "fidelity", "diversity_min"),
    ("ASR FGSM", "robustness", "fgsm_success"), ("ASR PGD", "robustness", "pgd_success"),
)  # fmt: skip


def tables(found: Sequence[Result]) -> str:
    """Markdown: one table a scenario, a row a method, epsilon and label; mean and standard deviation over the seeds."""
    lines: list[str] = []
    for scenario in sorted({one["scenario"] for one in found}):
        lines += [f"**{scenario}**", ""]
        headings = ["method", "eps", *(heading for heading, _, _ in _COLUMNS), "seeds", "CPU s"]
        lines += [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        mine = [one for one in found if one["scenario"] == scenario]
        keys = sorted({(one["method"], one["epsilon"], one["label"]) for one in mine}, key=lambda key: _rank(mine, key))
        for method, epsilon, label in keys:
            same = [one for one in mine if (one["method"], one["epsilon"], one["label"]) == (method, epsilon, label)]
            figures = [_spread([one["evaluation"][section][key] for one in same]) for _, section, key in _COLUMNS]
            seeds = ", ".join(str(one["seed"]) for one in same)
            cpu = [one["cpu_seconds"] for one in same if one.get("cpu_seconds") is not None]
            shown = "-" if method in (REAL, "non-private") else f"{epsilon:g}"
            row = [_method(method, label), shown, *figures, seeds, f"{statistics.mean(cpu):.0f}" if cpu else "-"]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def attack_tables(found: Sequence[Result]) -> str:
    """Markdown: a row for each attack on each run; in brackets 95 % intervals, and the range of a coin's figures."""
    lines = ["| run | attack | against | AUC | TPR at 1 % FPR | resistance | a coin's |", "|---" * 7 + "|"]
    for one in found:
        method = _method(one["method"], one["label"])
        run = f"{one['scenario']}, {method}, eps {one['epsilon']:g}, seed {one['seed']}"
        for attack in one["evaluation"].get("membership", {}).get("attacks", []):
            figures = attack["statistics"]
            auc, rate, resistance = (figures[key] for key in ("auc", "tpr_at_fpr_0.01", "resistance"))
            coin = "{:.3f} to {:.3f}".format(*resistance["coin"]["range"])
            cells = [run, attack["attack"], attack["against"], _with_interval(auc), _with_interval(rate)]
            lines.append(f"| {' | '.join([*cells, _with_interval(resistance), coin])} |")
    return "\n".join(lines)


def _method(name: str, label: str) -> str:
    return f"{name}, {label}" if label else name


def _rank(found: Sequence[Result], key: tuple[str, float, str]) -> float:
    same = [one for one in found if (one["method"], one["epsilon"], one["label"]) == key]
    return -statistics.mean(one["evaluation"]["utility"]["mean_accuracy"] for one in same)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    digits = 3 if statistics.mean(known) < 10 else 1
    middle = f"{statistics.mean(known):.{digits}f}"
    return f"{middle} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else middle


def _with_interval(figure: dict[str, Any]) -> str:
    low, high = figure["interval"]
    return f"{figure['value']:.3f} ({low:.3f} to {high:.3f})"


def _figures(kept: Result) -> str:
    useful, close = kept["evaluation"]["utility"], kept["evaluation"]["fidelity"]
    parts = [
        f"{key.removesuffix('_accuracy')} {value:.4f}" for key, value in useful.items() if key.endswith("accuracy")
    ]
    fid = "-" if close["fid"] is None else f"{close['fid']:.2f}"
    return ", ".join([*parts, f"FID {fid}", f"{kept.get('wall_seconds', 0):.0f} s"])
