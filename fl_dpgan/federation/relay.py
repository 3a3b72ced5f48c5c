"""The ClientApp at a real site: it hands a message to the guard's socket and the answer back, and knows nothing else.

Flower starts a process for each message, with the server's code in it; so there is nothing here to protect, and nothing
that takes long to load.
"""

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path

from flwr.app import Error, Message

from fl_dpgan.errors import WireError
from fl_dpgan.federation import frames
from fl_dpgan.federation.envelope import pack_parts, unpack_parts
from fl_dpgan.text import printable

_log = logging.getLogger(__name__)

#: Seconds without a sign of the guard, which gives one every few seconds while it works or others are before us.
SILENCE = 60.0
#: Seconds between attempts where all of the guard's places are taken.
_AGAIN = 1.0
#: Twelve hours, after which Flower drops a message.
_PATIENCE = 12 * 3600.0
#: The most bytes of an answer's tensors; the server checks them against its networks.
_LARGEST = 1 << 31


def answer(message: Message, guard: Path) -> Message:
    """The site's answer to a message of the server.

    Whatever fails is written to the log of Flower's process here, and the server is told no more than that it failed.

    Args:
        guard: the guard's socket.
    """
    try:
        (header, tensors), *more = unpack_parts(message)
        if more:
            raise WireError(f"{1 + len(more)} requests to a node of one site")
        kind = message.metadata.message_type.split(".")[0]
        return Message(pack_parts([ask(guard, kind, header, tensors)]), reply_to=message)
    except (WireError, OSError) as error:
        _log.error("no answer from the guard at %s: %s", guard, error)
        return Message(Error(code=2, reason="the site cannot take part; its own log says why"), reply_to=message)


def ask(guard: Path, kind: str, header: str, tensors: bytes) -> tuple[str, bytes]:
    """Put one request to a guard, waiting while it is busy, and give its answer: a header's JSON text, and tensors.

    Args:
        guard: its socket. kind: the type of the message that brought the request.

    Raises:
        WireError: the guard refuses the request's form, falls silent, or answers strangely.
        OSError: there is no guard, or it went away.
    """
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SILENCE)
            connection.connect(str(guard))
            with suppress(ConnectionError):  # where it has closed before all was sent, it has said why
                frames.send(connection, {"kind": kind, "header": header}, tensors)
            while time.monotonic() < deadline:
                reply, body = frames.receive(connection, largest=_LARGEST, seconds=SILENCE)
                state = reply.get("state")
                if state == "answer":
                    return reply.get("header", ""), body
                if state not in ("wait", "full"):
                    raise WireError(printable(f"the guard says {state}: {reply.get('reason', '')}"))
                if state == "full":
                    break
        time.sleep(_AGAIN)
    raise WireError("the guard has had no place for this request for twelve hours")
