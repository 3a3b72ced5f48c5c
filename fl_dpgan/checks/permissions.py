"""Who may read what: images, ledger and cache are kept from Flower's user, and the rules are safe from it.

The answer is computed from owners and modes, for no process can ask on behalf of another user; root asks as that user
too, which also sees access lists.
"""

import errno
import os
import pwd
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fl_dpgan.checks.finding import Finding, failed, ok, warning

READ, WRITE, ENTER = 4, 2, 1
_AS_ROOT = "run the check as root"


@dataclass(frozen=True)
class User:
    """A user as the kernel sees one: a number, and the numbers of its groups."""

    name: str
    uid: int
    gid: int
    groups: frozenset[int]

    @classmethod
    def named(cls, name: str) -> "User | None":
        """The machine's user of this name."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            return None
        return cls(name, entry.pw_uid, entry.pw_gid, frozenset(os.getgrouplist(name, entry.pw_gid)))

    def may(self, path: Path, *bits: int) -> bool:
        """Whether one of these rights is given by the path's own mode."""
        state = path.stat()
        shift = 6 if state.st_uid == self.uid else 3 if state.st_gid in self.groups else 0
        return self.uid == 0 or any(state.st_mode >> shift & bit for bit in bits)

    def reaches(self, path: Path) -> bool:
        """Whether the user may enter every folder above the path."""
        return all(self.may(folder, ENTER) for folder in path.parents)

    def reads(self, path: Path) -> bool:
        """Whether the user can read the file, or list or enter the folder."""
        rights = (READ, ENTER) if path.is_dir() else (READ,)
        return (self.reaches(path) and self.may(path, *rights)) or (os.geteuid() == 0 and self._opens(path))

    def replaces(self, path: Path) -> bool:
        """Whether the user can write to the path, or put something else in its place or in that of a folder above."""
        if self.reaches(path) and self.may(path, WRITE):
            return True
        return any(self._renames(one, folder) for one, folder in pairwise((path, *path.parents)))

    def _renames(self, path: Path, folder: Path) -> bool:
        state = folder.stat()
        sticky = state.st_mode & stat.S_ISVTX and self.uid not in (state.st_uid, path.stat().st_uid)
        return not sticky and self.reaches(path) and self.may(folder, WRITE)

    def _opens(self, path: Path) -> bool:
        """The kernel's own answer, access lists and all; for root alone."""
        tests = ["-r", str(path), *(["-o", "-x", str(path)] if path.is_dir() else [])]
        who = {"user": self.uid, "group": self.gid, "extra_groups": sorted(self.groups)}
        try:
            done = subprocess.run(["test", *tests], cwd="/", timeout=5, check=False, **who)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired as error:  # a network's disk, say
            raise TimeoutError(errno.ETIMEDOUT, "no answer") from error
        return bool(done.returncode == 0)


def check_user(name: str, user: User | None) -> Finding:
    """Whether Flower's user is there."""
    if user is None:
        return warning("Flower's user", f"there is no user {name} here", f"make one: useradd --system {name}")
    if user.uid == 0:
        return failed("Flower's user", f"{name} is root, who reads everything", "set guard.flower_user to a user apart")
    return ok("Flower's user", f"{name} (uid {user.uid})")


def check_hidden(what: str, paths: Iterable[Path], user: User) -> Finding:
    """Whether paths are kept from Flower's user, and from being put in another's place by it."""
    name, seen = f"{what} kept from Flower", 0
    for path in _resolved(paths):
        try:
            if not path.exists():
                continue
            seen += 1
            remedy = f"chmod -R go-rwx {path}, as its owner"
            if path.stat().st_uid == user.uid:
                owner = "give it to the guard's user (chown)"
                return failed(name, f"{path} belongs to {user.name}", f"{owner}, then {remedy}")
            if user.reads(path):
                return failed(name, f"{user.name} may read {path}", remedy)
            if user.replaces(path):
                return failed(name, f"{user.name} may replace {path}", f"chmod go-w {path} and the folders above it")
        except OSError as error:
            return warning(name, f"not known: {path}: {error.strerror}", _AS_ROOT)
    return ok(name, f"{user.name} cannot read it" if seen else "not made yet")


def check_settings(paths: Iterable[Path], user: User) -> Finding:
    """Whether what rules the guard can be read by Flower's user, and not changed."""
    name = "settings kept from Flower"
    for path in _resolved(paths):
        try:
            if user.replaces(path):
                remedy = f"chown them to the guard's user or root, and chmod go-w {path} and the folders above"
                return failed(name, f"{user.name} may change {path}", remedy)
            if path.exists() and not user.reads(path):
                return failed(name, f"{user.name} cannot read {path}, which the node needs", f"chmod a+r {path}")
        except OSError as error:
            return warning(name, f"not known: {path}: {error.strerror}", _AS_ROOT)
    return ok(name, f"{user.name} cannot change them")


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """As root, do what follows with this user's rights; anybody else is who they are."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    group, groups, mask = os.getegid(), os.getgroups(), os.umask(0o077)
    try:
        entry = pwd.getpwuid(uid)
        mine, others = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        mine, others = uid, [uid]
    os.setgroups(others)
    os.setegid(mine)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
        os.umask(mask)


def _resolved(paths: Iterable[Path]) -> Iterator[Path]:
    """The paths without links: what counts is where a file really lies."""
    return (path.resolve() for path in paths)
