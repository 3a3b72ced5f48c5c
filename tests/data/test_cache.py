"""The cache: fresh or read anew, never half, never open to others, and never asked to decode."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from fl_dpgan.data import cache, site
from fl_dpgan.data.site import read_site
from fl_dpgan.errors import DataError
from fl_dpgan.site_file import SiteData


@pytest.fixture
def root(tmp_path):
    for number in range(4):
        path = tmp_path / f"images/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number * 10, np.uint8)).save(path)
    return tmp_path


def read(root, labels=None, classes=("a", "b"), **options):
    data = SiteData(source="folder", path=root / "images", cache=root / "cache")
    return read_site(data, labels or {}, classes, **{"size": 4, "channels": 1, **options})


@pytest.fixture
def decoded(monkeypatch):
    """The files that are decoded."""
    files = []

    def counting(path, frame=None):
        files.append(path.name)
        return original(path, frame)

    original = site.read_picture
    monkeypatch.setattr(site, "read_picture", counting)
    return files


def entry(root):
    (place,) = [path for path in (root / "cache").iterdir() if path.is_dir()]
    return place


def values(images):
    return images.images[:, 0, 0, 0].tolist()


def test_a_second_reading_decodes_nothing_and_gives_the_same(root, decoded):
    first = read(root)
    assert len(decoded) == 4
    again = read(root)
    assert len(decoded) == 4
    assert np.array_equal(first.images, again.images) and first.labels.tolist() == again.labels.tolist() == [0, 0, 1, 1]
    assert first.conversions == again.conversions and values(again) == [0, 20, 10, 30]
    assert isinstance(again.images, np.memmap) and again.images.mode == "c"  # what is written stays in this process


def test_patients_survive_the_cache(root, decoded):
    (root / "list.csv").write_text("path,label,patient\nimages/a/0.png,a,007\nimages/b/1.png,b,\n")
    data = SiteData(source="manifest", path=root / "list.csv", cache=root / "cache")
    for _ in range(2):
        assert read_site(data, {}, ("a", "b"), size=4, channels=1).patients == ("007", "")
    assert len(decoded) == 2


def rewrite(root):
    Image.fromarray(np.full((4, 4), 99, np.uint8)).save(root / "images/a/0.png")


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        lambda root: os.utime(root / "images/a/0.png", ns=(1, 1)),
        lambda root: (root / "images/a/0.png").rename(root / "images/a/00.png"),
        lambda root: (root / "images/a/0.png").rename(root / "images/b/0.png"),
        lambda root: (root / "images/a/0.png").unlink(),
        lambda root: {"size": 5},
        lambda root: {"channels": 3},
        lambda root: {"classes": ("b", "a")},
        lambda root: {"labels": {"a": "b"}},
    ],
)
def test_a_change_of_files_or_settings_is_read_anew_and_the_old_goes(root, decoded, change):
    read(root)
    options = change(root)
    decoded.clear()
    images = read(root, **(options if isinstance(options, dict) else {}))
    assert len(decoded) == len(images.labels) >= 3
    assert entry(root).is_dir()  # one alone


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: flip(place / "images.npy"),
        lambda place: os.truncate(place / "images.npy", 70),
        lambda place: (place / "images.npy").unlink(),
        lambda place: (place / "images.npy").write_bytes(b""),
        lambda place: (place / "records.json").unlink(),
        lambda place: (place / "records.json").write_text("{}"),
        lambda place: (place / "records.json").write_text("[1"),
        lambda place: (place / "records.json").write_bytes(b"\xff\0"),
        lambda place: (place / "records.json").write_text(
            (place / "records.json").read_text().replace("[0, 0, 1, 1]", "[0, 0, 1]")
        ),
        lambda place: (place / "records.json").write_text((place / "records.json").read_text()[:-20]),
    ],
)
def test_a_damaged_cache_is_read_anew(root, decoded, damage):
    read(root)
    damage(entry(root))
    decoded.clear()
    assert values(read(root)) == [0, 20, 10, 30] and len(decoded) == 4
    assert values(read(root)) == [0, 20, 10, 30] and len(decoded) == 4


def test_only_its_user_can_enter_whatever_the_umask(root):
    before = os.umask(0)
    try:
        read(root)
    finally:
        os.umask(before)
    for path in (root / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((root / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o704, 0o777])
def test_a_cache_that_others_can_enter_is_refused(root, decoded, mode):
    (root / "cache").mkdir()
    (root / "cache").chmod(mode)
    with pytest.raises(DataError, match=r"is open to other users of this machine; chmod 700 .*cache$"):
        read(root)
    assert not decoded


def test_a_cache_of_another_user_is_refused(root, decoded, monkeypatch):
    (root / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataError, match="belongs to another user"):
        read(root)
    assert not decoded


def test_a_cache_that_is_a_file_is_refused(root):
    (root / "cache").write_text("")
    with pytest.raises(DataError, match="cannot be the cache"):
        read(root)


def test_a_disk_without_room_is_said_before_anything_is_decoded(root, decoded, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); it takes \d+ MB"):
        read(root)
    assert not decoded and [path.name for path in (root / "cache").iterdir()] == ["lock"]


def test_a_real_limit_on_a_files_size_leaves_nothing_half(root):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match="cannot be written"):
            read(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (root / "cache").iterdir()] == ["lock"]
    assert values(read(root)) == [0, 20, 10, 30]


def test_a_bad_image_leaves_nothing_half_and_what_was_there_before(root, decoded):
    read(root)
    before = entry(root)
    (root / "images/b/4.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"4\.png"):
        read(root)
    assert entry(root) == before
    (root / "images/b/4.png").unlink()
    decoded.clear()
    assert values(read(root)) == [0, 20, 10, 30] and not decoded


def test_a_killed_process_leaves_no_half_cache(root):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from fl_dpgan.data.site import read_site; from fl_dpgan.site_file import SiteData\n"
        "root = Path(sys.argv[1])\n"
        "stop = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done == 3 else None\n"
        "data = SiteData(source='folder', path=root / 'images', cache=root / 'cache')\n"
        "read_site(data, {}, ('a', 'b'), size=4, channels=1, on_progress=stop)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, root], check=False).returncode == -signal.SIGKILL
    assert (root / "cache/partial").is_dir()
    assert values(read(root)) == [0, 20, 10, 30]
    assert not (root / "cache/partial").exists() and entry(root).is_dir()


def test_of_two_readers_one_waits_and_both_get_the_records(root, decoded):
    inside, results = threading.Event(), []

    def slowly(done, total):
        inside.set()
        time.sleep(0.05)

    first = threading.Thread(target=lambda: results.append(values(read(root, on_progress=slowly))))
    first.start()
    assert inside.wait(10)
    results.append(values(read(root)))
    first.join()
    assert results == [[0, 20, 10, 30]] * 2 and len(decoded) == 4


def test_a_disk_that_gives_back_other_bytes_is_an_error(root, monkeypatch):
    monkeypatch.setattr(cache, "_load", lambda place: None)
    with pytest.raises(DataError, match="reads otherwise than it was written"):
        read(root)


def test_what_the_cache_did_not_make_stays_in_its_folder(root):
    (root / "cache" / "images").mkdir(parents=True)
    (root / "cache").chmod(0o700)
    (root / "cache" / "images" / "1.png").write_bytes(b"someone's")
    (root / "cache" / "notes").write_text("someone's")
    read(root)
    read(root, size=5)  # the first entry is stale now, and goes
    assert (root / "cache" / "images" / "1.png").read_bytes() == b"someone's"
    assert (root / "cache" / "notes").read_text() == "someone's"
    assert len([path for path in (root / "cache").iterdir() if len(path.name) == 64]) == 1
