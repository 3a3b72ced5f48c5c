"""Carries a schedule out on real processes, and gathers the evidence of what they did."""

import ctypes
import gc
import json
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examiner import Evidence, Exit
from faults import SERVER, SITES, Fault, Schedule
from home import NAMES, Home
from server_side import Server
from shared import Board, Journal
from site_side import serve_guard, serve_node

from fl_dpgan.errors import FlDpganError, LedgerError
from fl_dpgan.privacy.verify import verify
from fl_dpgan.runs import RunFolder

#: Seconds that a schedule may take, and how often a server may be started for it.
PATIENCE, STARTS = 90.0, 15


@dataclass
class Running:
    """A process; `again` is when it is to be started again, where it has ended."""

    role: str
    number: int
    work: Callable[[Journal], None]
    pid: int | None = None
    again: float = 0.0
    starts: int = 0


class Trial:
    """One schedule on its processes; each calls `plant` before it begins, so that a fault of ours can be put in."""

    def __init__(self, schedule: Schedule, folder: Path, plant: Callable[[], None] = lambda: None) -> None:
        self.schedule, self.board, self._plant = schedule, Board(schedule), plant
        self.home = Home(folder, schedule)
        self.journals: dict[str, list[Journal]] = {}
        self.exits: list[Exit] = []
        self._full: dict[Fault, float] = {}  # when each disk gets room again
        guards = [Running("guard", n, self._guard(n)) for n in range(SITES)]
        nodes = [Running("node", n, self._node(n)) for n in range(SITES)]
        self.server = Running("server", SERVER, lambda journal: Server(self.home, self.board, journal).serve())
        self.processes = [*guards, *nodes, self.server]

    def run(self) -> Evidence:
        """Until the server is done; then stop all, and say what was found."""
        deadline = time.monotonic() + PATIENCE
        ended = False
        try:
            while not ended and time.monotonic() < deadline and self.server.starts <= STARTS:
                ended = any([self._tend(process) for process in self.processes])
                self._make_room()
                time.sleep(0.005)
        finally:
            self._stop()
        try:
            return self._evidence(ended)
        finally:
            for journal in (journal for journals in self.journals.values() for journal in journals):
                journal.close()
            self.home.close()
            self.board.close()

    def _guard(self, number: int) -> Callable[[Journal], None]:
        return lambda journal: serve_guard(self.home, number, self.board, journal)

    def _node(self, number: int) -> Callable[[Journal], None]:
        return lambda journal: serve_node(self.home, number, self.board, journal)

    def _tend(self, process: Running) -> bool:
        """Start it, or start it again; True where it is the server and has come to its end."""
        if process.pid is None:
            if time.monotonic() >= process.again:
                self._start(process)
            return False
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if not pid:
            return False
        code = self._ended(process, status)
        process.again = time.monotonic() + (self.schedule.down if code < 0 else 0.1)
        if process is not self.server:
            return False
        if code > 0:  # somebody reads the error, and mends what it names
            self._full = {fault: 0.0 if fault.who == SERVER else due for fault, due in self._full.items()}
            self._make_room()
        return code == 0

    def _start(self, process: Running) -> None:
        name = f"{process.role}-{process.number}"
        journal = Journal()
        self.journals.setdefault(name, []).append(journal)
        process.starts += 1

        def work() -> None:
            self._plant()
            process.work(journal)

        process.pid = spawn(work, self._said(process))
        if process.role == "node":
            self.board.present[process.number] = 1

    def _ended(self, process: Running, status: int) -> int:
        process.pid, code = None, os.waitstatus_to_exitcode(status)
        self.exits.append(Exit(process.role, process.number, code, self._said(process).read_text()))
        if process.role == "node":
            self.board.present[process.number] = 0
        return code

    def _said(self, process: Running) -> Path:
        """Where the standard error of its present start is."""
        return self.home.path / f"{process.role}-{process.number}.{process.starts}.err"

    def _make_room(self) -> None:
        now = time.monotonic()
        for fault in self.board.struck:
            if fault.kind.startswith("disk") and now >= self._full.setdefault(fault, now + fault.amount):
                writers = [p.pid for p in self.processes if p.role in ("guard", "server") and p.number == fault.who]
                self.home.disks[fault.who].empty(writers[0])

    def _stop(self) -> None:
        """End all: nodes and a server at once, guards as their service would end them."""
        for how, roles in ((signal.SIGKILL, ("node", "server")), (signal.SIGTERM, ("guard",))):
            left = [process for process in self.processes if process.role in roles and process.pid]
            for process in left:
                os.kill(process.pid or 0, how)
            for process in left:
                self._ended(process, _waited(process.pid or 0, 10))

    def _evidence(self, ended: bool) -> Evidence:
        for disk in self.home.disks:
            disk.empty(None)
        ledgers, verified = {}, {}
        for number, name in enumerate(NAMES):
            ledgers[name], verified[name] = entries(self.home.ledger(number)), fault_of(self.home.ledger(number))
        folder = RunFolder.open(self.home.run)
        _, meta = folder.load_checkpoint() or ({}, {})
        return Evidence(
            schedule=self.schedule,
            ended=ended,
            struck=self.board.struck,
            guards={name: self._notes(f"guard-{n}") for n, name in enumerate(NAMES)},
            nodes={name: self._notes(f"node-{n}") for n, name in enumerate(NAMES)},
            server=self._notes(f"server-{SERVER}"),
            ledgers=ledgers,
            verified=verified,
            log=list(folder.rounds()),
            sites=meta.get("sites", {}),
            asked=folder.asked(),
            exits=self.exits,
        )

    def _notes(self, name: str) -> list[list[tuple[dict[str, Any], bytes]]]:
        return [list(journal.read()) for journal in self.journals.get(name, [])]


def spawn(work: Callable[[], None], said: Path) -> int:
    """Fork a process that does this and ends: with 2 and one line on an error for its user, as every command does."""
    runner = os.getpid()
    said.touch()  # it may be killed before it could
    pid = os.fork()
    if pid:
        return pid
    code = 1
    gc.freeze()  # what is collected here only would be copied to be looked at
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the runner
        if os.getppid() == runner:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            work()
            code = 0
    except FlDpganError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BaseException:  # a fork must never get back into pytest
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _waited(pid: int, seconds: float) -> int:
    """The status with which a process ends; one that does not end in time is killed, which its status then says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def entries(ledger: Path) -> list[tuple[int, str, dict[str, Any], str]]:
    """A ledger's rows, read without the library."""
    with closing(sqlite3.connect(ledger)) as db:
        found = db.execute("SELECT seq, kind, payload, hash FROM entries ORDER BY seq").fetchall()
    return [(seq, kind, json.loads(payload), digest) for seq, kind, payload, digest in found]


def fault_of(ledger: Path) -> str:
    """What the library's verifier finds wrong."""
    try:
        verify(ledger)
    except LedgerError as error:
        return str(error)
    return ""
