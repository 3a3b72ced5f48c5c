"""The machine: room, memory and a clock that is kept right."""

import sys
from collections import namedtuple

import pytest
from expected import expect

from fl_dpgan.checks import machine

GB = 10**9


@pytest.fixture
def free(monkeypatch):
    usage = namedtuple("usage", "free")
    return lambda count: monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(count))


@pytest.mark.parametrize(("count", "status"), [(9 * GB, "ok"), (3 * GB, "warning"), (2 * GB, "failed")])
def test_room_on_a_disk_for_all_that_goes_there(tmp_path, free, count, status):
    free(count)
    found = machine.check_disk([(tmp_path / "not/yet/there", 2 * GB), (tmp_path, GB // 2)])
    expect(found, status, "2.5 GB needed", *(["free some"] if status != "ok" else []))


def test_a_real_disk_has_room_for_nothing(tmp_path):
    expect(machine.check_disk([(tmp_path, 10**18)]), "failed", str(tmp_path))


def test_what_a_site_writes(tmp_path):
    cache, ledger = tmp_path / "cache", tmp_path / "ledger.sqlite"
    needs = machine.site_needs(cache, ledger, images=1000, networks=50, rounds=3)
    assert needs == [(cache, 1000), (ledger, 12_400)]
    (cache / "aa").mkdir(parents=True)
    (cache / "aa/images.npy").write_bytes(bytes(1128))
    assert machine.site_needs(cache, ledger, images=1000, networks=50, rounds=3)[0] == (cache, 0)


@pytest.mark.parametrize(("count", "status"), [(8 * GB, "ok"), (3 * GB, "warning"), (GB // 2, "failed")])
def test_memory(count, status):
    expect(machine.check_memory(count, images=5 * GB, networks=10**7), status, "6.0 GB needed")
    assert machine.free_memory() > 0


@pytest.mark.parametrize(("answer", "status"), [("yes", "ok"), ("no", "warning"), ("", "warning"), (None, "warning")])
def test_a_synchronised_clock(answer, status):
    expect(machine.check_synchronised(answer), status, "synchronised")


@pytest.mark.parametrize(("script", "answer"), [("echo yes", "yes"), ("echo no", "no"), ("exit 1", None)])
def test_timedatectl_is_asked(tmp_path, monkeypatch, script, answer):
    program = tmp_path / "timedatectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.ask_timedatectl() == answer


def test_a_machine_without_timedatectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.ask_timedatectl() is None
    assert sys.platform == "linux"
