"""The federated part, on Flower's message API: what crosses the wire, the site, the strategy and the simulation."""

from fl_dpgan.federation.site import Site
from fl_dpgan.federation.strategy import FedDPGAN

__all__ = ["FedDPGAN", "Site"]
