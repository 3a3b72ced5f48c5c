"""The federated part, on Flower's message API: what crosses the wire, the site, its guard, the strategy.

The names below are looked up when they are asked for: at a real site, each message starts a process that needs the
relay alone, and not PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_dpgan.federation.client import register
    from fl_dpgan.federation.site import Site
    from fl_dpgan.federation.strategy import FedDPGAN
    from fl_dpgan.privacy.policy import Policy
    from fl_dpgan.training.models import Models
    from fl_dpgan.training.records import Records

__all__ = ["FedDPGAN", "Models", "Policy", "Records", "Site", "register"]

_HOMES = {
    "FedDPGAN": "fl_dpgan.federation.strategy",
    "Models": "fl_dpgan.training.models",
    "Policy": "fl_dpgan.privacy.policy",
    "Records": "fl_dpgan.training.records",
    "Site": "fl_dpgan.federation.site",
    "register": "fl_dpgan.federation.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
