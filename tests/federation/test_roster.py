"""Sites that come late, leave, return, or take another's name; and what the server counts of what they may charge."""

import pytest
from conftest import LocalGrid, charges, handler, log
from flwr.app import Error, Message, MessageType

from fl_dpgan.errors import FederationError, RunFolderError, WireError
from fl_dpgan.federation import FedDPGAN, roster, wire
from fl_dpgan.federation.envelope import unpack_parts
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.runs import RunFolder


class Comings(LocalGrid):
    """A grid on which nodes come and go: `present` says which are there, by the number of rounds that were asked."""

    def __init__(self, handlers, present):
        super().__init__(handlers)
        self.present, self.rounds = present, 0

    def get_node_ids(self):
        return [node for node in self.handlers if self.present(node, self.rounds)]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        assert {message.metadata.dst_node_id for message in messages} <= set(self.get_node_ids())
        replies = super().send_and_receive(messages, timeout=timeout)
        self.rounds += any(message.metadata.message_type == MessageType.TRAIN for message in messages)
        return replies


def statuses(fed, name):
    return [record["sites"][name]["status"] for record in log(fed) if name in record.get("sites", {})]


def not_joined(fed):
    return [reason for record in log(fed) for reason in record.get("not_joined", [])]


def test_a_site_that_comes_late_is_asked_from_the_next_round_on(federation):
    fed = federation(sites=2, rounds=4)
    grid = Comings({n + 10: handler(site) for n, site in fed.sites.items()}, lambda node, r: node == 10 or r >= 1)
    fed.strategy().start(grid)
    assert statuses(fed, "site-0") == ["trained"] * 4
    assert statuses(fed, "site-1") == ["not asked", "trained", "trained"]  # it came while the second round was asked


def test_a_site_that_leaves_is_neither_asked_nor_counted_and_taken_in_again(federation):
    fed = federation(sites=2, rounds=4)
    grid = Comings(
        {n + 10: handler(site) for n, site in fed.sites.items()}, lambda node, r: node == 10 or r not in (1, 2)
    )
    strategy = fed.strategy()
    strategy.start(grid)
    assert statuses(fed, "site-1") == ["trained", "absent", "absent", "trained"]
    assert strategy.sites["site-1"].steps == sum(event.count for event in charges(fed, 1)) == 4


def test_a_site_that_returns_at_another_node_keeps_its_plan_and_its_count(federation):
    fed = federation(sites=2, rounds=4)
    handlers = {10: handler(fed.sites[0]), 11: handler(fed.sites[1]), 12: handler(fed.sites[1])}
    grid = Comings(handlers, lambda node, r: node == 10 or (node == 11) == (r < 2))
    strategy = fed.strategy()
    strategy.start(grid)
    assert statuses(fed, "site-1")[:2] == ["trained"] * 2 and statuses(fed, "site-1")[-1] == "trained"
    assert strategy.sites["site-1"].node == 12
    assert strategy.sites["site-1"].steps == sum(event.count for event in charges(fed, 1))


def test_two_nodes_that_are_there_do_not_share_a_name(federation):
    fed = federation(sites=1, rounds=2)
    fed.strategy().start(LocalGrid({10: handler(fed.sites[0]), 11: handler(fed.sites[0])}))
    assert not_joined(fed) == ["another node calls itself site-0 too; give each site a name of its own"]


def test_a_node_under_a_name_that_is_not_its_own_is_turned_away_even_if_it_comes_first(federation):
    fed = federation(sites=2, rounds=2)
    registered = {"site-0": 10, "site-1": 11}
    # node 9 says that it is site-1, whose own node comes a round later
    handlers = {9: handler(fed.sites[1]), 10: handler(fed.sites[0]), 11: handler(fed.sites[1])}
    grid = Comings(handlers, lambda node, r: node != 11 or r >= 1)
    strategy = fed.strategy(registered=lambda: registered)
    strategy.start(grid)
    assert strategy.sites["site-1"].node == 11
    assert not_joined(fed) == ["node 9 calls itself site-1, under which name it is not registered"]


def test_a_refusal_does_not_move_what_the_server_remembers_of_a_ledger(federation):
    fed = federation(sites=2, rounds=2)

    def lies(message: Message):
        if message.metadata.message_type != MessageType.TRAIN:
            return handler(fed.sites[1])(message)
        number = wire.parse(unpack_parts(message)[0][0], wire.Request).round
        answer = wire.Answer(site="site-1", round=number, status="failed", head="f" * 64)
        return Message(wire.pack(answer), reply_to=message)

    strategy = fed.strategy()
    strategy.start(LocalGrid({10: handler(fed.sites[0]), 11: lies}))
    assert strategy.sites["site-1"].head == "" and len(strategy.sites["site-0"].head) == 64


@pytest.mark.parametrize("site", ["", "x\x1b[2J\nfake", "a b", "é"])
def test_a_site_whose_name_is_not_one_is_not_quoted(site):
    with pytest.raises(WireError) as caught:
        wire.parse(f'{{"site": {__import__("json").dumps(site)}, "round": 1, "status": "failed"}}', wire.Answer)
    assert "\x1b" not in str(caught.value)


def test_an_errors_text_from_a_node_is_made_printable(federation):
    message = federation().request()
    with pytest.raises(WireError) as caught:
        unpack_parts(Message(Error(code=2, reason="gone\x1b[2J\nround 7: all well"), reply_to=message))
    assert str(caught.value).isprintable()


def test_below_the_quorum_nobody_is_asked(federation, monkeypatch):
    monkeypatch.setattr(roster, "_PAUSE", 0.01)
    fed = federation(sites=2, rounds=3, quorum=2)
    grid = Comings({n + 10: handler(site) for n, site in fed.sites.items()}, lambda node, r: node == 10 or r < 1)
    with pytest.raises(FederationError, match="1 sites are connected, the quorum is 2"):
        fed.strategy().start(grid)
    assert len(charges(fed, 0)) == len(charges(fed, 1)) == 1


@pytest.mark.parametrize("dies", ["server", "site"])
def test_invariant_2_the_servers_epsilon_is_never_below_the_ledgers_when_a_run_is_cut_within_a_round(federation, dies):
    fed = federation(sites=2, rounds=4, quorum=2)
    answers = handler(fed.sites[1])
    trained = []

    def cut(message: Message):
        reply = answers(message)
        trained.append(message.metadata.message_type == MessageType.TRAIN)
        if sum(trained) == 2:  # charged and trained, and then all is over
            raise KeyboardInterrupt if dies == "server" else RuntimeError
        return reply

    with pytest.raises(KeyboardInterrupt if dies == "server" else FederationError):
        fed.strategy().start(LocalGrid({10: handler(fed.sites[0]), 11: cut}))
    strategy = fed.strategy()
    strategy.start(fed.grid())
    _, meta = RunFolder(fed.path).load_checkpoint()
    for number in (0, 1):
        known, charged = meta["sites"][f"site-{number}"], sum(event.count for event in charges(fed, number))
        assert known["steps"] >= charged
        plan = SitePlan.model_validate(known["plan"])
        assert strategy.sites[f"site-{number}"].epsilon >= plan.epsilon_after(charged)
    assert not (fed.path / "asked.json").exists()


def test_a_run_cut_before_its_first_checkpoint_remembers_what_it_asked(federation):
    fed = federation(sites=1, rounds=2)
    answers = handler(fed.sites[0])

    def cut(message: Message):
        answers(message)
        if message.metadata.message_type == MessageType.TRAIN:
            raise KeyboardInterrupt
        return answers(message)

    with pytest.raises(KeyboardInterrupt):
        fed.strategy().start(LocalGrid({10: cut}))
    strategy = fed.strategy()
    strategy.start(fed.grid())
    assert strategy.sites["site-0"].steps >= sum(event.count for event in charges(fed)) > 0


def test_a_run_that_an_older_version_began_is_not_continued(tmp_path):
    (tmp_path / "scenario.json").write_text('{"scenario": {}, "versions": {}}')
    with pytest.raises(RunFolderError, match="older version"):
        _ = RunFolder(tmp_path).run
    assert RunFolder(tmp_path).settings.seed == 0


def test_a_real_sites_guard_that_is_not_ready_yet_is_asked_again(federation, monkeypatch):
    monkeypatch.setattr(roster, "_PAUSE", 0.01)
    fed = federation(sites=1, rounds=1)
    calls = []

    def late(message: Message):
        calls.append(message)
        if len(calls) < 4:
            return Message(Error(code=2, reason="the site cannot take part"), reply_to=message)
        return handler(fed.sites[0])(message)

    fed.strategy(registered=lambda: {"site-0": 10}).start(LocalGrid({10: late}))
    assert statuses(fed, "site-0") == ["trained"]
    assert len(not_joined(fed)) == 1  # said once


def test_requests_are_dropped_once_nobody_waits_for_them(federation):
    fed = federation(rounds=1)
    grid = fed.grid()
    fed.strategy().start(grid)
    assert {message.metadata.ttl for message in grid.sent} == {fed.plan.federation.round_timeout}


def test_what_introduces_itself_as_neither_a_site_nor_a_refusal_does_not_join(federation):
    fed = federation(sites=2, rounds=1)
    answers = handler(fed.sites[1])

    def strange(message: Message):
        reply = answers(message)
        if message.metadata.message_type == MessageType.QUERY:
            reply.content = wire.pack_parts([('{"site": "site-1"}', b"")])
        return reply

    fed.strategy().start(LocalGrid({10: handler(fed.sites[0]), 11: strange}))
    assert [reason.startswith("a malformed Hello") for reason in not_joined(fed)] == [True]
    assert statuses(fed, "site-0") == ["trained"] and statuses(fed, "site-1") == []


def test_a_checkpoint_of_another_run_is_not_continued(federation):
    fed = federation(rounds=1)
    fed.strategy().start(fed.grid())
    generator, discriminator = fed.networks()
    with pytest.raises(RunFolderError, match="is of run test, not other"):
        FedDPGAN(fed.plan, generator, discriminator, folder=RunFolder(fed.path), run="other")
