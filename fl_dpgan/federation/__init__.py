"""The federated part, on Flower's message API: what crosses the wire, the site, the strategy and the simulation."""

from fl_dpgan.federation.client import register
from fl_dpgan.federation.site import Site
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records

__all__ = ["FedDPGAN", "Models", "Policy", "Records", "Site", "register"]
