"""The server's average of the sites' weights, the same bit for bit whenever it is computed."""

import torch
from torch import Tensor


def weighted_average(states: dict[str, dict[str, Tensor]], weights: dict[str, float]) -> dict[str, Tensor]:
    """Weighted mean of named tensors, summed in double precision in the order of `states`, so that it is repeatable."""
    total = sum(weights[name] for name in states)
    first = next(iter(states.values()))
    mean = {}
    for key, like in first.items():
        summed = torch.zeros_like(like, dtype=torch.float64)
        for name, state in states.items():
            summed += state[key].double() * (weights[name] / total)
        mean[key] = summed.to(like.dtype)
    return mean
