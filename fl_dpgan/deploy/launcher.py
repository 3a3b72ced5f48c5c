"""The program that Flower's SuperNode starts for each message, made lighter: it loads what a ClientApp needs alone.

Flower 1.42's `flwr-clientapp` loads the package that holds the SuperNode as well, with its server and its database, and
takes twice as long to start. Flower finds its programs by name on PATH.
"""

import sys
from pathlib import Path

from fl_dpgan.errors import ConfigError

# A package of the same name and place, but without what its __init__.py loads. Where a later Flower is laid out
# otherwise, its own program runs as it is. Nothing of this project is loaded here: the bundle brings its own.
_PROGRAM = """#!{python}
import importlib.util
import sys
import types

try:
    place = importlib.util.find_spec("flwr.supernode").submodule_search_locations[0]
    package = types.ModuleType("flwr.supernode.cli")
    package.__path__ = [place + "/cli"]
    sys.modules[package.__name__] = package
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
except (ImportError, AttributeError, TypeError, IndexError):
    sys.modules.pop("flwr.supernode.cli", None)
    from flwr.supernode.cli import flwr_clientapp

sys.argv[0] = "flwr-clientapp"
sys.exit(flwr_clientapp())
"""


def write_launcher(folder: Path) -> None:
    """Put the program into a folder, which is then to come first on the SuperNode's PATH.

    Raises:
        ConfigError: it cannot be written.
    """
    file = folder / "flwr-clientapp"
    try:
        for made in (folder.parent, folder):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(_PROGRAM.format(python=sys.executable), encoding="utf-8")
        file.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; give another folder as --home") from error
