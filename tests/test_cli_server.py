"""`fl-dpgan server`, `watch`, `site key` and `site node`: what they print, and errors on one line."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_cli as run

from fl_dpgan.config import load_federation
from fl_dpgan.deploy import flower
from fl_dpgan.runs import RunFolder


@pytest.fixture
def become(monkeypatch):
    """What a command would have become."""
    found = []
    monkeypatch.setattr(flower, "replace_process", lambda command, home: found.append((command, home)))
    return found


def one_line(capsys, says: str) -> None:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def server(monkeypatch, path: Path, *more: object) -> Path:
    assert (
        run(monkeypatch, "server", "init", path, "--host", "fed.example.org", "--class", "a", "--class", "b", *more)
        == 0
    )
    return path


def test_init_says_what_to_do_next_and_refuses_a_second_time(tmp_path, monkeypatch, capsys):
    folder = server(monkeypatch, tmp_path / "s", "--port", 8200, "--host", "192.0.2.7")
    out = capsys.readouterr().out
    assert str(folder / "federation.toml") in out and "ca.crt" in out
    assert load_federation(folder / "federation.toml").address == "fed.example.org:8200"
    assert run(monkeypatch, "server", "init", folder, "--host", "x.org") == 2
    one_line(capsys, "not empty")


def test_start_becomes_the_superlink_on_its_port(tmp_path, monkeypatch, become):
    folder = server(monkeypatch, tmp_path / "s", "--port", 8200)
    assert run(monkeypatch, "server", "start", folder) == 0
    assert run(monkeypatch, "server", "start", folder, "--local") == 0
    for (command, home), host in zip(become, ("0.0.0.0", "127.0.0.1"), strict=True):
        assert command[-4:] == ["--host", host, "--port", "8200"] and home == folder / "flower"


@pytest.mark.parametrize(
    "arguments", [["start"], ["sites"], ["register", "x.pub", "north"], ["unregister", "north"], ["renew"]]
)
def test_a_folder_without_a_server_is_one_line(tmp_path, monkeypatch, capsys, arguments):
    name, *rest = arguments
    assert run(monkeypatch, "server", name, tmp_path, *rest) == 2
    one_line(capsys, "server init")


def test_a_run_needs_a_server_its_superlink_a_valid_file_and_a_checkout(tmp_path, monkeypatch, capsys):
    folder = server(monkeypatch, tmp_path / "s", "--port", 1)
    federation = folder / "federation.toml"
    capsys.readouterr()
    out = ("--out", tmp_path / "run")
    assert run(monkeypatch, "server", "run", tmp_path / "none.toml", *out) == 2
    one_line(capsys, "no file at")
    assert run(monkeypatch, "server", "run", federation, *out, "--app", tmp_path) == 2
    one_line(capsys, "no checkout of fl-dpgan")
    assert run(monkeypatch, "server", "run", federation, *out) == 2
    one_line(capsys, "no SuperLink answers at 127.0.0.1:1")
    RunFolder.create(tmp_path / "run", load_federation(federation))
    federation.write_text(federation.read_text().replace("rounds = 30", "rounds = 31"))
    assert run(monkeypatch, "server", "run", federation, *out) == 2
    one_line(capsys, "began with another federation.toml")


def test_renew_names_the_hosts(tmp_path, monkeypatch, capsys):
    folder = server(monkeypatch, tmp_path / "s")
    assert run(monkeypatch, "server", "renew", folder, "--days", 30) == 0
    assert "fed.example.org, localhost" in capsys.readouterr().out


def test_the_key_is_made_once_and_its_public_part_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "site", "key") == 0
    out = capsys.readouterr().out
    assert "node.key.pub" in out and Path("node.key.pub").read_text().strip() in out.splitlines()
    assert stat.S_IMODE(Path("node.key").stat().st_mode) == 0o600
    before = Path("node.key").read_bytes()
    assert run(monkeypatch, "site", "key") == 2
    one_line(capsys, "is there already")
    assert Path("node.key").read_bytes() == before


def test_node_becomes_the_supernode_of_the_federations_server(tmp_path, monkeypatch, capsys, become):
    server(monkeypatch, tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    Path("site.toml").write_text('name = "x"\nfederation = "s/federation.toml"\n[policy]\ndeclared_size = 9\n'
                                 '[guard]\nsocket = "g.sock"\n')  # fmt: skip
    capsys.readouterr()
    assert run(monkeypatch, "site", "node") == 2
    one_line(capsys, "node.key cannot be read: No such file or directory; make one with")
    assert run(monkeypatch, "site", "key") == 0
    capsys.readouterr()
    assert run(monkeypatch, "site", "node") == 2
    one_line(capsys, "ca.crt cannot be read")
    assert run(monkeypatch, "site", "node", "--ca", "s/ca.crt", "--port", 9300, "--home", "state") == 0
    [(command, home)] = become
    assert command[1:] == [
        "--superlink", "fed.example.org:8100", "--root-certificates", f"{tmp_path}/s/ca.crt",
        "--auth-supernode-private-key", f"{tmp_path}/node.key", "--port", "9300",
        "--node-config", f'guard="{tmp_path}/g.sock"',
    ]  # fmt: skip
    assert home == tmp_path / "state" and stat.S_IMODE(home.stat().st_mode) == 0o700


def test_watch_once_prints_the_page_and_a_missing_run_is_one_line(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "watch", tmp_path / "none", "--once") == 2
    one_line(capsys, "holds no run")
    folder = RunFolder.create(
        tmp_path / "run", load_federation(server(monkeypatch, tmp_path / "s") / "federation.toml")
    )
    folder.log_round({"round": 1, "sites": {"north": {"status": "refused", "reason": "unit is patient"}}})
    capsys.readouterr()
    assert run(monkeypatch, "watch", folder.path, "--once") == 0
    out, err = capsys.readouterr()
    assert err == "" and "round 0 of 30" in out and "north refused: unit is patient" in out


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["server", "init", "s", "--host", "x.org"], ["site", "key"],
                                       ["server", "--help"], ["watch", "--help"]])  # fmt: skip
def test_it_imports_neither_torch_nor_ray_nor_flower(arguments, tmp_path):
    script = (
        "import sys\nfrom fl_dpgan import cli\ntry:\n    cli.main()\nfinally:\n"
        "    print([m for m in ('torch', 'ray', 'flwr') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "[]"
