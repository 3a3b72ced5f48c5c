"""fl_dpgan: sites train one image generator together under record-level differential privacy, on Flower."""


def __getattr__(name: str) -> str:
    """`__version__`, looked up when it is asked for: what reads it takes longer to load than the rest."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fl-dpgan")
    except PackageNotFoundError:  # a Flower bundle is unpacked, not installed
        return "0+bundle"
