"""Frames on a guard's socket: a small JSON header and a body of bytes, both of limited length. Standard library only.

A frame is the lengths of header (4 bytes) and body (8 bytes, both big-endian), the header, and the body. The header is
a JSON object of texts. What a length claims is never allocated before so many bytes have arrived.
"""

import json
import socket
import struct
import time

from fl_dpgan.errors import WireError

#: The most bytes of a header: a refusal's reason, or a request with its plan, takes a few thousand.
HEADER_LIMIT = 1 << 18
_LENGTHS = struct.Struct(">IQ")
_CHUNK = 1 << 20


def send(connection: socket.socket, header: dict[str, str], body: bytes = b"") -> None:
    """Send one frame.

    Raises:
        OSError: the other side has gone, or takes nothing within the connection's time limit.
    """
    text = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if body:  # the other side may have answered and closed by now, at which even no bytes fail
        connection.sendall(body)


def receive(connection: socket.socket, *, largest: int, seconds: float) -> tuple[dict[str, str], bytes]:
    """Receive one frame.

    Args:
        largest: the most bytes that its body may have.
        seconds: how long the whole frame may take; a sender that trickles does not hold a place for longer.

    Raises:
        WireError: the frame is too long, late, cut short, or its header is not a JSON object of texts.
    """
    deadline = time.monotonic() + seconds
    header_length, body_length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    if header_length > HEADER_LIMIT or body_length > largest:
        raise WireError(
            f"a frame of {header_length} and {body_length} bytes; the most are {HEADER_LIMIT} and {largest}"
        )
    text = _exactly(connection, header_length, deadline)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("a frame whose header is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(value, str) for value in header.values()):
        raise WireError("a frame whose header is not an object of texts")
    return header, bytes(_exactly(connection, body_length, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError("a frame that did not arrive in time")
        connection.settimeout(left)
        try:
            chunk = connection.recv(min(_CHUNK, count - len(data)))
        except TimeoutError as error:
            raise WireError("a frame that did not arrive in time") from error
        except OSError as error:
            raise WireError(f"the connection broke ({error.strerror})") from error
        if not chunk:
            raise WireError("the connection ended within a frame")
        data += chunk
    return data
