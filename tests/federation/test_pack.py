"""Many sites behind one node answer as each would by itself; the strategy sees sites, not nodes."""

import pytest
import torch
from flwr.app import Error, Message, MessageType
from safetensors.torch import load, load_file

from fl_dpgan.federation import Records, wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.runs import RunFolder
from tests.conftest import LocalGrid, grid_sent, handler


def packed(fed, per_node):
    """The federation's sites spread over nodes in packs."""
    fed.plan = fed.plan.model_copy(
        update={"federation": fed.plan.federation.model_copy(update={"sites_per_node": per_node})}
    )
    sites = list(fed.sites.values())
    nodes = [sites[i : i + per_node] for i in range(0, len(sites), per_node)]
    return LocalGrid({10 + n: handler(*members) for n, members in enumerate(nodes)})


def spent(fed):
    return [(c.event, c.round) for n in fed.sites for c in LedgerReader(fed.ledger(n)).charges()]


def records(fed):
    return [{name: site["status"] for name, site in r["sites"].items()} for r in RunFolder(fed.path).rounds()]


@pytest.mark.parametrize("per_node", [2, 3, 5])
def test_a_pack_trains_as_its_sites_do_one_by_one_with_the_same_accounting(federation, per_node):
    alone, together = federation("alone", sites=5, rounds=2), federation("together", sites=5, rounds=2)
    alone.strategy().start(alone.grid())
    grid = packed(together, per_node)
    together.strategy().start(grid)
    assert spent(together) == spent(alone) and len(spent(alone)) == 10
    assert records(together) == records(alone)
    one, other = (load_file(fed.path / "checkpoint.safetensors") for fed in (alone, together))
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-5, atol=1e-5)
    assert len([m for m in grid.sent if m.metadata.message_type == MessageType.TRAIN]) == 2 * -(-5 // per_node)


def test_the_networks_travel_once_a_node(federation):
    fed = federation(sites=3)
    grid = packed(fed, 3)
    strategy = fed.strategy()
    strategy._join(grid)
    (message,) = strategy.configure_train(1, None, None, grid)
    record = message.content.config_records["fl_dpgan"]
    assert len(record["headers"]) == 3 and len(record["tensors"]) == 1
    assert len({body for _, body in wire.unpack_parts(message)}) == 1


def test_a_site_of_a_pack_that_withdraws_leaves_the_others_to_train(federation):
    fed = federation(sites=3, rounds=2)
    fed.sites[1] = fed.site(1, eps_max=0.5)
    grid = packed(fed, 3)
    fed.strategy().start(grid)
    assert [r["site-1"] for r in records(fed)] == ["withdrawn", "withdrawn"]
    assert all(r[name] == "trained" for r in records(fed) for name in ("site-0", "site-2"))
    assert LedgerReader(fed.ledger(1)).charges() == []


def test_the_noise_and_the_samples_of_two_sites_of_a_pack_are_independent(federation):
    fed = federation(sites=2, rounds=30)
    privacy = fed.plan.privacy.model_copy(update={"noise_multiplier": 40.0})  # drowns what the gradients share
    fed.plan = fed.plan.model_copy(update={"privacy": privacy})
    drawn = {0: [], 1: []}
    for number, site in fed.sites.items():
        site._seed = None  # as deployed
        site._data = Watched(fed.data(0), drawn[number])  # the same records at both
    grid = packed(fed, 2)
    strategy = fed.strategy()
    strategy._join(grid)
    moved = []
    for number in range(1, 31):
        (message,) = strategy.configure_train(number, None, None, grid)
        reply = Pack(fed.sites.values()).train(grid_sent(message))
        states = [load(body) for _, body in wire.unpack_parts(reply)]
        start = dict(fed.networks()[1].named_parameters())
        moved.append(torch.stack([torch.cat([(s[n] - start[n]).detach().flatten() for n in start]) for s in states]))
    moves = torch.cat(moved, dim=1).sign()
    included = torch.tensor([[n in step for step in drawn[site] for n in range(40)] for site in (0, 1)]).float()
    for pair in (moves, included):
        assert pair.std(dim=1).min() > 0.2
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / pair.shape[1] ** 0.5  # five standard deviations


class Watched(Records):
    """Records that note who was drawn."""

    def __init__(self, data, drawn):
        super().__init__(*data)
        self.drawn = drawn

    def batch(self, records):
        self.drawn.append(set(records.tolist()))
        return super().batch(records)


def test_a_node_without_an_answer_leaves_all_its_sites_out_and_they_stay_charged(federation):
    fed = federation(sites=4, rounds=1)
    grid = packed(fed, 2)
    answers = grid.handlers[11]

    def dies(message):
        if message.metadata.message_type == MessageType.QUERY:
            return answers(message)
        return Message(Error(code=5, reason="gone"), reply_to=message)

    grid.handlers[11] = dies
    strategy = fed.strategy()
    strategy.start(grid)
    assert records(fed) == [{"site-0": "trained", "site-1": "trained", "site-2": "left out", "site-3": "left out"}]
    assert strategy.sites["site-2"].steps == strategy.sites["site-0"].steps == 2


@pytest.mark.parametrize("spoil", ["missing", "another's", "malformed", "twice"])
def test_one_bad_answer_of_a_pack_leaves_the_others_in(federation, spoil):
    fed = federation(sites=3, rounds=1)
    grid = packed(fed, 3)
    answers = grid.handlers[10]

    def spoilt(message):
        reply = answers(message)
        if message.metadata.message_type == MessageType.QUERY:
            return reply
        parts = wire.unpack_parts(reply)
        parts = {
            "missing": [parts[0], parts[2]],
            "another's": [parts[0], (parts[1][0].replace("site-1", "site-9"), parts[1][1]), parts[2]],
            "malformed": [parts[0], ("{", parts[1][1]), parts[2]],
            "twice": [parts[0], parts[0], parts[2]],
        }[spoil]
        return Message(wire.pack_parts(parts), reply_to=message)

    grid.handlers[10] = spoilt
    fed.strategy().start(grid)
    assert records(fed) == [{"site-0": "trained", "site-1": "left out", "site-2": "trained"}]


def test_a_node_may_not_introduce_more_sites_than_the_plan_says(federation):
    fed = federation(sites=3, rounds=1)
    grid = LocalGrid({10: handler(fed.sites[0]), 11: handler(fed.sites[1], fed.sites[2])})
    strategy = fed.strategy()
    strategy.plan = fed.plan.model_copy(
        update={"federation": fed.plan.federation.model_copy(update={"round_timeout": 0.2})}
    )
    strategy.start(grid)
    assert set(strategy.sites) == {"site-0"}
    refused = next(r for r in RunFolder(fed.path).rounds() if "not_joined" in r)
    assert "introduces 2 sites; federation.sites_per_node is 1" in refused["not_joined"][0]


def test_more_requests_than_sites_are_refused_uncharged(federation):
    fed = federation(sites=1)
    request = fed.request()
    part = wire.unpack_parts(request)[0]
    request.content = wire.pack_parts([part, part])
    answer, body = wire.unpack(Pack([fed.sites[0]]).train(request), wire.Answer)
    assert (answer.status, answer.rule, body) == ("refused", "wire", b"")
    assert spent(fed) == []
