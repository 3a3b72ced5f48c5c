"""The authority's certificate chain holds for the server's names, by two other verifiers, and for nothing else."""

import ipaddress
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fl_dpgan.deploy.certificates import Signed, authority, hosts_of, server_certificate
from fl_dpgan.errors import ConfigError

CA = authority(3650)
SERVER = server_certificate(CA, ["fed.example.org", "192.0.2.7", "2001:db8::7"], 730)


def verifier(subject, ca=CA, at=None):
    store = Store([ca.certificate])
    return PolicyBuilder().store(store).time(at or datetime.now(UTC)).build_server_verifier(subject)


@pytest.mark.parametrize("host", ["fed.example.org", "192.0.2.7", "2001:db8::7", "localhost", "127.0.0.1", "::1"])
def test_cryptographys_verifier_accepts_every_host(host):
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    assert len(verifier(subject).verify(SERVER.certificate, [])) == 2


@pytest.mark.parametrize("host", ["example.org", "other.example.org", "fed.example.org.evil.com"])
def test_another_name_is_refused(host):
    with pytest.raises(VerificationError):
        verifier(x509.DNSName(host)).verify(SERVER.certificate, [])


def test_another_authority_is_refused():
    with pytest.raises(VerificationError):
        verifier(x509.DNSName("localhost"), ca=authority(1)).verify(SERVER.certificate, [])


def test_it_is_valid_for_so_many_days():
    later = datetime.now(UTC) + timedelta(days=729)
    verifier(x509.DNSName("localhost"), at=later).verify(SERVER.certificate, [])
    with pytest.raises(VerificationError):
        verifier(x509.DNSName("localhost"), at=later + timedelta(days=2)).verify(SERVER.certificate, [])
    left = CA.certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=3649) < left <= timedelta(days=3650)


def handshake(tmp_path, hostname: str) -> str | None:
    """What OpenSSL, with strict checks, says to a real handshake on a loopback socket."""
    for name, content in {
        "s.crt": SERVER.certificate_pem,
        "s.key": SERVER.key_pem,
        "ca.crt": CA.certificate_pem,
    }.items():
        (tmp_path / name).write_bytes(content)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            accepted, _ = listening.accept()
            try:
                with served.wrap_socket(accepted, server_side=True) as wrapped:
                    wrapped.sendall(b"hello")
            except (ssl.SSLError, OSError):
                accepted.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with (
                socket.create_connection(listening.getsockname(), timeout=10) as plain,
                client.wrap_socket(plain, server_hostname=hostname) as wrapped,
            ):
                return wrapped.recv(5).decode()
        except ssl.SSLCertVerificationError:
            return None
        finally:
            thread.join(10)


def test_a_handshake_succeeds_under_the_servers_name_only(tmp_path):
    assert handshake(tmp_path, "127.0.0.1") == "hello"
    assert handshake(tmp_path, "fed.example.org") == "hello"
    assert handshake(tmp_path, "other.example.org") is None


@pytest.mark.parametrize("host", ["", "https://x.org", "x.org:8100", "a b", "-x.org", "x..org", "10.0.0.256", "x" * 64])
def test_what_is_no_host_is_refused(host):
    with pytest.raises(ConfigError, match="neither a DNS name nor an IP address"):
        server_certificate(CA, [host], 1)


def test_pem_files_are_read_back_and_must_belong_together():
    again = Signed.read(SERVER.certificate_pem, SERVER.key_pem)
    assert again.certificate == SERVER.certificate
    assert hosts_of(again.certificate)[:3] == ["fed.example.org", "192.0.2.7", "2001:db8::7"]
    with pytest.raises(ConfigError, match="do not belong together"):
        Signed.read(SERVER.certificate_pem, CA.key_pem)
    with pytest.raises(ConfigError, match="cannot be read"):
        Signed.read(b"", SERVER.key_pem)
