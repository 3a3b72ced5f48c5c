"""The node's key: one that Flower takes, for the node's user alone, known to the server, whose node notices nothing."""

import os
import shutil
import socket
import subprocess
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)
from expected import expect, written

from fl_dpgan.checks import node_key
from fl_dpgan.checks.permissions import User
from fl_dpgan.deploy.certificates import server_certificate
from fl_dpgan.deploy.keys import make_node_key

pytest_plugins = ["loopback"]


def private(key, form=PrivateFormat.OpenSSH):
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "node.key"
    make_node_key(path)
    return path


def test_a_key_in_order(path):
    me = User("me", os.geteuid(), os.getegid(), frozenset([os.getegid()]))
    for user in (None, me):
        finding, key = node_key.check_key(path, user)
        expect(finding, "ok", "P-384")
        assert key.public_key() == load_ssh_private_key(path.read_bytes(), None).public_key()


def test_no_key(tmp_path):
    finding, key = node_key.check_key(tmp_path / "node.key", None)
    expect(finding, "failed", "there is none", "site key")
    assert key is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_use(path, mode):
    path.chmod(mode)
    finding, key = node_key.check_key(path, None)
    expect(finding, "failed", f"{mode:04o}", "chmod 600")
    assert key is None


CURVE = ec.SECP384R1()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"no key", "OpenSSH"),
        (private(ec.generate_private_key(CURVE), form=PrivateFormat.PKCS8), "OpenSSH"),
        (private(ec.generate_private_key(ec.SECP256R1())), "P-384"),
        (private(ed25519.Ed25519PrivateKey.generate()), "P-384"),
    ],
    ids=["text", "pkcs8", "p256", "ed25519"],
)
def test_what_is_not_such_a_key(path, content, word):
    path.write_bytes(content)
    finding, key = node_key.check_key(path, None)
    expect(finding, "failed", word, "site key")
    assert key is None


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen makes the key, and is not installed")
def test_a_key_with_a_passphrase(path):
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a long secret", "-f", str(path)]
    subprocess.run(change, check=True, capture_output=True, timeout=30)
    expect(node_key.check_key(path, None)[0], "failed", "passphrase", "site key")


def test_a_key_that_flowers_user_cannot_read(path):
    finding, key = node_key.check_key(path, User("flower", 54322, 54322, frozenset([54322])))
    expect(finding, "warning", "flower", "chown flower", "LoadCredential")
    assert key is not None


# --- Flower's own SuperLink, its interface in this process


@pytest.fixture(scope="module")
def superlink(ca, tmp_path_factory):
    import uvicorn
    from flwr.superlink.main import create_app

    app = create_app(None)
    folder = tmp_path_factory.mktemp("superlink")
    certificate, key = written(folder, server_certificate(ca, ["localhost"], 365))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, ssl_certfile=certificate, ssl_keyfile=key, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.02)
        yield f"localhost:{listening.getsockname()[1]}", app.state.linkstate_factory.state()
        server.should_exit = True
        thread.join()


def status_of(state, node):
    return state.get_node_info(node_ids=[node])[0].status


def register(state, key):
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return state.create_node("aid", "account", public_key_to_bytes(key.public_key()), 0)


def test_a_key_that_the_server_does_not_know(superlink, ca_file):
    key = ec.generate_private_key(CURVE)
    finding = node_key.check_registered(superlink[0], ca_file, key)
    expect(finding, "failed", "does not know", "server register")


def test_a_key_that_the_server_knows_and_a_node_that_notices_nothing(superlink, ca_file):
    address, state = superlink
    key = ec.generate_private_key(CURVE)
    node = register(state, key)
    expect(node_key.check_registered(address, ca_file, key), "ok", "knows")
    assert status_of(state, node) == "registered"
    assert state.activate_node(node, 30)
    before = state.get_node_info(node_ids=[node])[0].SerializeToString()
    expect(node_key.check_registered(address, ca_file, key), "ok", "knows")
    assert status_of(state, node) == "online"
    assert state.get_node_info(node_ids=[node])[0].SerializeToString() == before
    state.deactivate_node(node)
    expect(node_key.check_registered(address, ca_file, key), "ok", "knows")
    assert status_of(state, node) == "offline"


def test_a_key_that_was_registered_once(superlink, ca_file):
    address, state = superlink
    key = ec.generate_private_key(CURVE)
    state.delete_node("aid", register(state, key))
    expect(node_key.check_registered(address, ca_file, key), "failed", "does not know")


def test_a_signature_from_a_clock_that_is_ahead(superlink, ca_file, monkeypatch):
    from datetime import timedelta

    from flwr.supercore.date import now
    from flwr.supernode import node_auth_http_interceptor as signing

    monkeypatch.setattr(signing, "now", lambda: now() + timedelta(seconds=30))
    finding = node_key.check_registered(superlink[0], ca_file, ec.generate_private_key(CURVE))
    expect(finding, "failed", "signature", "clock")


@pytest.mark.parametrize(("status", "body"), [(500, '{"detail": "?"}'), (404, ""), (400, '{"code": 9999}'), (200, "")])
def test_a_server_that_answers_otherwise(serving, ca, ca_file, status, body):
    port = serving(server_certificate(ca, ["localhost"], 365), status=status, body=body)
    finding = node_key.check_registered(f"localhost:{port}", ca_file, ec.generate_private_key(CURVE))
    expect(finding, "warning", "not known", "305")


def test_a_server_that_does_not_answer(ca_file):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        finding = node_key.check_registered(address, ca_file, ec.generate_private_key(CURVE), seconds=0.2)
    expect(finding, "warning", "not known", "305")
    expect(node_key.not_asked(), "warning", "305")
