"""The guard: a process of the site's own, which alone holds images and ledger, and answers over a Unix socket.

A Flower bundle brings the server's code to the site; that code runs as another user and reaches this socket only. What
comes over it is checked as what comes over the network is, by the same `Site`, one request at a time.
"""

import fcntl
import logging
import os
import socket
import stat
import threading
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from pathlib import Path

from flwr.app import MessageType

from fl_dpgan.errors import ConfigError, WireError
from fl_dpgan.federation import frames, wire
from fl_dpgan.federation.site import Site
from fl_dpgan.text import printable

_log = logging.getLogger(__name__)

#: Requests that the guard holds in memory at a time; who comes when all places are taken is told to come again.
PLACES = 8
#: Seconds that a frame may take to arrive: it comes from this machine.
_ARRIVAL = 30.0
#: Seconds between two signs of life for who waits.
_SIGN = 5.0


class Guard:
    """Serves one site on a socket, until it is told to stop.

    Args:
        site: what answers. question: what the server's first question has to be.
        path: where the socket is made, with mode 0660; the folder decides who reaches it.
        lock: a file that no second guard of the same ledger can lock.
        largest: the most bytes of a request's tensors. The guard holds at most `PLACES` times as many.

    Raises:
        ConfigError: another guard serves this site, or the socket cannot be made.
    """

    def __init__(self, site: Site, question: wire.Question, *, path: Path, lock: Path, largest: int) -> None:
        self._site, self._question, self._largest = site, question, largest
        self._path = path
        self._lock = _locked(lock)
        self._socket = _listen(path)
        self._places = threading.BoundedSemaphore(PLACES)
        self._work = ThreadPoolExecutor(1, "site")  # a site answers one request at a time
        self._stopped = threading.Event()

    def serve(self) -> None:
        """Answer until `stop` is called; the request in work is then finished and its answer sent."""
        connections: list[threading.Thread] = []
        while not self._stopped.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                _log.error("a connection could not be taken: %s", error.strerror)
                self._stopped.wait(0.1)  # out of file descriptors, say: there will be some again
                continue
            connections = [thread for thread in connections if thread.is_alive()]
            thread = threading.Thread(target=self._attend, args=(connection,), daemon=True)
            thread.start()
            connections.append(thread)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._work.shutdown(wait=True, cancel_futures=True)
        for thread in connections:
            thread.join(_SIGN)
        os.close(self._lock)

    def stop(self) -> None:
        """Have `serve` come to an end; may be called from a signal's handler."""
        self._stopped.set()

    def _attend(self, connection: socket.socket) -> None:
        """Take one request from a connection and see it through."""
        with connection:
            connection.settimeout(_ARRIVAL)
            try:
                if not self._places.acquire(blocking=False):
                    frames.send(connection, {"state": "full"})
                    return
                try:
                    self._see_through(connection)
                finally:
                    self._places.release()
            except OSError as error:
                _log.warning("who asked has gone (%s); what was charged stays charged", error.strerror)
            except Exception:
                _log.exception("a connection failed")

    def _see_through(self, connection: socket.socket) -> None:
        try:
            header, tensors = frames.receive(connection, largest=self._largest, seconds=_ARRIVAL)
            if header.keys() != {"kind", "header"}:
                raise WireError("a frame that is not a request: it has a kind and a header")
        except WireError as error:
            _log.warning("refused: %s", error)
            frames.send(connection, {"state": "refused", "reason": str(error)})
            return
        try:
            task = self._work.submit(self._answer, header["kind"], header["header"], tensors)
        except RuntimeError:  # it is about to stop
            frames.send(connection, {"state": "full"})
            return
        answer = self._await(connection, task)
        if answer is not None:
            frames.send(connection, {"state": "answer", "header": answer[0]}, answer[1])

    def _await(self, connection: socket.socket, task: Future[tuple[str, bytes]]) -> tuple[str, bytes] | None:
        """The task's outcome, with signs of life in the meantime; None where it was dropped before it began."""
        while True:
            try:
                return task.result(timeout=_SIGN)
            except TimeoutError:
                try:
                    frames.send(connection, {"state": "wait"})
                except OSError:
                    task.cancel()  # nobody waits for it any more; one that runs is finished, and its answer stored
                    raise
            except BaseException:
                if task.cancelled():
                    return None
                raise

    def _answer(self, kind: str, header: str, tensors: bytes) -> tuple[str, bytes]:
        if kind == MessageType.QUERY:
            return self._introduce(header)
        answer, body = self._site.answer(header, tensors, kind)
        told = wire.parse(answer, wire.Answer)
        _log.info("round %d: %s%s", told.round, told.status, f" ({told.reason})" if told.reason else "")
        return answer, body

    def _introduce(self, header: str) -> tuple[str, bytes]:
        """The site's name and terms, where the server's federation is the one that this site was told of."""
        try:
            asked = wire.parse(header, wire.Question)
        except WireError as error:
            return self._site.refusal(0, "refused", "wire", str(error))
        if asked == self._question:
            _log.info("introduced to the server")
            return self._site.introduction().model_dump_json(), b""
        if asked.classes != self._question.classes:
            here, there = ", ".join(self._question.classes), ", ".join(asked.classes)
            what = f"the labels here are {here}, at the server {there}"
        else:
            what = "the networks or D's learning rate differ"
        reason = f"{what}; put the server's federation.toml in place here"
        _log.error("did not join: %s", printable(reason))
        return self._site.refusal(0, "refused", "federation", reason)


def _locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}; run the guard as the ledger's owner") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"another guard serves this ledger ({path} is locked); stop that one first") from error
    return descriptor


def _listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"guard.socket = {path} is there already, and is no socket; give another path")
        path.unlink()  # of a guard that was killed: this one holds the lock
    before = os.umask(0o117)
    try:
        listening.bind(str(path))
        listening.listen(128)
    except OSError as error:
        listening.close()
        what = "the path is too long for a socket" if "too long" in str(error) else error.strerror
        raise ConfigError(f"guard.socket = {path}: {what}; its folder must exist and be the guard's") from error
    finally:
        os.umask(before)
    listening.settimeout(0.2)  # how soon `stop` is noticed
    return listening
