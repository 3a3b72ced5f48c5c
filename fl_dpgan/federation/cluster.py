"""The Ray that a simulation runs on: one of its own on this machine, or the cluster that RAY_ADDRESS names."""

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from fl_dpgan.errors import ConfigError, FederationError

_LOCAL = "local"  # Ray's word for a Ray of one's own; without it Ray would join any cluster started on this machine
_ANSWER_WITHIN = 120.0  # seconds; a node's first process imports all that a site needs


def address() -> str:
    """Where the simulation runs: `local`, or RAY_ADDRESS when something listens there. Ray itself tries for minutes.

    Raises:
        ConfigError: RAY_ADDRESS is not host:port. FederationError: nothing listens there.
    """
    found = os.environ.get("RAY_ADDRESS") or _LOCAL
    if found == _LOCAL:
        return found
    host, _, port = found.rpartition(":")
    if not host or "/" in host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"RAY_ADDRESS = {found!r} is not host:port; give the address that `ray start --head` prints")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise FederationError(
            f"RAY_ADDRESS = {found} cannot be reached ({error.strerror or error}); start the cluster, or unset it to "
            "run on this machine"
        ) from error
    return found


def connect(out: Path, data_dir: Path | None) -> None:
    """Start Ray, or join the cluster; Flower takes the Ray that it finds connected.

    Raises:
        ConfigError, FederationError: as for `address`; or the cluster cannot be joined from here, or one of its nodes
            cannot run the sites.
    """
    import ray

    where = address()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            where,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # no working_dir: nothing is uploaded
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FederationError(
            f"Ray ({where}) cannot be joined: {reason}; start the run on a node of the cluster, with the same versions "
            "of Python and Ray"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own in place
    if where != _LOCAL:
        try:
            _check_nodes(out, data_dir)
        except FederationError:
            ray.shutdown()
            raise


def _check_nodes(out: Path, data_dir: Path | None) -> None:
    """Ask every node that can hold a site whether it has what sites read; else they would fail without a word here."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask, scenario = ray.remote(num_cpus=0)(lacks), (out / "scenario.json").read_bytes()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [ask.options(scheduling_strategy=place).remote(out, scenario, data_dir) for place in places]
    if not answers:
        raise FederationError("no node of the Ray cluster has a CPU for a site; start nodes with --num-cpus")
    # all of them before any is read: Ray writes lines of its own to stderr if it ends while one is on its way
    _, late = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_WITHIN)
    for node, answer in zip((node["NodeManagerAddress"] for node in nodes), answers, strict=True):
        if answer in late:
            raise FederationError(f"the Ray node {node} did not answer in {_ANSWER_WITHIN:g} s")
        try:
            lacking = ray.get(answer)
        except RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise FederationError(
                f"the Ray node {node} cannot run fl_dpgan ({reason}); install the same environment on every node"
            ) from error
        if lacking:
            raise FederationError(
                f"the Ray node {node} cannot use {lacking}; put --out and --data-dir where every node mounts them, at "
                "the same path"
            )


def lacks(out: Path, scenario: bytes, data_dir: Path | None) -> Path | None:
    """On a node: the first of the run's paths that is missing there, is another run's, or cannot be written."""
    file = out / "scenario.json"
    if not file.is_file() or file.read_bytes() != scenario or not os.access(out, os.W_OK):
        return out
    return data_dir if data_dir and not data_dir.exists() else None
