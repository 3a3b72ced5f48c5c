"""A node's key is one that Flower's own loaders take, and only its owner may read it."""

import argparse
import stat

import pytest
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

from fl_dpgan.deploy.keys import make_node_key, read_public_key, write_new
from fl_dpgan.errors import ConfigError


def test_flowers_loaders_take_both_parts(tmp_path):
    path = tmp_path / "node.key"
    public = make_node_key(path)
    settings = argparse.Namespace(auth_supernode_private_key=str(path), auth_supernode_public_key=None)
    private, derived = _try_setup_client_authentication(settings)
    assert private.curve.name == "secp384r1"
    assert try_load_public_key(tmp_path / "node.key.pub") == public_key_to_bytes(derived)
    assert read_public_key(tmp_path / "node.key.pub") == public


def test_the_private_part_is_its_owners_alone(tmp_path):
    make_node_key(tmp_path / "node.key")
    assert stat.S_IMODE((tmp_path / "node.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("there", ["node.key", "node.key.pub"])
def test_a_key_that_is_there_is_left_alone_and_nothing_is_written_beside_it(tmp_path, there):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        make_node_key(tmp_path / "node.key")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(there, "mine")]


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path):
    (tmp_path / "node.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is there already"):
        write_new(tmp_path / "node.key", b"secret", private=True)
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_site_should_not_have_sent_is_named(tmp_path):
    make_node_key(tmp_path / "node.key")
    with pytest.raises(ConfigError, match="must not leave its site"):
        read_public_key(tmp_path / "node.key")
    (tmp_path / "x.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGt9Z0b2lHC2mDGnDSqj8sJ7uUkY2bPq0K7eOq2rJ9mB")
    with pytest.raises(ConfigError, match=r"elliptic-curve|no public key"):
        read_public_key(tmp_path / "x.pub")
    (tmp_path / "x.pub").write_text("hello")
    with pytest.raises(ConfigError, match="no public key"):
        read_public_key(tmp_path / "x.pub")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_public_key(tmp_path / "none.pub")
