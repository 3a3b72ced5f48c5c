"""The server's process: the real strategy on a grid that passes messages to the nodes' sockets."""

import json
import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import Any

from faults import SERVER, SITES
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from home import NAMES, Home
from shared import Board, Journal
from site_side import around, die

from fl_dpgan import files
from fl_dpgan.federation import FedDPGAN, relay, roster
from fl_dpgan.federation.deployment import question
from fl_dpgan.federation.envelope import unpack_parts
from fl_dpgan.federation.server import run_strategy
from fl_dpgan.runs import RunFolder

_FIRST = 10  # node of site 0


class Server:
    """One start of the server, from the run's checkpoint on."""

    def __init__(self, home: Home, board: Board, journal: Journal) -> None:
        self._home, self._board, self._journal = home, board, journal
        self.round = 0

    def serve(self) -> None:
        """Run to the end.

        Raises:
            FlDpganError: as the strategy says.
        """
        self._board.live_by(SERVER)
        # what the grid's side of the relay says would be said at a node
        logging.basicConfig(filename=self._home.path / "nodes.log", force=True)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        roster._PAUSE = 0.02
        self._tell()
        nodes = {name: _FIRST + number for number, name in enumerate(NAMES)}
        grid = Grid(self._home, self._board, self)
        folder = RunFolder.open(self._home.run)
        run_strategy(folder, grid, lambda record: None, question(self._home.federation), lambda: nodes)

    def reached(self, point: str) -> None:
        for fault in self._board.strike(("server killed", "disk", "clock"), SERVER, self.round, point):
            if fault.kind == "server killed":
                die(fault.amount)
            elif fault.kind.startswith("disk"):
                self._home.disks[SERVER].fill()
            else:
                self._board.put_clock(SERVER, fault.amount)

    def delivers(self, name: str, number: int) -> None:
        self._journal.note("delivered", site=name, round=number)

    def _tell(self) -> None:
        """Have the strategy of this process note what it does."""

        def asking(strategy: FedDPGAN, number: int, *rest: Any) -> None:
            self.round = number
            self.reached("asking")

        def asked(_: None, folder: RunFolder, mechanism: str, sites: dict[str, Any]) -> None:
            self._journal.note("asked", sites=list(sites), round=self.round)

        def logged(_: None, folder: RunFolder, record: dict[str, Any]) -> None:
            self._journal.note("record", record=record)
            self.reached("logged")

        def saved(_: None, folder: RunFolder, *rest: Any) -> None:
            self._journal.note("checkpoint", (folder.path / "checkpoint.safetensors").read_bytes(), round=self.round)
            self.reached("saved")

        around(FedDPGAN, "configure_train", asking)
        around(RunFolder, "note_asked", lambda *args: None, asked)
        around(RunFolder, "log_round", lambda *args: self.reached("logging"), logged)
        around(RunFolder, "save_checkpoint", lambda *args: self.reached("saving"), saved)
        around(files, "sync", lambda path: self.reached("syncing"))


class Grid:
    """Flower's grid, in so far as the strategy uses it, without a network; it may deliver a message more than once."""

    def __init__(self, home: Home, board: Board, server: Server) -> None:
        self._home, self._board, self._server = home, board, server
        self._heartbeats = home.schedule.heartbeats
        self._pool, self._ids = ThreadPoolExecutor(64), count()
        self._late: set[Future[Message]] = set()
        self._again: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return [_FIRST + n for n in range(SITES) if self._board.present[n] or not self._heartbeats]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The answers that come in time, in no order; and those that were late before, which nobody waits for."""
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
        number = max((_part(message).get("round", 0) for message in messages), default=0)
        waited = [self._send(message) for message in messages]
        for _ in self._board.strike(("asked twice",), SERVER, number):
            waited += [self._send(message) for message in messages]
        again, self._again = self._again, []
        for _ in self._board.strike(("asked again",), SERVER, number):
            self._again = [message for message in messages if "round" in _part(message)]
        self._late |= {self._send(message) for message in again}
        if number:
            self._server.reached("sending")
        done, late = wait(waited, timeout)
        old = {future for future in self._late if future.done()}
        self._late = (self._late | late) - old
        if number:
            self._server.reached("answered")
        return [future.result() for future in (*old, *done)]

    def _send(self, message: Message) -> "Future[Message]":
        number = message.metadata.dst_node_id - _FIRST
        if of_round := _part(message).get("round", 0):
            self._server.delivers(NAMES[number], of_round)
        return self._pool.submit(relay.answer, message, self._home.node_socket(number))


def _part(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(unpack_parts(message)[0][0])
    return found
