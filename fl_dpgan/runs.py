"""A run's folder: the scenario as used, the checkpoint, the round log, and what was made of them."""

import hashlib
import json
import platform
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL.Image import Image
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fl_dpgan.config import Federation, Scenario, Settings, one_line, parse_scenario, validated
from fl_dpgan.errors import RunFolderError
from fl_dpgan.files import write_atomically
from fl_dpgan.privacy.accountant import Mechanism
from fl_dpgan.run_records import ASKED, RUN_NAME, Meta, Round
from fl_dpgan.text import printable

_VERSIONS = ("fl-dpgan", "flwr", "ray", "torch", "torchvision", "opacus", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """Paths and files of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, settings: Scenario | Federation) -> "RunFolder":
        """Make the folder and note the scenario or federation, seeds and versions.

        Raises:
            RunFolderError: the folder holds something already.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(f"{path} is not empty; give another --out, or --resume to continue the run in it")
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            versions = {"python": platform.python_version(), **{name: _version(name) for name in _VERSIONS}}
            kind = "scenario" if isinstance(settings, Scenario) else "federation"
            used = {"run": _run_name(settings), kind: settings.model_dump(mode="json"), "versions": versions}
            write_atomically(folder.path / "scenario.json", (json.dumps(used, indent=2) + "\n").encode())
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror}; give another --out") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run.

        Raises:
            RunFolderError: there is none at this path.
        """
        if not (path / "scenario.json").is_file():
            raise RunFolderError(f"{path} holds no run; give the folder that `--out` named when it began")
        return cls(path)

    @property
    def run(self) -> str:
        """The run's name at the sites, which keep its share of their budgets by it.

        Raises:
            RunFolderError: an older version began the run, or its file is damaged.
        """
        stored = self._stored
        if "run" not in stored:
            raise RunFolderError(f"{self.path} was begun by an older version; it can be read, and not continued")
        if not isinstance(stored["run"], str) or not re.fullmatch(RUN_NAME, stored["run"]):
            raise RunFolderError(f"{self.path / 'scenario.json'} is damaged (run); put back a copy of it")
        return stored["run"]

    @property
    def settings(self) -> Settings:
        """The scenario or federation as used."""
        stored, file = self._stored, self.path / "scenario.json"
        if "federation" in stored:
            return validated(Federation, stored["federation"], file)
        return parse_scenario(stored["scenario"])

    @property
    def _stored(self) -> dict[str, Any]:
        file = self.path / "scenario.json"
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(stored, dict) or not ({"scenario", "federation"} & stored.keys()):
                raise ValueError("neither a scenario nor a federation in it")
            return stored
        except (ValueError, RecursionError, OSError) as error:
            raise RunFolderError(f"{file} is damaged ({_problem(error)}); the run cannot be read") from error

    @property
    def scenario(self) -> Scenario:
        """A simulation's scenario as used.

        Raises:
            RunFolderError: the run had real sites, or its settings cannot be read.
        """
        settings = self.settings
        if not isinstance(settings, Scenario):
            raise RunFolderError(
                f"{self.path} is a run of real sites, whose images are not here; this needs a simulation"
            )
        return settings

    @property
    def shards(self) -> Path:
        """Where a simulation's records lie while it runs."""
        return self.path / "shards"

    def ledger(self, site: str) -> Path:
        """Where a site of this name keeps its ledger in a simulation."""
        return self.path / "ledgers" / f"{site}.sqlite"

    def save_checkpoint(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Replace the checkpoint: one file of safetensors, JSON in its header; a crash leaves the old or the new.

        Raises:
            RunFolderError: it cannot be written, here as in all that follows.
        """
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with self._writing():
            write_atomically(self.path / "checkpoint.safetensors", save(plain, metadata={"fl_dpgan": json.dumps(meta)}))
            (self.path / "asked.json").unlink(missing_ok=True)  # the checkpoint counts it

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint's tensors and JSON; None before the first.

        Raises:
            RunFolderError: the file is truncated or not a checkpoint.
        """
        with self._checkpoint("pt") as stored:
            if stored is None:
                return None
            return {name: stored.get_tensor(name) for name in stored.keys()}, _meta(stored)  # noqa: SIM118

    def checkpoint_meta(self) -> dict[str, Any]:
        """The last checkpoint's JSON, without its tensors; empty before the first. Errors as for `load_checkpoint`."""
        with self._checkpoint("np") as stored:
            return {} if stored is None else _meta(stored)

    @contextmanager
    def _checkpoint(self, framework: str) -> Iterator[Any]:
        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            yield None
            return
        try:
            with safe_open(file, framework=framework) as stored:
                yield stored
        except Exception as error:  # safetensors raises whatever a strange type or shape brings about
            said = _problem(error)
            raise RunFolderError(
                f"{file} is damaged ({said}); put back a copy of the same round (sites answer none twice), or start a "
                "new run in another --out"
            ) from error

    def note_asked(self, mechanism: Mechanism, sites: dict[str, dict[str, Any]]) -> None:
        """Keep, on disk, what is about to be asked of which sites, who may charge it whatever becomes of this process.

        Args:
            sites: by name, what a checkpoint would keep of each.
        """
        asked = [*self.asked(), [mechanism, sites]]
        with self._writing():
            write_atomically(self.path / "asked.json", json.dumps(asked).encode())

    def asked(self) -> list[tuple[Mechanism, dict[str, dict[str, Any]]]]:
        """What was asked since the last checkpoint.

        Raises:
            RunFolderError: the file is damaged.
        """
        file = self.path / "asked.json"
        if not file.exists():
            return []
        try:
            content = file.read_bytes()
            ASKED.validate_json(content)
            return [(mechanism, sites) for mechanism, sites in json.loads(content)]
        except (ValueError, RecursionError, OSError) as error:
            raise RunFolderError(f"{file} is damaged ({_problem(error)}); put back a copy of it") from error

    def save_grid(self, grid: Image, round_number: int) -> None:
        """Keep a sample grid of this round's generator."""
        folder = self.path / "samples"
        with self._writing():
            folder.mkdir(exist_ok=True)
            grid.save(folder / f"round-{round_number:04d}.png")

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The round log's lines; what is no record, as a line that a crash cut short, is passed over."""
        file = self.path / "rounds.jsonl"
        for line in file.read_bytes().split(b"\n") if file.exists() else []:
            try:
                Round.model_validate_json(line)
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue

    def log_round(self, record: dict[str, Any]) -> None:
        """Append one round to the log."""
        with self._writing(), (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def cut_log(self, last_round: int) -> None:
        """Drop the lines after the checkpoint's round; those rounds are done again."""
        kept = [json.dumps(record) + "\n" for record in self.rounds() if record["round"] <= last_round]
        with self._writing():
            write_atomically(self.path / "rounds.jsonl", "".join(kept).encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What keeps a run from writing (a full disk, say) stops it where it can be continued, and says so."""
        try:
            yield
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written: {error.strerror or error}; make room or mend the disk, then continue "
                "the run from its checkpoint"
            ) from error


def _meta(stored: Any) -> dict[str, Any]:
    text = (stored.metadata() or {})["fl_dpgan"]
    Meta.model_validate_json(text)
    found: dict[str, Any] = json.loads(text)
    return found


def _problem(error: Exception) -> str:
    """What is wrong with a file, on a line; it may quote what stands there."""
    return one_line(error) if isinstance(error, ValidationError) else printable(str(error), 300) or type(error).__name__


def _run_name(settings: Scenario | Federation) -> str:
    """A simulation's name follows from its scenario; each start of a real federation is a run of its own."""
    if isinstance(settings, Federation):
        return f"{settings.name}-{secrets.token_hex(6)}"
    return f"{settings.name}-{hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:12]}"


def _version(package: str) -> str:
    from fl_dpgan import __version__

    return __version__ if package == "fl-dpgan" else version(package)
