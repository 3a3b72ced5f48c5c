"""A server's folder: who may read what, what Flower reads of it, and that nothing in it is overwritten."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli.flower_config import read_superlink_connection

from fl_dpgan.config import load_federation
from fl_dpgan.deploy import server as module
from fl_dpgan.deploy.flower import CONNECTION, environment, quoted, superlink_command, supernode_command
from fl_dpgan.deploy.keys import make_node_key
from fl_dpgan.deploy.server import ServerFolder, federation_template
from fl_dpgan.errors import ConfigError, FederationError


def create(path: Path, hosts=("fed.example.org",), **kwargs) -> ServerFolder:
    return ServerFolder.create(path, list(hosts), **{"port": 8123, "ca_days": 10, "days": 5, **kwargs})


def modes(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*"))}


@pytest.mark.parametrize("there", [False, True])
def test_only_the_owner_may_enter_it_and_read_the_keys(tmp_path, there):
    if there:
        (tmp_path / "s").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        create(tmp_path / "s")
    finally:
        os.umask(before)
    found = modes(tmp_path / "s")
    assert found["."] == 0o700 and found["flower"] == 0o700
    assert found["ca.key"] == found["server.key"] == 0o600
    assert set(found) == {
        ".", "flower", "flower/config.toml", "ca.key", "ca.crt", "server.key", "server.crt", "federation.toml",
    }  # fmt: skip


def test_flower_reads_its_connection(tmp_path, monkeypatch):
    server = create(tmp_path / "s")
    monkeypatch.setenv("FLWR_HOME", str(server.home))
    connection = read_superlink_connection(CONNECTION)
    assert (connection.address, connection.insecure) == ("127.0.0.1:8123", False)
    assert Path(connection.root_certificates).read_bytes() == (tmp_path / "s" / "ca.crt").read_bytes()
    assert ServerFolder.open(tmp_path / "s").port == 8123


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    create(tmp_path / "s")
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="not empty"):
        create(tmp_path / "s")
    assert {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(("host", "reason"), [("https://fed.example.org", "neither"), ("2001:db8::7", "IPv4")])
def test_a_bad_host_makes_nothing(tmp_path, host, reason):
    with pytest.raises(ConfigError, match=reason):
        create(tmp_path / "s", [host])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("fed.example.org", "fed.example.org:8123"),
        ("192.0.2.7", "192.0.2.7:8123"),
    ],
)
def test_the_federations_file_has_the_address_and_wants_the_classes(tmp_path, host, address):
    file = create(tmp_path / "s", [host]).path / "federation.toml"
    with pytest.raises(ConfigError, match="classes"):
        load_federation(file)
    file.write_text(file.read_text().replace("classes = []", 'classes = ["a", "b"]'))
    assert load_federation(file).address == address


def test_classes_that_are_known_are_filled_in(tmp_path):
    (tmp_path / "f.toml").write_text(federation_template("x.org:1", ["normal", 'Röteln "acute"', "c"]))
    federation = load_federation(tmp_path / "f.toml")
    assert federation.classes == ("normal", 'Röteln "acute"', "c") and federation.model.num_classes == 3
    assert (federation.federation.sites, federation.federation.quorum) == (3, 2)


def test_a_renewed_certificate_keeps_key_and_hosts(tmp_path):
    server = create(tmp_path / "s", ["fed.example.org", "192.0.2.7"])
    key, old = (server.path / "server.key").read_bytes(), (server.path / "server.crt").read_bytes()
    assert server.renew(90)[:2] == ["fed.example.org", "192.0.2.7"]
    assert (server.path / "server.key").read_bytes() == key
    assert (server.path / "server.crt").read_bytes() != old
    (server.path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key"):
        server.renew(90)


def test_a_site_is_registered_once_and_can_be_let_go(tmp_path, monkeypatch):
    server, asked = create(tmp_path / "s"), []

    def flwr(home, *arguments):
        asked.append(arguments)
        return {"success": True, "node-id": "77", "nodes": [
            {"node-id": "77", "status": "online"}, {"node-id": "5", "status": "registered"},
            {"node-id": "4", "status": "unregistered"},
        ]}  # fmt: skip

    monkeypatch.setattr(module, "flwr", flwr)
    for name in "ab":
        make_node_key(tmp_path / name)
    assert server.register(tmp_path / "a.pub", "north") == "77"
    assert asked[0] == ("supernode", "register", str(tmp_path / "a.pub"), CONNECTION, "--name", "north")
    with pytest.raises(ConfigError, match="north is registered already"):
        server.register(tmp_path / "b.pub", "north")
    with pytest.raises(ConfigError, match="the key of site north"):
        server.register(tmp_path / "a.pub", "south")
    assert [(node["site"], node["status"]) for node in server.nodes()] == [("north", "online"), ("?", "registered")]
    server.unregister("north")
    assert asked[-1] == ("supernode", "unregister", "77", CONNECTION) and server.sites == {}
    with pytest.raises(ConfigError, match="no site north"):
        server.unregister("north")


def test_flowers_refusal_is_one_line_and_registers_nothing(tmp_path):
    server = create(tmp_path / "s", port=1)  # nothing listens there
    make_node_key(tmp_path / "a")
    with pytest.raises(FederationError) as caught:
        server.register(tmp_path / "a.pub", "north")
    assert "unavailable" in str(caught.value) and "\n" not in str(caught.value)
    assert server.sites == {}


def test_the_superlink_wants_tls_and_known_nodes_and_flower_parses_it(tmp_path, monkeypatch):
    from flwr.superlink.cli.flower_superlink import _parse_superlink_lifespan_config as parse

    server = create(tmp_path / "s")
    python, option, name, *arguments = superlink_command(server.path, "0.0.0.0", 8123)
    assert (python, option, name) == (sys.executable, "-m", "fl_dpgan.deploy.superlink")
    monkeypatch.setattr(sys, "argv", ["flower-superlink", *arguments])
    config = parse()
    assert config.enable_supernode_auth and not config.insecure and config.certificates is not None
    assert not config.runtime_dependency_install and (config.host, config.port) == ("0.0.0.0", 8123)
    assert config.database == str(server.path / "superlink.sqlite")


def test_the_supernode_is_told_the_guards_socket(tmp_path, monkeypatch):
    from flwr.supernode.cli.flower_supernode import _parse_supernode_lifespan_config as parse

    make_node_key(tmp_path / "k")
    (tmp_path / "ca.crt").write_text("x")
    command = supernode_command(
        "fed.example.org:8123", guard=Path("/run/my guard/g.sock"), key=tmp_path / "k", ca=tmp_path / "ca.crt", port=9
    )
    monkeypatch.setattr(sys, "argv", command)
    config = parse()
    assert config.node_config == {"guard": "/run/my guard/g.sock"}
    assert (config.server_address, config.port, config.insecure) == ("fed.example.org:8123", 9, False)
    assert config.authentication_keys is not None


@pytest.mark.parametrize("path", ['/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_flowers_options_cannot_pass_on_is_refused(path):
    with pytest.raises(ConfigError, match="cannot pass on"):
        quoted(path)


def test_the_environment_reports_and_installs_nothing_and_finds_flowers_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = environment(tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", "import flwr.supercore.telemetry as t, flwr.supercore.utils as u, shutil, json;"
         "print(json.dumps([t.FLWR_TELEMETRY_ENABLED, str(u.get_flwr_home()), shutil.which('flower-superexec')]))"],
        env=found, capture_output=True, text=True, check=True,
    )  # fmt: skip
    telemetry, home, program = json.loads(told.stdout)
    assert (telemetry, home) == ("0", str(tmp_path)) and Path(program).parent == Path(sys.executable).parent
