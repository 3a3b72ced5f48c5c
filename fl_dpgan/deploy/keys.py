"""A node's key pair, by which the server knows the site, and files that only their owner may read."""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)

from fl_dpgan.errors import ConfigError


def make_node_key(path: Path) -> str:
    """Write a new private key to `path` and its public part to `path`.pub; gives the public part.

    P-384 in OpenSSH's format, which is what Flower's SuperNode and SuperLink read.

    Raises:
        ConfigError: one of the files is there already, or cannot be written.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + "\n"
    public_path = path.with_name(path.name + ".pub")
    if public_path.exists():
        raise ConfigError(f"{public_path} is there already; a site keeps its key, or give another path")
    write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
    write_new(public_path, public.encode())
    return public.strip()


def read_public_key(path: Path) -> str:
    """The public key in a file that a site has sent, as one line without a comment.

    Raises:
        ConfigError: there is none, or it is not one that `site key` makes. A private key is named as such.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if b"PRIVATE KEY" in content:
        raise ConfigError(f"{path} is a private key, which must not leave its site: have the site make a new one")
    try:
        key = load_ssh_public_key(content)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no public key; ask the site for the .pub file of `site key`") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; ask the site for the .pub file of `site key`")
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that must not be there yet; a private one is never, not even for a moment, for others to read.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already, and is left alone; give another path") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
