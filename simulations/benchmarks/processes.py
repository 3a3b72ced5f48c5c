"""The processes of a real federation on this machine: a SuperLink, and sites with a guard and a SuperNode each."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.site_file import load_site

FL_DPGAN = str(Path(sys.executable).with_name("fl-dpgan"))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: object, cwd: Path | None = None, rc: int = 0) -> str:
    """What an `fl-dpgan` command prints; it has to end with this exit code."""
    done = subprocess.run([FL_DPGAN, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait(until: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until it is true; an AssertionError that names it where that takes too long."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


class Process:
    """A command in a process group of its own, with its output in a file."""

    def __init__(self, log: Path, *arguments: object, cwd: Path | None = None) -> None:
        self.log = log
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [FL_DPGAN, *map(str, arguments)], cwd=cwd, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip

    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send the signal to the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(seconds)


class Tap(threading.Thread):
    """A socket between Flower's ClientApp and the guard that keeps what the guard says, in plain text.

    Attributes:
        said: what the guard has said, connection by connection.
        ages: seconds from each ClientApp process's start to its hand-over.
    """

    def __init__(self, path: Path, guard: Path) -> None:
        super().__init__(daemon=True)
        self._guard, self.said, self.ages = guard, list[bytearray](), list[float]()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self.start()

    def run(self) -> None:
        """Accept until the process ends."""
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                with suppress(psutil.Error):
                    self.ages.append(time.time() - psutil.Process(peer).create_time())
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, asking: socket.socket) -> None:
        with asking, socket.socket(socket.AF_UNIX) as guard, suppress(OSError):
            guard.connect(str(self._guard))
            there = threading.Thread(target=self._copy, args=(asking, guard, None), daemon=True)
            there.start()
            self.said.append(bytearray())
            self._copy(guard, asking, self.said[-1])

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class DeployedSite:
    """A site's folder as `clients/README.md` makes it, its guard and its SuperNode."""

    def __init__(self, home: Path, name: str, declared: int, source: str, data: Path, *, eps_max: float) -> None:
        self.home, self.name = home, name
        run("site", "init", "--name", name, "--declared-size", declared, "--source", source, "--data", data, cwd=home)
        text = (home / "site.toml").read_text()
        text = text.replace("eps_max = 10.0", f"eps_max = {eps_max}").replace(
            "eps_per_run = 10.0", "eps_per_run = 50.0"
        )
        text = text.replace("/run/fl-dpgan/guard.sock", str(home / "guard.sock"))
        (home / "site.toml").write_text(text)
        run("site", "key", cwd=home)
        self.guard: Process | None = None
        self.node: Process | None = None
        self._over, self._keeper = threading.Event(), None
        self.port = free_port()
        self.lost = 0  # charges whose answer was never stored

    def label(self, **names: str) -> None:
        """Map the site's own labels to the federation's."""
        text = (self.home / "site.toml").read_text()
        lines = "\n".join(f'"{mine}" = "{theirs}"' for mine, theirs in names.items())
        (self.home / "site.toml").write_text(text.replace("[labels]", f"[labels]\n{lines}"))

    def make_ledger(self) -> None:
        """Once, after site.toml is as it shall be."""
        run("site", "ledger", cwd=self.home)
        self.ledger = load_site(self.home / "site.toml").ledger

    def start_guard(self) -> None:
        """Start it, and do not wait for it."""
        self.guard = Process(self.home / "guard.log", "site", "serve", cwd=self.home)

    def start_node(self, config: str = "site.toml") -> None:
        """Keep a SuperNode running, as its service does: whenever it ends, another starts."""

        def keep() -> None:
            while not self._over.is_set():
                self.node = Process(
                    self.home / "node.log", "site", "node", "--config", config, "--port", self.port, cwd=self.home
                )
                while self.node.process.poll() is None and not self._over.wait(0.2):
                    pass
                self.node.stop(signal.SIGKILL if self.node.process.poll() is not None else signal.SIGTERM)
                self._over.wait(1)

        self._keeper = threading.Thread(target=keep)
        self._keeper.start()

    def tap(self) -> Tap:
        """Listen between ClientApp and guard: the node is told of another socket."""
        path = self.home / "tap.sock"
        text = (self.home / "site.toml").read_text().replace("guard.sock", "tap.sock")
        (self.home / "tapped.toml").write_text(text)
        return Tap(path, self.home / "guard.sock")

    def in_work(self) -> bool:
        """A charge whose answer is not stored yet."""
        with closing(LedgerReader(self.ledger)) as ledger:
            return ledger.counts()[1] > self.lost

    def stop(self) -> None:
        """End node and guard."""
        self._over.set()
        if self._keeper:
            self._keeper.join()
        if self.guard:
            self.guard.stop()
