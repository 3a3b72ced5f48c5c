"""All checks of a site, in the order in which they are mended."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dpgan.checks import budget, data, guard_socket, machine, network, node_key, permissions
from fl_dpgan.checks.finding import Finding, ok, warning
from fl_dpgan.errors import FlDpganError

if TYPE_CHECKING:
    from fl_dpgan.config import Federation
    from fl_dpgan.site_file import SiteData, SiteFile


#: What reading images loads late: loaded before another user's rights are taken, who may not read Python's own files.
_LATE = ("encodings.utf_8_sig", "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "pydicom", "fl_dpgan.data.dicom")


def check_site(
    file: SiteFile,
    federation: Federation,
    *,
    config: Path,
    key: Path,
    ca: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Look at everything that a site needs; what this says stays at the site."""
    from fl_dpgan.federation.deployment import site_models

    for late in _LATE:
        with suppress(ImportError):  # pydicom is an extra
            import_module(late)
    models = site_models(federation)
    networks = sum(t.nbytes for net in (models.generator, models.discriminator) for t in net.state_dict().values())
    guard = _guard_user(file)
    # root that does not know the guard's user must not make a cache which that user then cannot use
    keep = os.geteuid() != 0 or os.path.exists(file.ledger.parent)
    findings = [ok("files", f"{config} and {file.federation}: site {file.name}, federation {federation.name}")]
    with permissions.acting_as(guard):
        findings += budget.check_budget(file, federation)
        read = partial(data.read, file, federation, on_progress, keep=keep)
        found, images = data.check_data(read, file.policy, federation.classes, may_lack=file.data.allow_missing_classes)
    findings += found
    count = len(images.labels) if images else file.policy.declared_size
    size = count * federation.model.channels * federation.model.size**2
    needs = machine.site_needs(
        file.data.cache, file.ledger, images=size, networks=networks, rounds=federation.training.rounds
    )
    findings.append(machine.check_disk(needs))
    findings.append(machine.check_memory(machine.free_memory(), images=size, networks=networks))
    return [*findings, *check_users(file, config, ca, guard), *check_connection(file, federation, key, ca)]


def check_users(file: SiteFile, config: Path, ca: Path, guard: int) -> list[Finding]:
    """What Flower's user may and may not do here."""
    user = permissions.User.named(file.guard.flower_user)
    findings = [permissions.check_user(file.guard.flower_user, user)]
    if user is not None and user.uid != 0:
        ledger = [file.ledger.with_name(file.ledger.name + end) for end in ("", "-wal", "-shm")]
        findings += [
            permissions.check_hidden("data", _places(file.data), user),
            permissions.check_hidden("ledger", ledger, user),
            permissions.check_hidden("cache", [file.data.cache], user),
            permissions.check_settings([config, file.federation, ca], user),
        ]
    return [*findings, guard_socket.check_socket(file.guard.socket, guard, user)]


def check_connection(file: SiteFile, federation: Federation, key: Path, ca: Path) -> list[Finding]:
    """The way to the server, and whether it knows the site."""
    visit = network.visit(federation.address, ca)
    found, private = node_key.check_key(key, permissions.User.named(file.guard.flower_user))
    asked = (
        node_key.check_registered(federation.address, ca, private)
        if visit.trusted and private
        else node_key.not_asked()
    )
    findings = [*visit.findings, found, asked]
    if not visit.trusted:
        findings.append(warning("clock", "not known: no server to compare with", "reach the server first"))
    return findings


def _guard_user(file: SiteFile) -> int:
    """The guard's user: the owner of the ledger's folder, which it writes to; without a folder, whoever asks."""
    try:
        return file.ledger.parent.stat().st_uid
    except OSError:
        return os.geteuid()


def _places(data: SiteData) -> list[Path]:
    """Where the data lie: what site.toml names, and the folders of the files that a manifest names."""
    if data.source != "manifest":
        return [data.path]
    from fl_dpgan.data.manifest import image_of, read_rows

    try:
        images = {image_of(data.path, row)[0].parent for row in read_rows(data.path)}
    except (FlDpganError, OSError):
        return [data.path]
    return [data.path, *sorted(images)]
