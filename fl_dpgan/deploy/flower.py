"""Flower's commands as a federation needs them: the environment, the command lines, and the answers of `flwr`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from fl_dpgan.errors import ConfigError, FederationError

#: The connection's name in Flower's configuration.
CONNECTION = "federation"
#: The folder in a home whose programs come before Flower's own.
PROGRAMS = "bin"


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: nothing is reported, asked for or installed, and its state is in `home`."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Flower starts its other programs by name: from `home`, where there are some, or from the virtual environment
        "PATH": os.pathsep.join(
            [str(home / PROGRAMS), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        ),
    }


def replace_process(command: Sequence[str], home: Path) -> NoReturn:
    """Become this command, so that a signal to this process reaches it."""
    os.execve(command[0], list(command), environment(home))


def superlink_command(folder: Path, host: str, port: int) -> list[str]:
    """The SuperLink of the server in `folder`, with TLS and known nodes only."""
    return [
        sys.executable, "-m", "fl_dpgan.deploy.superlink",
        "--ssl-ca-certfile", str(folder / "ca.crt"),
        "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
        "--enable-supernode-auth",
        "--database", str(folder / "superlink.sqlite"),
        "--disable-runtime-dependency-installation",
        "--host", host, "--port", str(port),
    ]  # fmt: skip


def supernode_command(address: str, *, guard: Path, key: Path, ca: Path, port: int) -> list[str]:
    """The SuperNode of a site: it reaches the server at `address` and the site's guard at its socket.

    Raises:
        ConfigError: the socket's path cannot be written in Flower's node configuration.
    """
    return [
        str(Path(sys.executable).parent / "flower-supernode"),
        "--superlink", address,
        "--root-certificates", str(ca),
        "--auth-supernode-private-key", str(key),
        "--port", str(port),
        "--node-config", f"guard={quoted(str(guard))}",
    ]  # fmt: skip


def quoted(value: str) -> str:
    """A string as Flower's `key=value` options take it: TOML, but without a way to write a double quote.

    Raises:
        ConfigError: it holds a double quote, a backslash or a control character.
    """
    if not value.isprintable() or '"' in value or "\\" in value:
        raise ConfigError(f"{value!r} holds a character that Flower's options cannot pass on; choose another path")
    return f'"{value}"'


def flwr(home: Path, *arguments: str) -> dict[str, Any]:
    """What a `flwr` command answers in JSON.

    Raises:
        FederationError: it failed; with the line in which it says why.
    """
    command = [str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    try:
        answer: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
    except ValueError:
        answer = {}
    if done.returncode or not answer.get("success"):
        said = " ".join(str(answer.get("error-message") or done.stderr or done.stdout).split())
        said = re.sub(r"^Using SuperLink: \S+ \(\S+\) ", "", said)
        raise FederationError(f"flwr {arguments[0]}: {said or 'no answer'}")
    return answer


@dataclass(frozen=True)
class RunStatus:
    """What Flower says of a run; `details` in one line."""

    finished: bool
    completed: bool
    stopped: bool
    details: str


class Runs:
    """Asks the SuperLink of a home for its runs, as `flwr ls` does, without a process for each question."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._client: Any = None

    def all(self) -> dict[str, RunStatus] | None:
        """Every run's status by its number; None while the SuperLink does not answer."""
        # Flower's own client: the version range in pyproject.toml pins what is called here
        import httpx
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            self._client = self._client or self._connect()
            answer = self._client.ListRuns(ListRunsRequest())
        except httpx.HTTPError:
            return None
        return {str(number): _status(run.status) for number, run in answer.run_dict.items()}

    def _connect(self) -> Any:
        os.environ.update(environment(self._home))
        from flwr.cli.flower_config import read_superlink_connection
        from flwr.cli.utils import init_http_client_from_connection

        with redirect_stdout(StringIO()):  # it says where it connects to
            return init_http_client_from_connection(read_superlink_connection(CONNECTION))


def _status(status: Any) -> RunStatus:
    finished = status.status == "finished"
    details = " ".join(status.details.removeprefix("ServerApp failed with exception: ").split())
    return RunStatus(
        finished=finished,
        completed=finished and status.sub_status == "completed",
        stopped=finished and status.sub_status == "stopped",
        details=details or "the ServerApp ended without a word",
    )
