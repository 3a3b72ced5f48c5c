"""The guard's socket: a folder that lets Flower's user in and no third one, and whether a guard listens."""

import grp
import os
import pwd
import socket
import stat
from pathlib import Path

from fl_dpgan.checks.finding import Finding, failed, ok, warning
from fl_dpgan.checks.permissions import WRITE, User

_LONGEST = 107  # bytes of a socket's path, in Linux


def check_socket(path: Path, owner: int, user: User | None) -> Finding:
    """Whether the guard can make its socket, and Flower's user and no third one reach it.

    Args:
        owner: the guard's user.
    """
    name, folder = "guard's socket", path.parent
    if len(os.fsencode(path)) > _LONGEST:
        return failed(name, f"{path} is longer than {_LONGEST} bytes", "set guard.socket to a shorter path")
    group = "GROUP: one that only the guard and Flower are in"
    try:
        state = folder.stat()
    except OSError as error:
        # the unit of clients/deploy makes it when it starts, and takes it away again
        remedy = f"without the systemd unit, which makes it: install -d -m 2750 -o GUARD -g GROUP {folder} ({group})"
        return warning(name, f"its folder {folder}: {error.strerror}", remedy)
    if not stat.S_ISDIR(state.st_mode):
        return failed(name, f"{folder} is not a folder", "set guard.socket to a path in a folder of its own")
    if state.st_uid != owner:
        return failed(name, f"its folder {folder} belongs to {_name(state.st_uid)}", f"chown {_name(owner)} {folder}")
    mode = stat.S_IMODE(state.st_mode)
    if mode & 0o007:
        return failed(name, f"its folder {folder} is open to all users ({mode:04o})", f"chmod 2750 {folder}")
    if not mode & stat.S_IXGRP or mode & stat.S_IWGRP:
        what = "does not let its group in" if not mode & stat.S_IXGRP else "lets its group write"
        return failed(name, f"its folder {folder} {what} ({mode:04o})", f"chmod 2750 {folder}")
    if user is not None and user.uid != owner and state.st_gid not in user.groups:
        remedy = f"chgrp GROUP {folder} ({group}), or usermod -aG {_group(state.st_gid)} {user.name}"
        return failed(name, f"{user.name} is not in the group {_group(state.st_gid)} of {folder}", remedy)
    if user is not None and user.uid == owner:
        return failed(name, f"{user.name} is the guard's user too", "run the guard as a user of its own")
    if user is not None and not user.reaches(path.resolve()):
        return failed(name, f"{user.name} does not reach {folder}", "let it enter the folders above (chmod o+x)")
    if not listens(path):
        return ok(name, f"{folder} ({mode:04o}); no guard listens yet")
    if user is not None and not user.may(path, WRITE):
        remedy = f"chmod g+s {folder}, and start the guard again"
        return failed(name, f"a guard listens at {path}, whose group {user.name} is not in", remedy)
    return ok(name, f"{folder} ({mode:04o}); a guard listens")


def listens(path: Path) -> bool:
    """Whether somebody answers at a socket; a guard notes in its log that one came and went."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
