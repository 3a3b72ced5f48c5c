"""The machine: room on its disks, memory, and a clock that is kept right."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fl_dpgan.checks.finding import Finding, failed, ok, warning

_MB, _GB = 10**6, 10**9
#: Beside what is needed: a log, a snapshot, another program.
_SPARE = _GB
#: A guard with PyTorch before it trains, and one pass of D; as a simulation's process takes them.
_PROCESS = 900 * _MB


def check_disk(needs: Sequence[tuple[Path, int]]) -> Finding:
    """Whether the disks have room for what will be written: (folder or file, bytes), where it need not be there yet."""
    by_disk: dict[int, tuple[Path, int]] = {}
    for path, need in needs:
        place = _existing(path)
        disk = place.stat().st_dev
        by_disk[disk] = (place, by_disk.get(disk, (place, 0))[1] + need)
    lines, worst = [], "ok"
    for place, need in by_disk.values():
        free = shutil.disk_usage(place).free
        lines.append(f"{size(need)} needed of {size(free)} free at {place}")
        worst = "failed" if free < need else "warning" if free < need + _SPARE and worst == "ok" else worst
    found = ", ".join(lines)
    if worst == "ok":
        return ok("disk", found)
    remedy = "free some space, or move data.cache and ledger of site.toml to a larger disk"
    return failed("disk", found, remedy) if worst == "failed" else warning("disk", found, remedy)


def site_needs(cache: Path, ledger: Path, *, images: int, networks: int, rounds: int) -> list[tuple[Path, int]]:
    """What a site writes: its images, unless they are in the cache already, and its ledger.

    Args:
        images, networks: their bytes. rounds: of a run.
    """
    try:
        there = sum(file.stat().st_size for file in cache.glob("*/images.npy"))
    except OSError:
        there = 0
    # an answer with D and its optimiser's state is replaced, and lies in SQLite's log too; an entry takes about 1 kB
    return [(cache, max(0, images - there)), (ledger, 8 * networks + 4_000 * rounds)]


def check_memory(available: int, *, images: int, networks: int) -> Finding:
    """Whether the guard fits: the process, the networks with gradients and moments, and the images."""
    least = _PROCESS + 10 * networks
    found = f"about {size(least + images)} needed, {images / _MB:.0f} MB of it images; {size(available)} free"
    remedy = "end other programs, or give the machine more memory"
    if available < least:
        return failed("memory", found, remedy)
    if available < least + images:  # the images are mapped from the cache, and may come from the disk each time
        return warning("memory", found, f"training will be slow: {remedy}")
    return ok("memory", found)


def free_memory() -> int:
    """Bytes that programs may take without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def check_synchronised(answer: str | None) -> Finding:
    """Whether the clock is kept right by the network, as `timedatectl` says."""
    remedy = "set up chrony or systemd-timesyncd: Flower refuses nodes whose clocks differ by more than 5 s"
    if answer == "yes":
        return ok("clock", "synchronised (timedatectl)")
    if answer == "no":
        return warning("clock", "not synchronised (timedatectl)", remedy)
    return warning("clock", "not known whether it is synchronised", remedy)


def ask_timedatectl() -> str | None:
    """`yes` or `no`; None where nobody can tell."""
    command = ["timedatectl", "show", "--property", "NTPSynchronized", "--value"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def size(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{-(-count // _MB)} MB"


def _existing(path: Path) -> Path:
    """The path, or its nearest folder that is there."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
