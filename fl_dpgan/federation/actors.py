"""Flower's pool of Ray actors, in which a new actor takes the place of one that has died.

Flower 1.42 puts a dead actor back: there it fails at once, is free again, and so gets nearly every later message.
"""

from typing import Any

from flwr.app import Context, Message
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.exceptions import RayActorError

from fl_dpgan.errors import FederationError


class RenewedActorPool(BasicActorPool):
    """The message that a dead actor had is lost, and its sites are left out of one round; later ones are answered."""

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> tuple[Message, Context]:
        """A message's answer, after which its actor is free.

        Raises:
            FederationError: the actor has died; Flower frees what stands in its place.
        """
        try:
            return super().fetch_result_and_return_actor_to_pool(future)
        except RayActorError as error:
            self._future_to_actor[future] = self.create_actor_fn()  # type: ignore[no-untyped-call]
            raise FederationError("the process that held the site has died; a new one takes its place") from error


def renew_dead_actors() -> None:
    """Let the simulations of this process have such a pool: Flower has no setting for it."""
    raybackend.BasicActorPool = RenewedActorPool  # type: ignore[attr-defined]
