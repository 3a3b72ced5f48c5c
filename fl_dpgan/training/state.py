"""Optimiser state as a flat mapping of named tensors, so that it can be kept in safetensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_dpgan.errors import RunFolderError
from fl_dpgan.text import printable


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state's tensors, named `INDEX.NAME`; empty before the first step."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value.contiguous() for index, entry in state.items() for name, value in entry.items()}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Load the tensors `PREFIX.NAME` of a checkpoint into a module.

    Raises:
        RunFolderError: one is missing, or has another shape.
    """
    try:
        module.load_state_dict({name: tensors[f"{prefix}.{name}"] for name in module.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise RunFolderError(
            f"the checkpoint's {prefix!r} does not fit the run's networks ({printable(str(error), 300)}); "
            "put back a copy of it, or start a new run in another --out"
        ) from error


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; the optimiser must have the same parameters.

    Raises:
        ValueError: a tensor belongs to no parameter, or has another shape than its parameter.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        number = int(index) if index.isdecimal() and len(index) < 9 else len(parameters)
        if number >= len(parameters) or value.shape != (() if name == "step" else parameters[number].shape):
            raise ValueError(f"an optimiser's {key!r:.80} of shape {tuple(value.shape)!s:.80}")
        state.setdefault(number, {})[name] = value
    if len({frozenset(names) for names in state.values()}) > 1:
        raise ValueError("an optimiser with other tensors for one parameter than for another")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
