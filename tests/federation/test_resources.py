"""As many processes as the machine holds, never more: against a search over all settings that Flower knows."""

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_dpgan.errors import FederationError
from fl_dpgan.federation.resources import Machine, choose, machines

GIB = 2**30
MACHINES = st.lists(st.builds(Machine, st.integers(1, 64), st.integers(GIB, 300 * GIB)), min_size=1, max_size=4)


def started(machines, threads, share=0.0):
    """What Flower starts: by cores, and by GPUs where a share of one is asked for."""
    return [min(m.cpus // threads, int(m.gpus / share)) if share else m.cpus // threads for m in machines]


def test_a_small_machine_has_a_process_a_core_of_one_thread():
    found = choose([Machine(2, 10 * GIB)], nodes=10, parameters=100_000)
    assert (found.processes, found.threads, found.gpu_fraction) == (2, 1, 0.0)
    assert "2 processes for the sites: 1 thread, about 0.85 GiB each" in str(found)


def test_with_less_memory_than_cores_there_are_fewer_processes_of_more_threads():
    found = choose([Machine(16, 4 * GIB)], nodes=100, parameters=100_000)
    assert (found.processes, found.threads) == (4, 4)


def test_one_node_of_flower_gets_every_core():
    assert choose([Machine(8, 50 * GIB)], nodes=1, parameters=1000).threads == 8


def test_a_gpu_is_shared_by_as_many_as_fit_into_it():
    found = choose([Machine(16, 100 * GIB, 1.0, 12 * GIB)], nodes=100, parameters=1000)
    assert found.gpu_fraction == pytest.approx(1 / 4) and sum(started([Machine(16, 0, 1.0)], 1, 1 / 4)) == 4
    assert choose([Machine(16, 100 * GIB, 1.0)], nodes=9, parameters=1000, gpu_fraction=0.5).processes == 2


def test_a_machine_without_a_gpu_beside_one_that_has_it_is_left_out():
    both = [Machine(64, 100 * GIB), Machine(4, 100 * GIB, 1.0)]
    assert choose(both, nodes=100, parameters=1000).processes == 4


@given(MACHINES, st.integers(1, 1000), st.integers(0, 10**7))
def test_never_more_than_fit_and_never_fewer_than_could(machines, nodes, parameters):
    try:
        found = choose(machines, nodes=nodes, parameters=parameters)
    except FederationError:
        need = choose([Machine(1, 10**15)], nodes=1, parameters=parameters).memory
        most = max(m.cpus for m in machines)
        assert not any(
            sum(started(machines, t))
            and all(n * need <= m.memory for n, m in zip(started(machines, t), machines, strict=True))
            for t in range(1, most + 1)
        )
        return
    on_each = started(machines, found.threads)
    assert all(count * found.memory <= machine.memory for count, machine in zip(on_each, machines, strict=True))
    assert found.processes == min(sum(on_each), nodes) >= 1
    if found.threads > 1:  # one thread fewer each would not fit, or leave some with nothing to do
        more = started(machines, found.threads - 1)
        too_big = any(count * found.memory > machine.memory for count, machine in zip(more, machines, strict=True))
        assert too_big or sum(started(machines, found.threads)) >= nodes


def test_the_machines_are_rays_nodes_that_live_and_have_a_core(monkeypatch):
    def node(alive=True, **resources):
        return {"Alive": alive, "Resources": resources}

    found = [
        node(CPU=4.0, memory=5.5 * GIB), node(CPU=2.0, memory=GIB, GPU=1.0), node(False, CPU=8.0, memory=GIB),
        node(memory=GIB), node(CPU=0.0),
    ]  # fmt: skip
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machines() == [Machine(4, int(5.5 * GIB)), Machine(2, GIB, 1.0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80 * GIB))
    assert [machine.gpu_memory for machine in machines()] == [80 * GIB] * 2
