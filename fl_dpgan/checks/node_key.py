"""The key by which the server knows the site: whether it is one, who may read it, and whether it is registered."""

import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fl_dpgan.checks.finding import Finding, failed, ok, warning
from fl_dpgan.checks.network import SECONDS, trusting
from fl_dpgan.checks.permissions import User

_MAKE = "make one with `fl-dpgan site key`"
_NODE_WILL_TELL = "start the node: it ends with exit code 305 where its key is not registered"


def check_key(path: Path, user: User | None) -> tuple[Finding, ec.EllipticCurvePrivateKey | None]:
    """Whether this is a key that Flower takes, and the node's user alone may read it; the key, if so.

    It cannot be kept from Flower's user, whose SuperNode signs with it; whoever has it can pass for the site, but has
    neither images nor budget.
    """
    name = "node's key"
    try:
        state = path.stat()
        content = path.read_bytes()
    except FileNotFoundError:
        return failed(name, f"there is none at {path}", f"{_MAKE}, or give its path as --key"), None
    except OSError as error:
        return warning(name, f"not known: {path}: {error.strerror}", "run the check as root"), None
    if state.st_mode & 0o077:
        mode = stat.S_IMODE(state.st_mode)
        remedy = f"chmod 600 {path}; if others may have read it, make a new one and have it registered"
        return failed(name, f"{path} is open to others ({mode:04o})", remedy), None
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return failed(name, f"{path} is not a private key in OpenSSH's format without a passphrase", _MAKE), None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        return failed(name, f"{path} is not a P-384 key", _MAKE), None
    if user is not None and not (user.reaches(path.resolve()) and user.reads(path)):
        remedy = f"chown {user.name} {path}, unless a systemd unit hands it over (LoadCredential)"
        return warning(name, f"{user.name}, who runs Flower's node, cannot read {path}", remedy), key
    return ok(name, f"{path}, P-384"), key


def check_registered(address: str, ca: Path, key: ec.EllipticCurvePrivateKey, *, seconds: float = SECONDS) -> Finding:
    """Whether the server knows the key, without a change at the server.

    A node begins with `ActivateNode`, signed. Flower 1.42 first looks its key up, then checks the interval of its
    heartbeats, and only then makes it active. So a request with an interval that is never allowed is refused for the
    one reason or the other, and a node that is active under the same key notices nothing. (The server logs a line.)
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    name, public = "node's registration", key.public_key()
    interceptors = [NodeAuthHttpInterceptor(key, public)]
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0)
    try:
        with FleetHttpClient(
            f"https://{address}", interceptors=interceptors, verify=trusting(ca), timeout=seconds
        ) as client:
            client.ActivateNode(request)
        answer = "it took a request that no SuperLink of Flower 1.42 takes"
    except httpx.HTTPStatusError as error:
        told = FlowerError.from_json(error.response.text)
        if told and told.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return ok(name, "the server knows the key")
        if told and told.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            remedy = "send the .pub file to the coordinator, who registers it (`fl-dpgan server register`)"
            return failed(name, "the server does not know the key", remedy)
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            return failed(name, "the server refuses the key's signature", "set this machine's clock right")
        answer = f"it answers with HTTP {error.response.status_code}"
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        answer = f"{type(error).__name__}"
    return warning(name, f"not known: {answer}", _NODE_WILL_TELL)


def not_asked() -> Finding:
    """The finding where there is no server that could be asked, or no key to ask about."""
    return warning("node's registration", "not checked, for want of the server or the key", _NODE_WILL_TELL)
