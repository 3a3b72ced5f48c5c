"""A federation's run at the SuperLink: started, followed to its end, and started again where it broke down."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fl_dpgan
from fl_dpgan.config import Federation, load_federation
from fl_dpgan.deploy.flower import CONNECTION, Runs, RunStatus, flwr, quoted
from fl_dpgan.deploy.server import ServerFolder
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.files import write_atomically
from fl_dpgan.runs import RunFolder

#: Errors that are the same at the next try; the ServerApp names the kind before its message.
_LASTING = ("ConfigError", "RunFolderError", "DataError")
_POLL = 2.0


def checkout(app: Path | None) -> Path:
    """The checkout from which Flower's bundle is built: `app`, or the one that this package lies in.

    Raises:
        ConfigError: there is none.
    """
    found = (app or Path(fl_dpgan.__file__).parents[1]).absolute()
    if not (found / "pyproject.toml").is_file() or not (found / "server" / "app.py").is_file():
        raise ConfigError(
            f"{found} is no checkout of fl-dpgan, from which Flower's bundle is built; give the checkout as --app"
        )
    return found


def continues(out: Path, federation: Federation) -> bool:
    """Whether the folder `out` holds this federation's run already.

    Raises:
        ConfigError: it holds a run of another description. RunFolderError: of which the file is damaged.
    """
    if not (out / "scenario.json").is_file():
        return False
    if RunFolder.open(out).settings.model_dump(mode="json") != federation.model_dump(mode="json"):
        raise ConfigError(
            f"the run in {out} began with another federation.toml; give the one that it began with, or another --out"
        )
    return True


@dataclass
class FollowedRun:
    """One run of a federation, which may take several starts of the ServerApp.

    Args:
        on_record: called with each line of the round log. on_note: called with what a person should know.
    """

    server: ServerFolder
    file: Path
    out: Path
    app: Path
    restarts: int
    on_record: Callable[[dict[str, Any]], None] = lambda record: None
    on_note: Callable[[str], None] = lambda note: None

    def __post_init__(self) -> None:
        self._runs = Runs(self.server.home)
        self._seen, self._changed = 0, -1
        self._id = ""

    def begin(self) -> None:
        """Start the run, or take it up where it is.

        Raises:
            ConfigError: the federation's file is faulty or not the run's. RunFolderError: the run's is damaged.
            FederationError: the SuperLink cannot be reached, or another run is going on.
        """
        if continues(self.out, load_federation(self.file)):
            self._seen = len(list(RunFolder(self.out).rounds()))
        self._id = self._unfinished() or self._start()

    def to_the_end(self) -> None:
        """Return when Flower says that the run is complete; a start that failed is followed by another.

        Raises:
            ConfigError: the ServerApp says that a new start would not help.
            FederationError: the run was stopped, or has failed too often.
        """
        left, before = self.restarts, self._seen
        while not (status := self._ended()).completed:
            kind, _, message = status.details.partition(": ")
            if status.stopped:
                raise FederationError("the run was stopped; the same command continues it")
            if kind in _LASTING:
                raise ConfigError(message)
            if self._seen > before:  # it had come further: what befell it is another failure
                left, before = self.restarts, self._seen
            if left == 0:
                raise FederationError(f"{status.details}; when that is mended, the same command continues the run")
            left -= 1
            self.on_note(f"{status.details}; starting again from the last checkpoint ({left} more times)")
            self._id = self._start()

    def stop(self) -> None:
        """Have Flower end the run; the same command continues it later.

        Raises:
            FederationError: the SuperLink does not answer, or there is nothing to stop.
        """
        if self._id:
            flwr(self.server.home, "stop", self._id, CONNECTION)

    @property
    def _note(self) -> Path:
        return self.server.path / "run.json"

    def _unfinished(self) -> str:
        """The run that is going on at the SuperLink, where this command began it before; empty where none is."""
        found = self._runs.all()
        if found is None:
            raise FederationError(
                f"no SuperLink answers at 127.0.0.1:{self.server.port}; start it with "
                f"`fl-dpgan server start {self.server.path}`"
            )
        running = [run for run, status in found.items() if not status.finished]
        if not running:
            return ""
        known = json.loads(self._note.read_text(encoding="utf-8")) if self._note.is_file() else {}
        if running == [known.get("run")] and known.get("out") == str(self.out):
            self.on_note(f"run {running[0]} is going on already; following it")
            return running[0]
        raise FederationError(
            f"run {running[0]} is going on at this SuperLink; let it end, or stop it with "
            f"`FLWR_HOME={self.server.home} flwr stop {running[0]} {CONNECTION}`"
        )

    def _start(self) -> str:
        config = f"federation={quoted(str(self.file))} out={quoted(str(self.out))}"
        run = str(flwr(self.server.home, "run", str(self.app), CONNECTION, "--run-config", config)["run-id"])
        write_atomically(self._note, json.dumps({"run": run, "out": str(self.out)}).encode())
        self.on_note(f"run {run} started")
        return run

    def _ended(self) -> RunStatus:
        """Wait for the run's end, however often the SuperLink goes and comes."""
        there = True
        while True:
            found = self._runs.all()
            if (found is not None) != there:
                there = found is not None
                self.on_note("the SuperLink is back" if there else "the SuperLink does not answer; waiting for it")
            if found is not None and self._id not in found:
                raise FederationError(f"the SuperLink no longer knows run {self._id}; the same command starts it again")
            self._tell_new_rounds()
            if found is not None and found[self._id].finished:
                return found[self._id]
            time.sleep(_POLL)

    def _tell_new_rounds(self) -> None:
        log = self.out / "rounds.jsonl"
        changed = log.stat().st_mtime_ns if log.exists() else -1
        if changed == self._changed:
            return
        self._changed = changed
        records = list(RunFolder(self.out).rounds())
        for record in records[self._seen :]:
            self.on_record(record)
        self._seen = len(records)  # fewer than before where a start cut the log to its checkpoint
