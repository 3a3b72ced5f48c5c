"""The processes at a site: its guard, the real one, and its node, which passes messages on and may lie."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from faults import LIES
from home import NAMES, TIMEOUT, Home
from safetensors.numpy import load, save
from shared import Board, Journal

from fl_dpgan.errors import WireError
from fl_dpgan.federation import frames, guard, relay
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation.site import Site
from fl_dpgan.privacy.ledger import Ledger

Reached = Callable[[str, int], None]


def die(seconds: float) -> None:
    """Kill this process, then or later."""
    if seconds:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    """Have a function tell of its calls: `before` is given its arguments, `after` its result and its arguments."""
    plain = getattr(owner, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = plain(*args, **kwargs)
        if after:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, told)


def serve_guard(home: Home, number: int, board: Board, journal: Journal) -> None:
    """Serve a site until SIGTERM."""
    board.live_by(number)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.getLogger("fl_dpgan").setLevel(logging.INFO)
    guard._SIGN = 0.2

    def reached(point: str, of_round: int) -> None:
        for fault in board.strike(("guard", "disk", "clock"), number, of_round, point):
            if fault.kind == "guard killed":
                die(fault.amount)
            elif fault.kind.startswith("disk"):
                home.disks[number].fill()
            else:
                board.put_clock(number, fault.amount)

    made = home.guard(number)
    tell_of_guard(reached, journal)
    signal.signal(signal.SIGTERM, lambda signum, frame: made.stop())
    made.serve()


def tell_of_guard(reached: Reached, journal: Journal) -> None:
    """Have the guard of this process note what it does, and an answer before its first byte leaves."""
    now = [0]  # the round in work: a site answers one request at a time

    def asked(site: Site, header: str, *rest: Any) -> None:
        request = json.loads(header)
        now[0] = request["round"]
        reached("asked", now[0])

    def charged(head: str, ledger: Ledger, charge: Any) -> None:
        journal.note("charged", head=head, request=charge.request)
        reached("charged", now[0])

    def training(*args: Any, **kwargs: Any) -> None:
        journal.note("training")
        reached("training", now[0])

    def sending(connection: socket.socket, header: dict[str, str], body: bytes = b"") -> None:
        if header.get("state") == "answer" and "status" in (answer := json.loads(header["header"])):
            journal.note("answer", body, header=header["header"], round=answer["round"], status=answer["status"])
            reached("sending", answer["round"])

    around(Site, "answer", asked)
    around(Ledger, "charge", lambda *args: reached("charging", now[0]), charged)
    around(site_module, "local_update", training, lambda *args, **kwargs: reached("trained", now[0]))
    around(Ledger, "store_answer", lambda *args: reached("storing", now[0]), lambda *args: reached("stored", now[0]))
    around(frames, "send", sending)


def serve_node(home: Home, number: int, board: Board, journal: Journal) -> None:
    """Pass messages on to the site's guard and its answers back, until killed."""
    path = home.node_socket(number)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    node = Node(home, number, board, journal)
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=node.attend, args=(connection,), daemon=True).start()


class Node:
    """A site's node: `attend` sees one request through, with what goes wrong on its way."""

    def __init__(self, home: Home, number: int, board: Board, journal: Journal) -> None:
        self._guard: Path = home.guard_socket(number)
        self._number, self._board, self._journal = number, board, journal
        self._answers: dict[int, tuple[str, bytes]] = {}
        self._held: list[socket.socket] = []  # whoever waits there waits in vain

    def attend(self, connection: socket.socket) -> None:
        try:
            header, body = frames.receive(connection, largest=1 << 24, seconds=30)
        except WireError:
            return  # the server was killed as it sent
        number = json.loads(header["header"]).get("round", 0)
        self._reached("given", number)
        if self._strikes("request lost", number) or (header["kind"] == "query" and self._strikes("introduction", 0)):
            self._held.append(connection)
            return
        self._reached("passing", number)
        with connection:
            try:
                answer = relay.ask(self._guard, header["kind"], header["header"], body)
            except (WireError, OSError):
                return  # the server's side sees a connection that ends
            self._reached("answering", number)
            if self._strikes("silent site", number):
                self._held.append(connection.dup())
                return
            if self._strikes("slow site", number):
                time.sleep(1.3 * TIMEOUT)
            text, body = self._made_of(answer, number)
            with suppress(ConnectionError):  # whoever asked has been killed
                frames.send(connection, {"state": "answer", "header": text}, body)

    def _made_of(self, answer: tuple[str, bytes], number: int) -> tuple[str, bytes]:
        """The answer as it is passed on: one that trained may be made a lie."""
        if not number or json.loads(answer[0])["status"] != "trained":
            return answer
        known = self._answers.setdefault(number, answer)
        for lie in LIES:
            if self._strikes(f"lie: {lie}", number):
                changed = self._lie(lie, number, known)
                self._journal.note("lied", lie=lie, round=number, told=changed != known)
                return changed
        return answer

    def _lie(self, lie: str, number: int, answer: tuple[str, bytes]) -> tuple[str, bytes]:
        header, body = answer
        fields = json.loads(header)
        if lie == "an old answer":
            return self._answers[min(self._answers)]  # it has none where this is the first
        if lie == "another round":
            return json.dumps(fields | {"round": number + 1}), body
        if lie == "another site":
            return json.dumps(fields | {"site": NAMES[self._number - 1]}), body
        if lie == "rubbish":
            return header, body[:-1]
        factor = np.float32("nan" if lie == "NaN" else 1e6)
        return header, save({name: (array + 1) * factor for name, array in load(body).items()})

    def _strikes(self, kind: str, number: int) -> bool:
        return bool(self._board.strike((kind,), self._number, number))

    def _reached(self, point: str, number: int) -> None:
        for fault in self._board.strike(("node killed",), self._number, number, point):
            die(fault.amount)
