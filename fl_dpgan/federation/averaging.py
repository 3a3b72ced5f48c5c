"""The server's average of the sites' weights, as a running sum."""

import torch
from torch import Tensor


class RunningMean:
    """Weighted mean of named tensors, summed in double precision: the same bit for bit in the same order.

    Attributes:
        count: how many states were added.
    """

    def __init__(self) -> None:
        self.count, self._weight = 0, 0.0
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    def add(self, state: dict[str, Tensor], weight: float) -> None:
        """Add one state; all have the same names and shapes. weight: positive."""
        if not self._sums:
            self._sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
            self._types = {name: tensor.dtype for name, tensor in state.items()}
        for name, tensor in state.items():
            self._sums[name].add_(tensor.double(), alpha=weight)
        self.count, self._weight = self.count + 1, self._weight + weight

    def result(self) -> dict[str, Tensor]:
        """The mean of what was added, in the types of the first state."""
        return {name: (total / self._weight).to(self._types[name]) for name, total in self._sums.items()}
