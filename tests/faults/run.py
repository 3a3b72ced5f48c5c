"""Plants each fault of this folder in a copy of the source, and runs the unchanged tests on it: they must fail.

    python -m tests.faults.run [NAME ...]

A fault is a patch whose first line says what is wrong. The tests that start Ray or other processes for long are left
out, so what is caught is caught by the quick ones. The table says which test failed first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).resolve().parent
ROOT = FAULTS.parents[1]
#: In this order: what tests a step as it is taken comes first, and takes least time.
ROOMS = ("training", "privacy", "audit", "federation", "baselines", "moments")


@dataclass(frozen=True)
class Fault:
    """A patch and what it breaks."""

    patch: Path

    @property
    def name(self) -> str:
        return self.patch.stem

    @property
    def what(self) -> str:
        return self.patch.read_text(encoding="utf-8").partition("\n")[0]

    def plant(self, copy: Path) -> None:
        """Apply the patch to a copy of the source; a patch that does not fit any more is an error."""
        subprocess.run(["git", "apply", "--whitespace=nowarn", str(self.patch)], cwd=copy, check=True)


def faults() -> list[Fault]:
    """All of this folder."""
    return [Fault(patch) for patch in sorted(FAULTS.glob("*.patch"))]


def copied(folder: Path) -> Path:
    """A copy of the source as it stands, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def first_failure(copy: Path) -> str | None:
    """The first of the quick tests that fails on a copy, or None."""
    tests = copy / "tests"
    first = [tests / room for room in ROOMS]
    rest = [
        path for path in sorted(tests.iterdir()) if path not in first and (path.is_dir() or path.match("test_*.py"))
    ]
    paths = [str(path) for path in (*first, *rest)]  # each once: pytest would go through a parent in its own order
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not slow", *paths],
        cwd=copy, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return found[1]


def main() -> int:
    """Run the faults asked for, print a row each, and give the number of those that no test found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all faults if left out")
    wanted = parser.parse_args().names
    chosen = [fault for fault in faults() if not wanted or fault.name in wanted]
    if unknown := set(wanted) - {fault.name for fault in chosen}:
        parser.error(f"no fault {', '.join(sorted(unknown))}; there are {', '.join(f.name for f in faults())}")
    print("| fault | what is wrong | first test that fails | seconds |\n|---|---|---|---|", flush=True)
    missed = 0
    for fault in chosen:
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            copy = copied(Path(folder))
            fault.plant(copy)
            began = time.monotonic()
            failure = first_failure(copy)
        missed += failure is None
        shown = f"`{failure}`" if failure else "**none**"
        print(f"| `{fault.name}` | {fault.what} | {shown} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
