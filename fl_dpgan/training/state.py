"""Optimiser state as a flat mapping of named tensors, so that it can be kept in safetensors."""

import torch
from torch import Tensor


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state's tensors, named `INDEX.NAME`; empty before the first step."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value.contiguous() for index, entry in state.items() for name, value in entry.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; the optimiser must have the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
