"""Flower's SuperLink behind a gate: other machines reach what SuperNodes need, and nothing else.

Flower 1.42 serves three interfaces on one port. The nodes' is authenticated. The others are not: whoever reaches
`/v1/control` may register a node or start code of their own here, and `/v1/runtime` is for the ServerApp alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class NodesOnly:
    """ASGI middleware: a request from another machine for anything but the nodes' interface is answered with 403."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})


def is_allowed(scope: _Scope) -> bool:
    """Whether a request is for the nodes' interface, or comes from this machine."""
    if scope["type"] == "http" and scope["path"].startswith("/v1/fleet/"):
        return True
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Run `flower-superlink` with this process's arguments, behind the gate."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    # the hook that Flower keeps for middleware; what it gives is outermost, before any of Flower's own
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(NodesOnly), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
