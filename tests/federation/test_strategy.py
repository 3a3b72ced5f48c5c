"""The strategy averages in a fixed order, leaves out what is wrong, keeps it charged, and can be continued."""

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from fl_dpgan.errors import ConfigError, FederationError, RunFolderError
from fl_dpgan.federation import wire
from fl_dpgan.federation.averaging import RunningMean
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.runs import RunFolder
from tests.conftest import handler


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def lying(site, change):
    """A site whose trained tensors are changed on their way."""

    def answer(message):
        reply = handler(site)(message)
        if message.metadata.message_type.startswith("train"):
            header, tensors = wire.unpack(reply, wire.Answer)
            reply.content = wire.pack(header, change(tensors))
        return reply

    return answer


def silent(site):
    return lambda m: handler(site)(m) if m.metadata.message_type.startswith("query") else None


def crashing(site):
    def answer(message):
        if message.metadata.message_type.startswith("query"):
            return handler(site)(message)
        raise MemoryError

    return answer


def scaled(value):
    return lambda body: save({k: t * value for k, t in load(body).items()})


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.5, 10)), min_size=1, max_size=6))
def test_average_is_the_weighted_mean(pairs):
    running = RunningMean()
    for x, w in pairs:
        running.add({"w": torch.tensor([x])}, w)
    mean = running.result()["w"].item()
    by_hand = sum(x * w for x, w in pairs) / sum(w for _, w in pairs)
    assert mean == pytest.approx(by_hand, rel=1e-5, abs=1e-5)


def test_the_same_seed_gives_the_same_generator_bit_for_bit(federation):
    results = []
    for name in ("first", "second"):
        fed = federation(name)
        strategy = fed.strategy()
        strategy.start(fed.grid())
        results.append(weights(strategy.average_generator))
    assert equal(*results)
    other = federation("other", seed=1)
    strategy = other.strategy()
    strategy.start(other.grid())
    assert not equal(results[0], weights(strategy.average_generator))


def test_a_run_that_is_stopped_and_resumed_ends_like_one_that_is_not(federation):
    whole = federation("whole", rounds=4)
    straight = whole.strategy()
    straight.start(whole.grid())

    class StopError(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise StopError

    cut = federation("cut", rounds=4)
    with pytest.raises(StopError):
        cut.strategy(on_round=stop).start(cut.grid())
    cut.sites = {n: cut.site(n) for n in cut.sites}
    resumed = cut.strategy()
    resumed.start(cut.grid())
    assert equal(weights(straight.average_generator), weights(resumed.average_generator))
    assert [r["round"] for r in RunFolder(cut.path).rounds()] == [1, 2, 3, 4]
    assert resumed.sites["site-0"].steps == 8


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (silent, "silent"),
        (crashing, "left out"),
        (lambda s: lying(s, lambda body: scaled(float("nan"))(body)), "left out"),
        (lambda s: lying(s, lambda body: save({"head.bias": torch.zeros(7)})), "left out"),
        (lambda s: lying(s, lambda body: b"rubbish"), "left out"),
    ],
    ids=["silent", "crash", "nan", "shape", "rubbish"],
)
def test_a_faulty_site_is_left_out_reported_and_stays_charged(federation, fault, status):
    fed = federation(sites=3, rounds=1)
    grid = fed.grid()
    grid.handlers[11] = fault(fed.sites[1])
    strategy = fed.strategy()
    strategy.start(grid)
    (record,) = RunFolder(fed.path).rounds()
    assert {name: site["status"] for name, site in record["sites"].items()} == {
        "site-0": "trained",
        "site-1": status,
        "site-2": "trained",
    }
    assert record["sites"]["site-1"]["epsilon"] == record["sites"]["site-0"]["epsilon"] > 0

    honest = federation("without", sites=3, rounds=1)
    without = honest.grid()
    without.handlers[11] = silent(honest.sites[1])
    reference = honest.strategy()
    reference.start(without)
    assert equal(weights(strategy.discriminator), weights(reference.discriminator))


def test_an_answer_for_another_round_or_site_is_left_out(federation):
    fed = federation(rounds=1)
    grid = fed.grid()

    def replay(message):
        reply = handler(fed.sites[1])(message)
        if message.metadata.message_type.startswith("train"):
            header, tensors = wire.unpack(reply, wire.Answer)
            reply.content = wire.pack(header.model_copy(update={"site": "site-0"}), tensors)
        return reply

    grid.handlers[11] = replay
    fed.strategy().start(grid)
    (record,) = RunFolder(fed.path).rounds()
    assert record["sites"]["site-1"]["status"] == "left out"


def test_below_the_quorum_for_faults_is_an_error(federation):
    fed = federation(quorum=2)
    grid = fed.grid()
    grid.handlers[11] = silent(fed.sites[1])
    with pytest.raises(FederationError, match="round 1: fewer answers than the quorum of 2"):
        fed.strategy().start(grid)


def test_a_spent_site_withdraws_and_the_run_stops_below_the_quorum(federation):
    fed = federation(sites=2, rounds=3, quorum=1)
    fed.sites = {0: fed.site(0, eps_max=8.5), 1: fed.site(1, eps_max=0.5)}
    fed.strategy().start(fed.grid())
    *rounds, last = RunFolder(fed.path).rounds()
    assert rounds[0]["sites"]["site-1"]["status"] == "withdrawn"
    assert rounds[0]["sites"]["site-1"]["epsilon"] == 0
    assert rounds[0]["sites"]["site-0"]["status"] == "trained"
    assert "fewer than the quorum" in last["stopped"]


def test_invariant_3_the_servers_epsilon_is_that_of_the_ledgers_events_and_of_dp_accounting(federation):
    fed = federation(rounds=3)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    ledger = Ledger(fed.path / "ledgers" / "site-1.sqlite")
    reference = RdpAccountant(orders=[ledger.account.order])
    for row in ledger.charges():
        event = PoissonSampledDpEvent(row.event.sample_rate, GaussianDpEvent(row.event.noise_multiplier))
        reference.compose(event, row.event.count)
    assert ledger.epsilon() == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)
    assert strategy.sites["site-1"].epsilon == pytest.approx(ledger.epsilon(), rel=1e-9)
    assert ledger.epsilon() <= 10


def test_a_second_node_of_one_name_does_not_join_and_the_others_go_on(federation):
    fed = federation()
    fed.sites[1] = fed.sites[0]
    fed.strategy().start(fed.grid())
    first, *rounds = RunFolder(fed.path).rounds()
    assert "another node calls itself site-0" in first["not_joined"][0]
    assert [set(record["sites"]) for record in rounds] == [{"site-0"}, {"site-0"}]


def test_too_few_sites_are_an_error(federation):
    fed = federation(quorum=2)
    grid = fed.grid()
    del grid.handlers[11]
    with pytest.raises(FederationError, match="1 sites joined, the quorum is 2"):
        fed.strategy().start(grid)


def test_start_takes_the_grid_alone(federation):
    fed = federation()
    with pytest.raises(ConfigError, match="the grid alone"):
        fed.strategy().start(fed.grid(), num_rounds=3)


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_a_truncated_checkpoint_is_a_typed_error_and_stays_as_it_is(federation, keep):
    fed = federation(rounds=1)
    fed.strategy().start(fed.grid())
    file = fed.path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    before = file.read_bytes()
    with pytest.raises(RunFolderError, match="is damaged"):
        fed.strategy()
    assert file.read_bytes() == before
