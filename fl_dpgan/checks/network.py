"""The server as the site sees it: reachable, with a certificate of the federation's authority, and a clock that agrees.

All that is sent is a TLS handshake and one empty request.
"""

import http.client
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509

from fl_dpgan.checks.finding import Finding, failed, ok, warning

#: What a connection, a handshake or an answer may take; the resolver has limits of its own.
SECONDS = 5.0
_SOON = timedelta(days=30)
#: What Flower tolerates of a node's clock: 5 s ahead of the server's, and 5 minutes behind.
_AHEAD, _BEHIND = 5.0, -300.0
#: A `Date` has whole seconds, and is set anew once a second.
_BLUR = 1.5

# OpenSSL's X509_V_ERR_...
_VERDICTS = {
    9: ("it is not valid yet", "set this machine's clock right; else the coordinator's, and `fl-dpgan server renew`"),
    10: ("it has expired", "ask the coordinator to run `fl-dpgan server renew` and restart the SuperLink"),
    62: ("it is for another name than {host}", "ask the coordinator for the address that the certificate is for, and "
         "correct it in federation.toml"),
    64: ("it is for another address than {host}", "ask the coordinator for the name that the certificate is for, and "
         "correct it in federation.toml"),
}  # fmt: skip
_UNKNOWN = (18, 19, 20, 21)


@dataclass(frozen=True)
class Visit:
    """What a visit to the server found; `trusted` if the connection can be used, `offset` in seconds, this clock's."""

    findings: tuple[Finding, ...]
    trusted: bool = False
    offset: float | None = None


def visit(address: str, ca: Path, *, seconds: float = SECONDS) -> Visit:
    """Connect to the server as Flower's node will, ask for nothing, and leave."""
    host, port = parts(address)
    try:
        context = trusting(ca)
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        what = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be used: {error}"
        return Visit((failed("certificate", f"{ca} {what}", "ask the coordinator for ca.crt, and give it as --ca"),))
    try:
        plain = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        return Visit((unreachable(address, error),))
    reached = ok("server", f"{address} answers")
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                der = secure.getpeercert(binary_form=True)
                offset = _offset(secure, host)
        except ssl.SSLCertVerificationError as error:
            return Visit((reached, distrusted(error, host)))
        except OSError as error:
            remedy = "ask the coordinator whether the SuperLink runs with TLS on this port, and no proxy is in between"
            return Visit((failed("server", f"{address} answers, but not with TLS ({_words(error)})", remedy),))
    own = x509.load_pem_x509_certificate(ca.read_bytes())
    served = x509.load_der_x509_certificate(der or b"")
    return Visit((reached, dates(served, own), check_offset(offset)), trusted=True, offset=offset)


def parts(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def trusting(ca: Path) -> ssl.SSLContext:
    """TLS that trusts this authority and no other, as Flower's node does.

    Raises:
        OSError, ValueError: there is no file, or it holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca.read_text("ascii"))
    return context


def unreachable(address: str, error: OSError) -> Finding:
    """Why no connection came about."""
    host, port = parts(address)
    if isinstance(error, socket.gaierror):
        what, remedy = f"the name {host} is not known here", "correct address in federation.toml, or this machine's DNS"
    elif isinstance(error, ConnectionRefusedError):
        what = "nobody listens there"
        remedy = "ask the coordinator whether the SuperLink runs, and check the port of address in federation.toml"
    else:
        what = "no answer" if isinstance(error, TimeoutError) else _words(error)
        remedy = f"have the firewall allow connections from this machine to {host}, TCP port {port}"
    return failed("server", f"{address} cannot be reached: {what}", remedy)


def distrusted(error: ssl.SSLCertVerificationError, host: str) -> Finding:
    """Why the server's certificate does not do."""
    if error.verify_code in _UNKNOWN:
        what = "it is signed by another authority than ca.crt"
        remedy = "ask the coordinator for the federation's ca.crt, by a way you trust"
    else:
        other = (error.verify_message, "ask the coordinator for a new certificate (`fl-dpgan server renew`)")
        what, remedy = _VERDICTS.get(error.verify_code, other)
    return failed("certificate", f"{what.format(host=host)}", remedy)


def dates(served: x509.Certificate, ca: x509.Certificate, *, now: datetime | None = None) -> Finding:
    """How long the server's certificate and its authority, both valid now, will last."""
    ends = {"the server's certificate": served.not_valid_after_utc, "ca.crt": ca.not_valid_after_utc}
    found = ", ".join(f"{what} is valid until {end:%Y-%m-%d}" for what, end in ends.items())
    soon = (now or datetime.now(UTC)) + _SOON
    if ends["ca.crt"] < soon:
        return warning("certificate", found, "ask the coordinator for the federation's next ca.crt")
    if ends["the server's certificate"] < soon:
        return warning("certificate", found, "ask the coordinator to run `fl-dpgan server renew`")
    return ok("certificate", found)


def check_offset(offset: float | None) -> Finding:
    """Whether this machine's clock agrees with the server's well enough for Flower."""
    mend = "synchronise this machine's clock (chrony or systemd-timesyncd)"
    if offset is None:
        return warning("clock", "not known: the server did not tell its time", f"to be sure, {mend}")
    if abs(offset) <= _BLUR:
        return ok("clock", "agrees with the server's")
    found = f"{abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the server's"
    if offset > _AHEAD or offset < _BEHIND:
        return failed("clock", f"{found}; Flower refuses this node", f"{mend}, or ask the coordinator about theirs")
    return warning("clock", found, f"{mend}: with more than 5 s Flower refuses the node")


def _offset(secure: ssl.SSLSocket, host: str) -> float | None:
    """How far this machine's clock is ahead of the one that the server's answers are dated by."""
    connection = http.client.HTTPConnection(host)
    connection.sock = secure
    try:
        before = time.time()
        connection.request("GET", "/", headers={"Connection": "close"})
        date = connection.getresponse().getheader("Date")
        after = time.time()
        return (before + after) / 2 - (parsedate_to_datetime(date or "").timestamp() + 0.5)
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return None


def _words(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)
