"""`fl-dpgan site check`: all in order is exit code 0, anything that failed is 1, and no patient's id is printed."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import run_cli
from expected import expect
from test_check_data import CANARY, images

from fl_dpgan.checks import node_key, site
from fl_dpgan.config import load_federation
from fl_dpgan.deploy.certificates import server_certificate
from fl_dpgan.deploy.keys import make_node_key
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.site_file import load_site

pytest_plugins = ["loopback"]

GUARD, NOBODY = 54321, "nobody"
FEDERATION = """
classes = ["normal", "sick"]
address = "localhost:{port}"
[model]
num_classes = 2
[privacy]
batch_size = 4
delta = 1e-5
[training]
rounds = 2
"""
SITE = """
name = "north"
[policy]
declared_size = 10
[data]
source = "manifest"
path = "list.csv"
[guard]
socket = "run/guard.sock"
flower_user = "nobody"
"""


@pytest.fixture
def home(serving, ca):
    """A site in order, as far as this test's user can make one; the server answers as one that knows the key."""
    home = Path(tempfile.mkdtemp()).resolve()
    home.chmod(0o711)
    port = serving(server_certificate(ca, ["localhost"], 365), status=400, body='{"detail": "no", "code": 2003}')
    for name, content in (("site.toml", SITE), ("federation.toml", FEDERATION.format(port=port))):
        (home / name).write_text(content)
        (home / name).chmod(0o644)
    (home / "ca.crt").write_bytes(ca.certificate_pem)
    images(home)
    (home / "images").chmod(0o700)
    (home / "list.csv").chmod(0o600)
    file = load_site(home / "site.toml")
    Ledger(file.ledger, file.policy.account("north")).close()
    file.ledger.chmod(0o600)
    make_node_key(home / "node.key")
    (home / "run").mkdir()
    (home / "run").chmod(0o2750)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", str(GUARD), str(home)], check=True, timeout=10)
        nobody = pwd.getpwnam(NOBODY)
        os.chown(home / "node.key", nobody.pw_uid, nobody.pw_gid)
        os.chown(home / "run", GUARD, nobody.pw_gid)
        (home / "run").chmod(0o2750)
    yield home
    shutil.rmtree(home)


def run(monkeypatch, home, *more):
    arguments = ["--config", home / "site.toml", "--key", home / "node.key", "--ca", home / "ca.crt", *more]
    return run_cli(monkeypatch, "site", "check", *arguments)


def check(home):
    file = load_site(home / "site.toml")
    found = site.check_site(
        file,
        load_federation(file.federation),
        config=home / "site.toml",
        key=home / "node.key",
        ca=home / "ca.crt",
    )
    for finding in found:
        expect(finding, finding.status)
        assert CANARY not in finding.found + finding.remedy
    return {finding.name: finding for finding in found}


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: guard, Flower's user and their files are different users'")
def test_a_site_in_order_may_start(home, monkeypatch, capsys):
    assert run(monkeypatch, home) == 0
    out = capsys.readouterr().out
    assert "ready to start" in out and "failed" not in out and "warning" not in out
    assert "normal 6, sick 4" in out and "5 patients" in out and CANARY not in out
    cache = home / "cache"
    # root has read them as the guard, whose cache it has to be
    assert cache.stat().st_uid == GUARD and all(path.stat().st_uid == GUARD for path in cache.rglob("*"))
    assert os.geteuid() == 0


def test_all_that_is_looked_at(home, monkeypatch):
    found = check(home)
    assert list(found) == [
        "files", "ledger", "policy", "cost of a run", "data", "classes", "declared size", "disk", "memory",
        "Flower's user", "data kept from Flower", "ledger kept from Flower", "cache kept from Flower",
        "settings kept from Flower", "guard's socket", "server", "certificate", "clock", "node's key",
        "node's registration",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("break_it", "name"),
    [
        (lambda home: (home / "ledger.sqlite").unlink(), "ledger"),
        (lambda home: (home / "ledger.sqlite").chmod(0o644), "ledger kept from Flower"),
        (lambda home: (home / "images").chmod(0o755), "data kept from Flower"),
        (lambda home: (home / "site.toml").chmod(0o646), "settings kept from Flower"),
        (lambda home: (home / "run").chmod(0o755), "guard's socket"),
        (lambda home: change(home / "site.toml", "declared_size = 10", "declared_size = 20"), "declared size"),
        (lambda home: change(home / "list.csv", "sick,", "odd,"), "data"),
        (lambda home: shutil.rmtree(home / "images"), "data"),
        (lambda home: change(home / "federation.toml", "delta = 1e-5", "delta = 1e-6"), "policy"),
        (lambda home: (home / "node.key").chmod(0o644), "node's key"),
        (lambda home: (home / "ca.crt").unlink(), "certificate"),
        (lambda home: change(home / "federation.toml", '"localhost:', '"127.0.0.3:'), "server"),
    ],
)
def test_what_failed_is_named_and_the_exit_code_is_1(home, monkeypatch, capsys, break_it, name):
    break_it(home)
    assert run(monkeypatch, home) == 1
    out = capsys.readouterr().out
    assert name in out[out.index("not ready: ") :]
    assert CANARY not in out


@pytest.mark.parametrize("name", ["site.toml", "federation.toml"])
def test_a_faulty_file_is_one_line_and_exit_2(home, monkeypatch, capsys, name):
    (home / name).write_text("name = ")
    assert run(monkeypatch, home) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and name in err


def test_without_a_server_the_rest_is_checked_and_nothing_is_asked(home, monkeypatch):
    monkeypatch.setattr(node_key, "check_registered", lambda *args: pytest.fail("asked"))
    change(home / "federation.toml", '"localhost:', '"127.0.0.3:')
    found = check(home)
    expect(found["server"], "failed", "127.0.0.3")
    expect(found["clock"], "warning", "not known")
    expect(found["node's registration"], "warning", "305")
    assert "certificate" not in found


def test_without_flowers_user_there_is_a_warning_and_nothing_to_hide_from(home):
    change(home / "site.toml", '"nobody"', '"no-such-user"')
    found = check(home)
    expect(found["Flower's user"], "warning", "useradd")
    assert not any("kept from" in name for name in found)


def test_root_as_flowers_user(home):
    change(home / "site.toml", '"nobody"', '"root"')
    expect(check(home)["Flower's user"], "failed", "root")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the ledger to another user")
def test_a_ledger_that_root_made(home):
    os.chown(home / "ledger.sqlite", 0, 0)
    expect(check(home)["ledger"], "failed", "belongs to user 0", f"chown {GUARD}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_another_user_than_the_guards(home, monkeypatch, capsys):
    other = pwd.getpwnam(NOBODY)
    os.setegid(other.pw_gid)
    os.seteuid(other.pw_uid)
    try:
        assert run(monkeypatch, home) == 1
        found = check(home)
    finally:
        os.seteuid(0)
        os.setegid(0)
    expect(found["ledger"], "failed", "guard's user or as root")
    expect(found["data"], "failed")


def test_the_images_of_a_manifest_are_looked_for_where_they_are(tmp_path):
    images(tmp_path)
    (tmp_path / "site.toml").write_text(SITE)
    data = load_site(tmp_path / "site.toml").data
    places = [tmp_path / "list.csv", tmp_path / "images/normal", tmp_path / "images/sick"]
    assert site._places(data) == places
    (tmp_path / "list.csv").write_text("odd")
    assert site._places(data) == places[:1]
    assert site._places(data.model_copy(update={"source": "folder"})) == places[:1]


def test_nothing_heavy_is_loaded_before_it_is_needed():
    heavy = "{'torch', 'flwr', 'httpx', 'cryptography'}"
    script = f"import sys\nfrom fl_dpgan import cli\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
