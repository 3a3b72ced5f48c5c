"""The server's folder: its certificates and keys, Flower's configuration, the federation's file, and the sites."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_dpgan.config import read_toml
from fl_dpgan.deploy import certificates
from fl_dpgan.deploy.flower import CONNECTION, flwr
from fl_dpgan.deploy.keys import read_public_key, write_new
from fl_dpgan.errors import ConfigError
from fl_dpgan.files import write_atomically


@dataclass(frozen=True)
class ServerFolder:
    """Paths and files of one server."""

    path: Path

    @classmethod
    def create(
        cls, path: Path, hosts: Sequence[str], *, port: int, ca_days: int, days: int, classes: Sequence[str] = ()
    ) -> "ServerFolder":
        """Make the folder, which only its owner may enter, and all that a SuperLink needs.

        Args:
            hosts: the names and addresses by which sites reach the server; they are told the first.
            ca_days, days: for how long the authority's and the server's certificate are valid.
            classes: the labels' names, where they are known already.

        Raises:
            ConfigError: the folder holds something, cannot be written, a host is neither name nor address, or the
                first is one of IPv6.
        """
        folder = cls(path.absolute())
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} is not empty; give a new folder, for a server's keys are never overwritten")
        ca = certificates.authority(ca_days)
        server = certificates.server_certificate(ca, hosts, days)
        if ":" in hosts[0]:
            raise ConfigError(f"{hosts[0]}: the SuperLink listens on IPv4; give a name or an IPv4 address first")
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)
            folder.home.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; give another folder") from error
        write_new(folder.path / "ca.key", ca.key_pem, private=True)
        write_new(folder.path / "ca.crt", ca.certificate_pem)
        write_new(folder.path / "server.key", server.key_pem, private=True)
        write_new(folder.path / "server.crt", server.certificate_pem)
        write_new(folder.home / "config.toml", folder._flower_config(port).encode())
        write_new(folder.path / "federation.toml", federation_template(f"{hosts[0]}:{port}", classes).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> "ServerFolder":
        """An existing server.

        Raises:
            ConfigError: there is none at this path.
        """
        folder = cls(path.absolute())
        if not (folder.home / "config.toml").is_file():
            raise ConfigError(f"{path} holds no server; make one with `fl-dpgan server init`")
        return folder

    @property
    def home(self) -> Path:
        """What Flower's commands take for their home; they read the server's address in it."""
        return self.path / "flower"

    @property
    def port(self) -> int:
        """Where the SuperLink listens.

        Raises:
            ConfigError: Flower's configuration is no longer what `server init` wrote.
        """
        file = self.home / "config.toml"
        try:
            address: str = read_toml(file, "make a new server")["superlink"][CONNECTION]["address"]
            return int(address.rpartition(":")[2])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} has no superlink.{CONNECTION}.address of the form HOST:PORT") from error

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        """The registered sites by name: their number at Flower (`node`) and their public key."""
        file = self.path / "sites.json"
        try:
            found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if not all(isinstance(site[key], str) for site in found.values() for key in ("node", "public_key")):
                raise ValueError("a site without its node and key")
            return found
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; put back a copy of it") from error

    def register(self, public_key: Path, name: str) -> str:
        """Let the site that holds this key join; gives its number at Flower.

        Raises:
            ConfigError: there is a site of this name or with this key, or the file is no public key.
            FederationError: the SuperLink does not answer, or knows the key already.
        """
        sites, key = self.sites, read_public_key(public_key)
        if name in sites:
            raise ConfigError(f"a site {name} is registered already; `server unregister` it first if its key is new")
        for other, site in sites.items():
            if site["public_key"] == key:
                raise ConfigError(f"{public_key} is the key of site {other}; each site makes a key of its own")
        answer = flwr(self.home, "supernode", "register", str(public_key.absolute()), CONNECTION, "--name", name)
        node = str(answer["node-id"])
        self._write_sites({**sites, name: {"node": node, "public_key": key}})
        return node

    def unregister(self, name: str) -> None:
        """Let a site's key no longer in.

        Raises:
            ConfigError: no site of this name is registered.
            FederationError: the SuperLink does not answer, or does not know the site.
        """
        sites = self.sites
        if name not in sites:
            raise ConfigError(f"no site {name} is registered; `server sites` lists them")
        flwr(self.home, "supernode", "unregister", sites[name]["node"], CONNECTION)
        self._write_sites({other: site for other, site in sites.items() if other != name})

    def nodes(self) -> list[dict[str, Any]]:
        """The SuperLink's own list of nodes, each with the `site` whose name it was registered under.

        Raises:
            FederationError: the SuperLink does not answer.
        """
        names = {site["node"]: name for name, site in self.sites.items()}
        found = flwr(self.home, "supernode", "list", CONNECTION)["nodes"]
        return [{"site": names.get(node["node-id"], "?"), **node} for node in found if node["status"] != "unregistered"]

    def renew(self, days: int) -> list[str]:
        """Sign the server's key anew, for the same hosts; gives these. Sites need nothing new.

        Raises:
            ConfigError: the authority's files are missing or damaged.
        """
        try:
            contents = [
                (self.path / f"{one}.{kind}").read_bytes() for one in ("ca", "server") for kind in ("crt", "key")
            ]
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; put back a copy of it") from error
        ca, old = certificates.Signed.read(*contents[:2]), certificates.Signed.read(*contents[2:])
        hosts = certificates.hosts_of(old.certificate)
        new = certificates.server_certificate(ca, hosts, days, key=old.key)
        write_atomically(self.path / "server.crt", new.certificate_pem)
        return hosts

    def _write_sites(self, sites: dict[str, dict[str, Any]]) -> None:
        write_atomically(self.path / "sites.json", (json.dumps(sites, indent=2) + "\n").encode())

    def _flower_config(self, port: int) -> str:
        ca = json.dumps(str(self.path / "ca.crt"))
        return (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\nroot-certificates = {ca}\n'
        )


def federation_template(address: str, classes: Sequence[str] = ()) -> str:
    """A commented `federation.toml`, in which the classes are to be filled in unless they are given here."""
    text = files("fl_dpgan.deploy").joinpath("federation.toml").read_text(encoding="utf-8")
    names = json.dumps(list(classes), ensure_ascii=False)
    text = text.replace('address = "HOST:PORT"', f'address = "{address}"').replace("classes = []", f"classes = {names}")
    return text.replace("num_classes = 2", f"num_classes = {len(classes)}") if classes else text
