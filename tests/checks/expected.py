"""How a finding has to look, and certificates of every kind."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fl_dpgan.checks.finding import Finding
from fl_dpgan.deploy.certificates import Signed, server_certificate

DAY = timedelta(days=1)


def expect(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    text = f"{finding.found} → {finding.remedy}"
    assert all(word in text for word in words), text
    assert "\n" not in text and finding.found
    assert bool(finding.remedy.strip()) == (status != "ok")


def dated(ca: Signed, start: timedelta, end: timedelta) -> Signed:
    """A certificate for the loopback that is valid from and until these times from now."""
    usual = server_certificate(ca, ["localhost"], 365)
    builder = x509.CertificateBuilder(
        ca.certificate.subject,
        usual.certificate.subject,
        usual.key.public_key(),
        x509.random_serial_number(),
        datetime.now(UTC) + start,
        datetime.now(UTC) + end,
        list(usual.certificate.extensions),
    )
    return Signed(builder.sign(ca.key, hashes.SHA384()), usual.key)


def written(folder: Path, signed: Signed, name: str = "server") -> tuple[Path, Path]:
    files = folder / f"{name}.crt", folder / f"{name}.key"
    for file, content in zip(files, (signed.certificate_pem, signed.key_pem), strict=True):
        file.write_bytes(content)
        file.chmod(0o600)
    return files
