"""Who may read what, by owners and modes of real files; as root, as another user too."""

import os
import pwd
import shutil
import socket
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from expected import expect

from fl_dpgan.checks import guard_socket, permissions
from fl_dpgan.checks.permissions import User

UID = 54322
FLOWER = User("flower", UID, UID, frozenset([UID, 54400]))

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to other users and to act as them")


@pytest.fixture
def place():
    """A folder that every user may enter, as pytest's own are not."""
    path = Path(tempfile.mkdtemp()).resolve()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def folder(path, mode=0o700):
    path.mkdir()
    path.chmod(mode)
    return path


def file(path, mode=0o600):
    path.write_text("x")
    path.chmod(mode)
    return path


def hidden(*paths):
    return permissions.check_hidden("data", paths, FLOWER)


@pytest.mark.parametrize("mode", [0o700, 0o600])
def test_a_folder_that_is_closed(place, mode):
    expect(hidden(folder(place / "images", mode)), "ok", "flower cannot read it")


@pytest.mark.parametrize("mode", [0o704, 0o701, 0o755])
def test_a_folder_that_is_open(place, mode):
    expect(hidden(folder(place / "images", mode)), "failed", "flower may read", "chmod -R go-rwx", "images")


def test_a_file_is_as_open_as_itself_and_the_folders_above(place):
    closed, opened = folder(place / "closed"), folder(place / "open", 0o755)
    expect(hidden(file(closed / "a", 0o644), file(opened / "b")), "ok")
    expect(hidden(file(opened / "c", 0o644)), "failed", "may read", "open/c")
    link = place / "link"
    link.symlink_to(closed / "a")
    expect(hidden(link), "ok")
    (closed / "link").symlink_to(opened / "c")
    expect(hidden(closed / "link"), "failed", "open/c")


def test_what_is_not_there_yet(place):
    expect(hidden(place / "cache"), "ok", "not made yet")


def test_a_file_that_may_be_replaced(place):
    writable = folder(place / "writable", 0o757)
    ledger = file(writable / "ledger.sqlite")
    expect(hidden(ledger), "failed", "may replace", "chmod go-w")
    expect(permissions.check_settings([ledger], FLOWER), "failed", "may change", "go-w")
    deep = folder(writable / "deep")
    deep.chmod(0o711)
    expect(hidden(file(deep / "ledger.sqlite")), "failed", "may replace", "folders above")
    writable.chmod(0o1757)  # as /tmp: each its own
    expect(hidden(ledger), "ok")
    expect(permissions.check_settings([file(place / "site.toml", 0o646)], FLOWER), "failed", "may change")
    expect(permissions.check_settings([file(place / "other.toml", 0o644)], FLOWER), "ok")
    expect(permissions.check_settings([file(place / "closed.toml", 0o600)], FLOWER), "failed", "cannot read", "a+r")
    expect(permissions.check_settings([place / "none"], FLOWER), "warning", "not known", "root")


@as_root
def test_groups_and_owners_count(place):
    path = folder(place / "images", 0o750)
    expect(hidden(path), "ok")
    os.chown(path, 0, 54400)
    expect(hidden(path), "failed", "may read")
    path.chmod(0o705)
    # the group's rights hold for its members, even where others have more
    expect(hidden(path), "ok")
    os.chown(path, UID, 0)
    expect(hidden(path), "failed", "belongs to flower", "chown")


@as_root
def test_root_asks_the_kernel_too(place, monkeypatch):
    path = file(place / "ledger", 0o604)
    assert FLOWER._opens(path)
    path.chmod(0o600)
    assert not FLOWER._opens(path)
    assert not FLOWER._opens(folder(place / "closed"))
    assert FLOWER._opens(folder(place / "listed", 0o704)) and FLOWER._opens(folder(place / "entered", 0o701))
    # an access list: the mode alone does not show it
    path.chmod(0o604)
    monkeypatch.setattr(User, "may", lambda self, path, *bits: False)
    expect(hidden(path), "failed", "may read")


@as_root
def test_what_cannot_be_looked_at_is_not_called_safe(place):
    closed = folder(place / "closed")
    file(closed / "images")
    with permissions.acting_as(UID):
        expect(hidden(closed / "images"), "warning", "not known", "as root")


def test_users():
    me = pwd.getpwuid(os.geteuid())
    user = User.named(me.pw_name)
    assert (user.uid, user.gid) == (me.pw_uid, me.pw_gid) and me.pw_gid in user.groups
    assert User.named("no-such-user") is None
    expect(permissions.check_user("fl-flower", None), "warning", "no user fl-flower", "useradd")
    expect(permissions.check_user("root", User("root", 0, 0, frozenset([0]))), "failed", "root", "guard.flower_user")
    expect(permissions.check_user("flower", FLOWER), "ok", str(UID))


@as_root
def test_acting_as_another_user_and_back(place):
    closed, theirs = file(place / "closed"), folder(place / "theirs")
    os.chown(theirs, UID, UID)
    before = os.geteuid(), os.getegid(), os.getgroups(), os.umask(0o022)

    def act():
        with permissions.acting_as(UID):
            assert not os.access(closed, os.R_OK, effective_ids=True)
            (theirs / "made").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        act()
    assert (os.geteuid(), os.getegid(), os.getgroups(), os.umask(before[3])) == (*before[:3], 0o022)
    state = (theirs / "made").stat()
    assert (state.st_uid, state.st_mode & 0o777) == (UID, 0o600)


# --- the guard's socket


def socket_of(path, owner=None, user=None):
    return guard_socket.check_socket(path, os.geteuid() if owner is None else owner, user)


def member(path):
    return User("flower", UID, UID, frozenset([UID, path.stat().st_gid]))


def test_a_sockets_folder_in_order(place):
    run = folder(place / "run", 0o2750)
    expect(socket_of(run / "guard.sock", user=member(run)), "ok", "no guard listens yet")
    expect(socket_of(run / "guard.sock"), "ok")
    with closing(socket.socket(socket.AF_UNIX)) as guard:
        guard.bind(str(run / "guard.sock"))
        expect(socket_of(run / "guard.sock", user=member(run)), "ok", "no guard listens")
        guard.listen()
        (run / "guard.sock").chmod(0o660)
        expect(socket_of(run / "guard.sock", user=member(run)), "ok", "a guard listens")
        (run / "guard.sock").chmod(0o600)
        expect(socket_of(run / "guard.sock", user=member(run)), "failed", "a guard listens", "chmod g+s")


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o755, "open to all"), (0o751, "open to all"), (0o700, "not let its group in"), (0o770, "group write")],
)
def test_a_folder_of_another_mode(place, mode, words):
    run = folder(place / "run", mode)
    expect(socket_of(run / "guard.sock", user=member(run)), "failed", words, f"{mode:04o}", "chmod 2750")


def test_a_folder_that_is_missing_or_none(place):
    expect(socket_of(place / "run/guard.sock"), "warning", "No such file", "systemd", "install -d")
    expect(socket_of(file(place / "run") / "guard.sock"), "failed", "not a folder")


def test_a_path_too_long_for_a_socket(place):
    run = folder(place / ("r" * 100), 0o2750)
    expect(socket_of(run / "guard.sock"), "failed", "107", "shorter")


def test_another_owner_another_group_and_the_same_user(place):
    run = folder(place / "run", 0o2750)
    path = run / "guard.sock"
    expect(socket_of(path, owner=os.geteuid() + 7), "failed", "belongs to", "chown")
    expect(socket_of(path, user=FLOWER), "failed", "not in the group", "usermod -aG")
    same = User("guard", os.geteuid(), os.getegid(), frozenset())
    expect(socket_of(path, user=same), "failed", "guard's user too")
    place.chmod(0o700)
    expect(socket_of(path, user=member(run)), "failed", "does not reach")
