"""Other machines reach the nodes' interface of the SuperLink; all else is for this machine."""

import asyncio
from importlib import import_module

import pytest
from flwr.superlink import extensions

from fl_dpgan.deploy import superlink
from fl_dpgan.deploy.superlink import NodesOnly


def answer(path: str, client, kind: str = "http"):
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    scope = {"type": kind, "path": path, "client": client}
    asyncio.run(NodesOnly(app)(scope, None, send))
    return "passed" if passed else sent[0]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/get-nodes",
        "/docs",
        "/openapi.json",
        "/health",
        "/",
        "/v1/fleet",
        "//v1/fleet/pull-messages",
    ],
)
def test_another_machine_is_refused_all_but_the_nodes_interface(path):
    assert answer(path, ("192.0.2.5", 4000)) == 403
    assert answer(path, ("127.0.0.1", 4000)) == "passed"
    assert answer(path, ("::1", 4000)) == "passed"


def test_nodes_may_come_from_anywhere():
    assert answer("/v1/fleet/pull-messages", ("192.0.2.5", 4000)) == "passed"


@pytest.mark.parametrize("client", [None, ("", 0), ("testclient", 1), ("127.0.0.1.evil.org", 1), ("0.0.0.0", 1)])
def test_a_client_of_unknown_address_counts_as_another_machine(client):
    assert answer("/v1/control/start-run", client) == 403


def test_a_websocket_from_another_machine_is_closed():
    assert answer("/v1/fleet/x", ("192.0.2.5", 4000), kind="websocket") == 1008


def test_flowers_own_app_has_the_gate_outermost_and_its_routes_lie_where_the_gate_thinks(monkeypatch):
    started = []
    command = import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of the same name
    monkeypatch.setattr(command, "flower_superlink", lambda: started.append(True))
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)  # put back afterwards
    superlink.main()
    from fastapi.testclient import TestClient
    from flwr.superlink.main import create_app

    app = create_app()
    assert started == [True]
    assert app.user_middleware[0].cls is NodesOnly
    away = TestClient(app, client=("192.0.2.5", 4000))
    here = TestClient(app, client=("127.0.0.1", 4000))
    paths = [path for path in app.openapi()["paths"] if not path.startswith("/v1/fleet/")]
    assert {"/v1/control/start-run", "/v1/control/register-node"} <= set(paths)
    for path in paths:
        assert away.post(path).status_code == 403
    # the same questions, asked properly, reach Flower
    assert here.get("/health").status_code == 200
    assert away.post("/v1/fleet/pull-messages").status_code not in (403, 404)
