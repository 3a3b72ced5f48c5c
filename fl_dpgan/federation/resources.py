"""How many processes a simulation runs its sites in, and what each takes of the machine: never more than fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_dpgan.errors import FederationError

_GIB = 2**30
#: A process with PyTorch, Flower and Ray, before it trains: measured on the digits and on MNIST.
_BASE = int(0.6 * _GIB)
#: Beside it, what one pass of D holds: per-sample gradients, patches, activations.
_PASS = int(0.25 * _GIB)
#: Of a GPU: CUDA's own context, and a pass of D with the larger limits that hold there.
_ON_GPU = int(2.5 * _GIB)


@dataclass(frozen=True)
class Machine:
    """One node of Ray: cores, bytes of memory that Ray may give away, and GPUs with the bytes of each."""

    cpus: int
    memory: int
    gpus: float = 0.0
    gpu_memory: int = 16 * _GIB


@dataclass(frozen=True)
class Resources:
    """What each process takes, as Flower asks for it.

    Attributes:
        processes: how many there will be. threads: cores of each. memory: bytes of each, estimated.
        gpu_fraction: share of a GPU of each; 0 without one.
    """

    processes: int
    threads: int
    memory: int
    gpu_fraction: float

    def __str__(self) -> str:
        share = f", {self.gpu_fraction:.3g} of a GPU" if self.gpu_fraction else ""
        return (
            f"{self.processes} process{'es' * (self.processes > 1)} for the sites: {self.threads} "
            f"thread{'s' * (self.threads > 1)}, about {self.memory / _GIB:.2g} GiB{share} each"
        )


def choose(machines: Sequence[Machine], *, nodes: int, parameters: int, gpu_fraction: float | None = None) -> Resources:
    """As many processes as cores, memory and GPUs allow, but no more than there are Flower nodes to keep busy.

    Args:
        machines: Ray's nodes. nodes: Flower's nodes. parameters: of G and D together.
        gpu_fraction: a share of a GPU to take in place of the estimated one.

    Raises:
        FederationError: not one process fits.
    """
    memory = _BASE + _PASS + 10 * 4 * parameters  # weights, gradients, moments, and what travels
    if any(machine.gpus for machine in machines):
        machines = [machine for machine in machines if machine.gpus]  # Flower uses these alone
        fits = min(machine.gpu_memory for machine in machines) // _ON_GPU
        share = gpu_fraction or 1 / max(1, fits)
    else:
        share = 0.0
    for threads in range(1, max(machine.cpus for machine in machines) + 1):
        on_each = [_processes(machine, threads, share) for machine in machines]
        fit = all(count * memory <= machine.memory for count, machine in zip(on_each, machines, strict=True))
        more_would_idle = sum(_processes(machine, threads + 1, share) for machine in machines) < nodes
        if fit and any(on_each) and more_would_idle:
            return Resources(min(sum(on_each), nodes), threads, memory, share)
    free = max(machine.memory for machine in machines)
    raise FederationError(
        f"a process for the sites takes about {memory / _GIB:.2g} GiB, of which Ray has {free / _GIB:.2g} free; "
        "end other programs, or use a larger machine"
    )


def _processes(machine: Machine, threads: int, share: float) -> int:
    """How many processes Flower starts on a machine."""
    by_cpu = machine.cpus // threads
    return min(by_cpu, int(machine.gpus / share)) if share else by_cpu


def machines() -> list[Machine]:
    """The nodes of the Ray that this process is connected to."""
    import ray
    import torch

    gpu_memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else Machine(1, 0).gpu_memory
    return [
        Machine(int(found.get("CPU", 0)), int(found.get("memory", 0)), float(found.get("GPU", 0)), gpu_memory)
        for found in (node["Resources"] for node in ray.nodes() if node["Alive"])
        if found.get("CPU", 0) >= 1
    ]
