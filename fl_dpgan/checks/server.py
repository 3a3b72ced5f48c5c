"""All checks of a server's folder and machine."""

import os
import shutil
import socket
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_dpgan.checks import machine, network
from fl_dpgan.checks.finding import Finding, failed, ok, refused, warning
from fl_dpgan.config import Federation, load_federation
from fl_dpgan.deploy.certificates import hosts_of
from fl_dpgan.deploy.server import ServerFolder
from fl_dpgan.errors import ConfigError

_COPY = "put back a copy of it"
#: Flower's database holds a round's messages, a run's folder a checkpoint.
_LEAST, _COMFORT = 5 * 10**8, 5 * 10**9


def check_server(server: ServerFolder, declared_size: int) -> list[Finding]:
    """Look at everything that a server needs; the sites' own files are their affair.

    Args:
        declared_size: of the site whose cost is shown.
    """
    findings = [check_folder(server.path), *(check_private(server.path / f"{one}.key") for one in ("ca", "server"))]
    address = None
    try:
        federation = load_federation(server.path / "federation.toml")
    except ConfigError as error:
        findings.append(refused("federation.toml", error, "edit it: its comments say what each key means"))
    else:
        address = federation.address
        findings += [check_address(address, server.port), check_plan(federation, declared_size)]
    findings.append(check_certificate(server.path, address))
    findings.append(check_port(server.port, server.path / "ca.crt"))
    findings.append(machine.check_synchronised(machine.ask_timedatectl()))
    return [*findings, check_room([server.path])]


def check_folder(path: Path) -> Finding:
    """Whether the folder, which holds keys, is its owner's alone."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return failed("folder", f"{path} is open to others ({mode:04o})", f"chmod 700 {path}")
    return ok("folder", f"{path} ({mode:04o})")


def check_private(path: Path) -> Finding:
    """Whether a private key is there, and its owner's alone."""
    name = path.name
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        if name == "ca.key":  # it signs renewals alone, and is safest elsewhere
            return ok(name, "not here; `server renew` needs it")
        return failed(name, "not there", _COPY)
    if mode & 0o077:
        return failed(name, f"open to others ({mode:04o})", f"chmod 600 {path}; if others may have read it, start anew")
    return ok(name, f"its owner's alone ({mode:04o})")


def check_address(address: str, port: int) -> Finding:
    """Whether the sites are told the port that the SuperLink listens at."""
    if network.parts(address)[1] != port:
        return warning(
            "federation.toml",
            f"sites go to {address}, the SuperLink listens at port {port}",
            "correct address in federation.toml, unless something in between maps the port",
        )
    return ok("federation.toml", f"sites go to {address}")


def check_plan(federation: Federation, declared_size: int) -> Finding:
    """What a run costs a site of this size."""
    name = "cost of a run"
    try:
        plan = federation.site_plan(declared_size)
    except ConfigError as error:
        return refused(name, error, "change [privacy] or [training] in federation.toml")
    evaluations = plan.rounds // plan.evaluation_every
    spent = plan.epsilon_after(plan.rounds * plan.steps_a_round, evaluations, releases=1)
    return ok(
        name,
        f"epsilon {spent:.4f} at delta {plan.delta:g} for a site of {declared_size} {plan.unit}s: {plan.rounds} rounds "
        f"of {plan.d_steps} D steps, sigma {plan.noise_multiplier:.4g}, q {plan.sample_rate:.4g}",
    )


def check_certificate(folder: Path, address: str | None, *, now: datetime | None = None) -> Finding:
    """Whether the certificate, its key and its authority belong together, are valid, and are for the sites' address."""
    name, now = "certificate", now or datetime.now(UTC)
    try:
        served, ca = (x509.load_pem_x509_certificate((folder / f"{one}.crt").read_bytes()) for one in ("server", "ca"))
        key = load_pem_private_key((folder / "server.key").read_bytes(), None)
    except OSError as error:
        return failed(name, f"{error.filename} cannot be read: {error.strerror}", _COPY)
    except (ValueError, TypeError) as error:
        return failed(name, f"server.crt, ca.crt or server.key is damaged: {error}", _COPY)
    if served.public_key() != key.public_key():
        return failed(name, "server.crt and server.key do not belong together", "put back a copy of both")
    try:
        served.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return failed(name, "server.crt is not signed by ca.crt", "put back a copy of both; the sites have this ca.crt")
    for what, one, remedy in (
        ("ca.crt", ca, "make a new server (`fl-dpgan server init`), and send its ca.crt to the sites"),
        ("server.crt", served, "`fl-dpgan server renew`, then restart the SuperLink"),
    ):
        if now > one.not_valid_after_utc:
            return failed(name, f"{what} expired on {one.not_valid_after_utc:%Y-%m-%d}", remedy)
        if now < one.not_valid_before_utc:
            start = one.not_valid_before_utc
            return failed(name, f"{what} is not valid before {start:%Y-%m-%d %H:%M} UTC", "set the clock right")
    if address is not None and (host := network.parts(address)[0].lower()) not in map(str.lower, hosts_of(served)):
        return failed(
            name,
            f"it is for {', '.join(hosts_of(served))}, and sites go to {host}",
            "correct address in federation.toml, or make a server with `fl-dpgan server init --host`",
        )
    return network.dates(served, ca, now=now)


def check_port(port: int, ca: Path, *, seconds: float = network.SECONDS) -> Finding:
    """Whether the port is free, or this server's own SuperLink listens at it."""
    name = "port"
    with socket.socket() as probe:
        probe.settimeout(seconds)
        if probe.connect_ex(("127.0.0.1", port)):
            return _free(port)
    if network.visit(f"127.0.0.1:{port}", ca, seconds=seconds).trusted:
        return ok(name, f"a SuperLink listens at {port}, with a certificate of this federation")
    return failed(
        name,
        f"something else listens at {port}, or a SuperLink with an older certificate",
        "end it, restart the SuperLink, or make a server with another --port",
    )


def check_room(places: Sequence[Path]) -> Finding:
    """Whether the disk has room for Flower's database and the runs."""
    free = min(shutil.disk_usage(place).free for place in places)
    found = f"{machine.size(free)} free for the database and the runs"
    if free < _COMFORT:
        remedy = f"free some space: {machine.size(_COMFORT)} are comfortable"
        return failed("disk", found, remedy) if free < _LEAST else warning("disk", found, remedy)
    return ok("disk", found)


def _free(port: int) -> Finding:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        remedy = "make a server with another --port" if port > 1023 or os.geteuid() == 0 else "use a port above 1023"
        return failed("port", f"{port} cannot be used: {error.strerror}", remedy)
    return ok("port", f"{port} is free; no SuperLink listens yet")
