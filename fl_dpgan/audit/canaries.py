"""Canaries: records of which an adversary must tell whether they were in the data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.clipping import ClippingRule
from fl_dpgan.privacy.engines import Engine
from fl_dpgan.privacy.gradients import clipping_factors

#: "input": images of noise, told by D's logits. "gradient": records with one parameter of D each to themselves.
Kind = Literal["gradient", "input"]

#: The first pixel of a gradient canary's image; all other pixels are within [-1, 1]. The second holds its number.
_MARK = 2.0
#: A gradient canary's norm before it is clipped, in clipping norms: clipping must act on it.
_LENGTH = 10.0
#: Parameters of D that a gradient canary has to itself, if there are enough.
_PLACES = 16


@dataclass(frozen=True)
class Canaries:
    """Records of an audit, each in the data or not by the toss of a coin.

    Attributes:
        images: (m, channels, size, size). labels: (m,). included: (m,) booleans.
    """

    images: Tensor
    labels: Tensor
    included: NDArray[np.bool_]

    def join(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The site's images, in [-1, 1], and labels, and with them the canaries that are in."""
        chosen = torch.from_numpy(self.included)
        return torch.cat([images, self.images[chosen]]), torch.cat([labels, self.labels[chosen]])


def draw_canaries(kind: Kind, count: int, shape: tuple[int, ...], num_classes: int, *, seed: int) -> Canaries:
    """Canaries of images of this shape (channels, size, size), and the coin's tosses for them."""
    random = torch.Generator().manual_seed(seed)
    included = torch.rand(count, generator=random).numpy() < 0.5
    labels = torch.randint(num_classes, (count,), generator=random)
    images = torch.rand(count, *shape, generator=random).round() * 2 - 1  # black and white: far from each other
    if kind == "gradient":
        flat = images.flatten(1)
        flat[:, 0], flat[:, 1] = _MARK, torch.arange(count).float()
    return Canaries(images, labels, included)


@dataclass(frozen=True)
class Coordinates:
    """Where each gradient canary pushes D: k parameters of its own, up or down, all equally hard.

    Dirac canaries (Nasr et al., arXiv 2302.07956, section 4.2) have one parameter each. Adam makes steps of nearly one
    length, so a step by chance in one parameter's direction looks like a canary's; in those of k at once it does not.

    Attributes:
        places: (m, k) distinct positions in D's parameters, laid end to end. signs: (m, k) of -1 and 1.
    """

    places: Tensor
    signs: Tensor

    @classmethod
    def draw(cls, count: int, parameters: int, *, seed: int) -> "Coordinates":
        """Places for `count` canaries among D's `parameters`.

        Raises:
            ConfigError: D has fewer parameters than there are canaries.
        """
        if count > parameters:
            raise ConfigError(f"{count} gradient canaries for a discriminator of {parameters} parameters; take fewer")
        random, each = torch.Generator().manual_seed(seed), min(parameters // count, _PLACES)
        places = torch.randperm(parameters, generator=random)[: count * each].view(count, each)
        return cls(places, torch.randint(2, (count, each), generator=random) * 2.0 - 1)

    def scores(self, moved: Tensor) -> NDArray[np.float64]:
        """How far D went (parameters,) in each canary's direction: against its gradient."""
        found: NDArray[np.float64] = (-self.signs * moved[self.places]).sum(1).double().numpy()
        return found


class PlantedEngine:
    """An engine in which gradient canaries have the gradients that `Coordinates` gives them; others have their own.

    What is planted is the gradient alone: the rule clips it, and noise, divisor and sampler are the plan's.
    """

    def __init__(self, inner: Engine, parameters: list[nn.Parameter], coordinates: Coordinates) -> None:
        self._inner, self._parameters, self._coordinates = inner, parameters, coordinates

    def clipped_sum(
        self, images: Tensor, labels: Tensor, targets: Tensor, clipping_norm: float, rule: ClippingRule
    ) -> tuple[list[Tensor], Tensor]:
        """As `Engine.clipped_sum`."""
        first = images.flatten(1)[:, 0]
        planted = first == _MARK
        sums, own = self._inner.clipped_sum(images[~planted], labels[~planted], targets[~planted], clipping_norm, rule)
        norms = torch.full((len(images),), _LENGTH * clipping_norm, dtype=torch.float64)
        norms[~planted] = own
        factors, _ = clipping_factors(norms, clipping_norm, rule)
        numbers = images[planted].flatten(1)[:, 1].long()
        flat = torch.cat([part.flatten() for part in sums])
        signs, places = self._coordinates.signs[numbers], self._coordinates.places[numbers]
        lengths = factors[planted].float() * _LENGTH * clipping_norm / signs.shape[1] ** 0.5
        flat.index_add_(0, places.flatten(), (signs * lengths[:, None]).flatten())
        parts = flat.split([parameter.numel() for parameter in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)], norms

    def close(self) -> None:
        """As `Engine.close`."""
        self._inner.close()


def planted(engine: Callable[[nn.Module], Engine], coordinates: Coordinates) -> Callable[[nn.Module], Engine]:
    """The engine with the canaries' gradients planted in it."""
    return lambda module: PlantedEngine(engine(module), list(module.parameters()), coordinates)
