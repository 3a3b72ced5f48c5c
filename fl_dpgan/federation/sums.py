"""What the server makes of the sites' moment releases: their total, without what no honest site can have released."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fl_dpgan.errors import WireError
from fl_dpgan.federation import wire
from fl_dpgan.privacy.plan import SitePlan


def added_up(
    released: Mapping[str, bytes], plans: Mapping[str, SitePlan], shape: tuple[int, ...]
) -> tuple[Tensor, float, dict[str, str]]:
    """Add up the sites' noised sums, always in the order of their names.

    Args:
        released: each site's serialised sums, by name. plans: theirs. shape: of the sums.

    Returns:
        The total (`shape`, double), the standard deviation of the noise in each of its numbers, and who is left out,
        with the reason.
    """
    total, variance, left_out = torch.zeros(shape, dtype=torch.float64), 0.0, {}
    for name in sorted(released):  # one site's sums at a time are read
        noise = plans[name].moment_noise or 0.0
        try:
            sums = wire.read_tensors(released[name], sums=torch.zeros_like(total))["sums"]
            _check(sums, plans[name].declared_size, noise)
        except WireError as error:
            left_out[name] = str(error)
            continue
        total, variance = total + sums, variance + noise**2
    return total, math.sqrt(variance), left_out


def _check(sums: Tensor, declared_size: int, noise: float) -> None:
    """Leave out sums that no honest site can have: one site must not be able to ruin the run.

    A site may hold more than it declares; five times as much is taken for an error.
    """
    most = 5 * declared_size + noise * (math.sqrt(sums.numel()) + 10)
    if not float(sums.norm()) <= most:
        raise WireError(f"sums of norm {float(sums.norm()):.3g}, beyond {most:.3g}, which no honest site has")
