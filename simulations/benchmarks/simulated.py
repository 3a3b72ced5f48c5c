"""Runs of `fl-dpgan simulate` for the benchmarks: random images, the command, and what its round log says."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: sigma, C and the learning rate are those of `stock`.
SETTINGS = (
    "data.partition=size", "data.allow_missing_classes=true",
    "privacy.noise_multiplier=1.0", "privacy.eps_max=1000", "privacy.clipping={rule='fixed', c=1.0}",
    "training.g_steps=1", "training.d_learning_rate=5e-4", "federation.quorum=1", "federation.round_timeout=7200",
)  # fmt: skip


def command() -> list[str]:
    """The command line as it is installed beside this Python; else as a module."""
    installed = Path(sys.executable).parent / "fl-dpgan"
    return [str(installed)] if installed.is_file() else [sys.executable, "-m", "fl_dpgan.cli"]


def write_images(path: Path, count: int, classes: int = 10) -> None:
    """Random 28 x 28 images with balanced labels, in MedMNIST's layout."""
    random, arrays = np.random.default_rng(0), {}
    for split, size in (("train", count), ("test", classes)):
        arrays[f"{split}_images"] = random.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(size)[:, None] % classes
    np.savez(path, **arrays)


def sites_per_node(sites: int) -> int:
    """So many that there are about 20 nodes: each has a message a round, and a core should not wait for the last."""
    return -(-sites // 20)


def simulate(
    out: Path,
    data: Path,
    *,
    sites: int,
    records: int,
    batch_size: int,
    d_steps: int,
    rounds: int,
    settings: Sequence[str] = (),
) -> list[str]:
    """The command that simulates so many sites of so many records; `data` is an NPZ file or MNIST's folder."""
    overrides = [
        *SETTINGS, *settings, f"data.source={'npz' if data.suffix == '.npz' else 'mnist'}",
        f"data.sizes={[records] * sites}", f"data.declared_size={records}", f"privacy.batch_size={batch_size}",
        f"training.d_steps={d_steps}", f"training.rounds={rounds}",
        f"federation.sites={sites}", f"federation.sites_per_node={sites_per_node(sites)}",
    ]  # fmt: skip
    options = [f"--set={override}" for override in overrides]
    return [*command(), "simulate", "digits", "--data-dir", str(data), "--out", str(out), *options]


def round_seconds(out: Path, sites: int) -> list[float]:
    """Seconds of each round; in every one all sites must have trained."""
    rounds: list[dict[str, Any]] = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for record in rounds:
        trained = sum(site["status"] == "trained" for site in record.get("sites", {}).values())
        if trained != sites:
            raise AssertionError(f"round {record['round']}: {trained} of {sites} sites trained")
    return [record["seconds"] for record in rounds]
