"""fl_dpgan: sites train one image generator together under record-level differential privacy, on Flower."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fl-dpgan")
except PackageNotFoundError:  # a Flower bundle is unpacked, not installed
    __version__ = "0+bundle"
