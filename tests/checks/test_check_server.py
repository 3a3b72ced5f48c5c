"""`fl-dpgan server check`: a server's folder in order, and each thing that may be wrong with it."""

import re
import socket
from contextlib import closing
from datetime import UTC, datetime

import pytest
from conftest import run_cli
from expected import DAY, dated, expect, written
from test_check_data import federation

from fl_dpgan.checks import server
from fl_dpgan.deploy.certificates import Signed, authority, server_certificate
from fl_dpgan.deploy.server import ServerFolder

pytest_plugins = ["loopback"]


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def made(tmp_path):
    return ServerFolder.create(
        tmp_path / "srv", ["localhost"], port=free_port(), ca_days=3650, days=365, classes=["normal", "sick"]
    )


def run(monkeypatch, *arguments):
    return run_cli(monkeypatch, "server", "check", *arguments)


def authority_of(made):
    return Signed.read((made.path / "ca.crt").read_bytes(), (made.path / "ca.key").read_bytes())


def test_a_server_in_order(made, monkeypatch, capsys):
    assert run(monkeypatch, made.path, "--declared-size", "400") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ready to start" in out and "site of 400 images" in out and "failed" not in out
    names = [finding.name for finding in server.check_server(made, 400)]
    assert names == ["folder", "ca.key", "server.key", "federation.toml", "cost of a run", "certificate", "port",
                     "clock", "disk"]  # fmt: skip


def test_a_server_that_may_not_start_says_why_and_exits_with_1(made, monkeypatch, capsys):
    (made.path / "server.key").chmod(0o644)
    (made.path / "federation.toml").write_text("name = 3\n")
    assert run(monkeypatch, made.path) == 1
    assert "not ready: server.key, federation.toml" in capsys.readouterr().out


def test_a_folder_that_holds_no_server_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "server init" in err


@pytest.mark.parametrize("mode", [0o750, 0o701])
def test_a_folder_that_is_open(made, mode):
    made.path.chmod(mode)
    expect(server.check_folder(made.path), "failed", f"{mode:04o}", "chmod 700")


def test_private_keys(made):
    expect(server.check_private(made.path / "ca.key"), "ok", "0600")
    (made.path / "ca.key").chmod(0o640)
    expect(server.check_private(made.path / "ca.key"), "failed", "0640", "chmod 600")
    for one in ("ca", "server"):
        (made.path / f"{one}.key").unlink()
    expect(server.check_private(made.path / "ca.key"), "ok", "not here")
    expect(server.check_private(made.path / "server.key"), "failed", "not there", "copy")


def test_a_certificate_in_order_and_the_name_it_is_for(made):
    expect(server.check_certificate(made.path, "localhost:1"), "ok", "valid until")
    expect(server.check_certificate(made.path, None), "ok")
    expect(server.check_certificate(made.path, "LocalHost:1"), "ok")
    expect(server.check_certificate(made.path, "other.example:1"), "failed", "it is for localhost", "--host")


def test_dates_of_a_certificate(made):
    ca = authority_of(made)
    written(made.path, dated(ca, -9 * DAY, -1 * DAY))
    expect(server.check_certificate(made.path, None), "failed", "server.crt expired", "server renew")
    written(made.path, dated(ca, 1 * DAY, 9 * DAY))
    expect(server.check_certificate(made.path, None), "failed", "not valid before", "clock")
    written(made.path, dated(ca, -1 * DAY, 9 * DAY))
    expect(server.check_certificate(made.path, None), "warning", "valid until", "server renew")
    late = datetime.now(UTC) + 3651 * DAY
    expect(server.check_certificate(made.path, None, now=late), "failed", "ca.crt expired", "server init")


def test_files_that_do_not_belong_together(made):
    other = server_certificate(authority_of(made), ["localhost"], 365)
    (made.path / "server.crt").write_bytes(other.certificate_pem)
    expect(server.check_certificate(made.path, None), "failed", "server.key do not belong together", "copy")
    (made.path / "server.key").write_bytes(other.key_pem)
    expect(server.check_certificate(made.path, None), "ok")
    (made.path / "ca.crt").write_bytes(authority(365).certificate_pem)
    expect(server.check_certificate(made.path, None), "failed", "not signed by ca.crt", "copy")
    (made.path / "server.key").write_text("damaged")
    expect(server.check_certificate(made.path, None), "failed", "damaged", "copy")
    (made.path / "server.crt").unlink()
    expect(server.check_certificate(made.path, None), "failed", "server.crt cannot be read", "copy")


def test_a_federation_file_that_is_not_filled_in(tmp_path):
    made = ServerFolder.create(tmp_path / "srv", ["localhost"], port=free_port(), ca_days=365, days=365)
    found = {finding.name: finding for finding in server.check_server(made, 400)}
    expect(found["federation.toml"], "failed", "classes")
    assert "cost of a run" not in found and found["certificate"].status == "ok"


def test_an_address_with_another_port():
    expect(server.check_address("fl.example:8100", 8100), "ok", "fl.example:8100")
    expect(server.check_address("fl.example:443", 8100), "warning", "443", "8100")


def test_what_a_run_costs():
    expect(server.check_plan(federation(), 500), "ok", "site of 500 images", "30 rounds of 5 D steps", "q 0.128")
    expect(server.check_plan(federation(), 63), "failed", "batch size 64", "batch_size")


def test_a_port_that_is_free_or_has_this_servers_superlink_or_another(made, serving, ca, ca_file):
    expect(server.check_port(made.port, ca_file), "ok", "is free")
    port = serving(server_certificate(ca, ["localhost"], 365))
    expect(server.check_port(port, ca_file), "ok", "a SuperLink listens")
    expect(server.check_port(port, made.path / "ca.crt"), "failed", "something else", "--port")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        expect(server.check_port(silent.getsockname()[1], ca_file, seconds=0.2), "failed", "something else")
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        expect(server.check_port(elsewhere.getsockname()[1], ca_file), "failed", "in use", "--port")


@pytest.mark.parametrize(("free", "status"), [(6 * 10**9, "ok"), (10**9, "warning"), (10**8, "failed")])
def test_room_for_the_database(tmp_path, monkeypatch, free, status):
    monkeypatch.setattr(server.shutil, "disk_usage", lambda path: type("usage", (), {"free": free}))
    found = server.check_room([tmp_path])
    expect(found, status)
    assert re.search(r"\d (GB|MB) free", found.found)
