"""The server as a site sees it: each way not to reach or not to trust it has a remedy of its own."""

import socket
from contextlib import closing
from datetime import UTC, datetime

import pytest
from expected import DAY, dated, expect

from fl_dpgan.checks import network
from fl_dpgan.deploy.certificates import authority, server_certificate

pytest_plugins = ["loopback"]

BROKEN = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def visit(port, ca_file, host="localhost", seconds=5.0):
    return network.visit(f"{host}:{port}", ca_file, seconds=seconds)


def only(visit):
    """The one finding that is not ok of a visit that ended early."""
    assert not visit.trusted
    (found,) = [finding for finding in visit.findings if finding.status != "ok"]
    return found


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_server_in_order(serving, ca, ca_file, host):
    found = visit(serving(server_certificate(ca, ["server.example"], 365)), ca_file, host)
    assert found.trusted and abs(found.offset) < 3
    assert [finding.name for finding in found.findings] == ["server", "certificate", "clock"]
    for finding in found.findings:
        expect(finding, "ok")


def test_a_certificate_that_expired(serving, ca, ca_file):
    found = only(visit(serving(dated(ca, -9 * DAY, -1 * DAY)), ca_file))
    expect(found, "failed", "expired", "server renew")
    assert found.name == "certificate"


def test_a_certificate_of_the_future(serving, ca, ca_file):
    expect(only(visit(serving(dated(ca, DAY, 9 * DAY)), ca_file)), "failed", "not valid yet", "clock")


def test_a_certificate_that_expires_soon(serving, ca, ca_file):
    found = visit(serving(server_certificate(ca, ["localhost"], 29)), ca_file)
    assert found.trusted
    expect(found.findings[1], "warning", "valid until", "server renew")


def test_an_authority_that_expires_soon(ca):
    old = authority(10)
    served = server_certificate(old, ["localhost"], 365).certificate
    expect(network.dates(served, old.certificate), "warning", "next ca.crt")
    later = datetime.now(UTC) + 5 * DAY
    expect(network.dates(served, ca.certificate, now=later), "ok")


@pytest.mark.parametrize(("asked", "word"), [("127.0.0.2", "address"), ("localhost", "name")])
def test_a_certificate_for_another_name(serving, ca, ca_file, asked, word, monkeypatch):
    monkeypatch.setattr("fl_dpgan.deploy.certificates._LOOPBACK", ())
    port = serving(server_certificate(ca, ["server.example"], 365))
    plain = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda at, **options: plain(("127.0.0.1", at[1]), **options))
    expect(only(visit(port, ca_file, asked)), "failed", f"another {word} than {asked}", "federation.toml")


def test_a_certificate_of_another_authority(serving, ca_file):
    port = serving(server_certificate(authority(365), ["localhost"], 365))
    expect(only(visit(port, ca_file)), "failed", "another authority", "ca.crt")


@pytest.mark.parametrize("content", [None, "", "no certificate", BROKEN, "ä"])
def test_a_ca_file_that_is_missing_or_none(tmp_path, content):
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    expect(only(visit(1, path)), "failed", str(path), "--ca")


def test_a_port_at_which_nobody_listens(ca_file):
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    expect(only(visit(port, ca_file)), "failed", "nobody listens", "SuperLink")


def test_a_port_that_does_not_speak_tls(ca_file):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        found = only(visit(silent.getsockname()[1], ca_file, "127.0.0.1", seconds=0.2))
    expect(found, "failed", "not with TLS", "proxy")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), ["not known here", "DNS"]),
        (TimeoutError(), ["no answer", "firewall", "TCP port 8100"]),
        (OSError(113, "No route to host"), ["No route to host", "firewall"]),
    ],
)
def test_ways_not_to_reach_a_server(error, words):
    expect(network.unreachable("fl.example:8100", error), "failed", "fl.example", *words)


@pytest.mark.parametrize(
    ("behind", "status", "words"),
    [(4, "warning", ["4 s ahead"]), (60, "failed", ["60 s ahead", "refuses"]), (-60, "warning", ["60 s behind"]),
     (-900, "failed", ["900 s behind", "refuses"])],
)  # fmt: skip
def test_a_clock_that_differs(serving, ca, ca_file, behind, status, words):
    found = visit(serving(server_certificate(ca, ["localhost"], 365), behind=behind), ca_file)
    assert found.offset == pytest.approx(behind, abs=1.5)
    expect(network.check_offset(float(behind)), status, *words, "chrony")
    assert found.findings[2].status == status


def test_a_server_that_does_not_tell_its_time(serving, ca, ca_file):
    found = visit(serving(server_certificate(ca, ["localhost"], 365), dated=False), ca_file)
    assert found.trusted and found.offset is None
    expect(found.findings[2], "warning", "not known")


def test_an_address_is_taken_apart():
    assert network.parts("fl.example:8100") == ("fl.example", 8100)
    assert network.parts("[::1]:1") == ("::1", 1)
