"""A federation's own certificate authority, and the server's certificate that it signs."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_dpgan.errors import ConfigError

#: Flower's own processes on the server's machine reach the SuperLink by these.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Signed:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate, for all to read."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key, unencrypted: a server has to start without a person."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> "Signed":
        """From their PEM files.

        Raises:
            ConfigError: they are not a certificate and its elliptic-curve key.
        """
        try:
            found, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the certificate or its key cannot be read as PEM: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or found.public_key() != private.public_key():
            raise ConfigError("the certificate and the key do not belong together; put back a copy of both")
        return cls(found, private)


def authority(days: int) -> Signed:
    """A new certificate authority, which can sign servers and nothing below it."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fl-dpgan federation CA")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    built = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return Signed(built.sign(key, hashes.SHA384()), key)


def server_certificate(
    ca: Signed, hosts: Sequence[str], days: int, *, key: ec.EllipticCurvePrivateKey | None = None
) -> Signed:
    """A server's certificate for these names and addresses, and for this machine under its own.

    Args:
        key: of the certificate that this one replaces; a new one where there is none.

    Raises:
        ConfigError: a host is neither a DNS name nor an IP address.
    """
    key = key or ec.generate_private_key(ec.SECP384R1())
    names = [_name(host) for host in dict.fromkeys((*hosts, *_LOOPBACK))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    issuer = ca.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    built = (
        _builder(subject, ca.certificate.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    return Signed(built.sign(ca.key, hashes.SHA384()), key)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a server's certificate is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        labels = host.split(".")
        if len(host) > 253 or not all(_is_label(label) for label in labels) or labels[-1].isdigit():
            raise ConfigError(
                f"host {host!r} is neither a DNS name nor an IP address; give it without scheme and port"
            ) from None
        return x509.DNSName(host)


def _is_label(label: str) -> bool:
    plain = label.replace("-", "a")
    return 0 < len(label) < 64 and label.isascii() and plain.isalnum() and label[0] != "-" and label[-1] != "-"


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # a site's clock may be a little behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
