"""Evaluation counts over the wire: off by default, charged before the answer, near the truth, within the budget."""

import json
import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from flwr.app import MessageType
from safetensors.torch import load, save
from torch import nn

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError
from fl_dpgan.federation import FedDPGAN, Policy, Records, Site, wire
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation.client import Pack
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.verify import verify
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models
from tests.conftest import LocalGrid, grid_sent, handler

BOTH = ("discriminator_update", "evaluation_count")


class Linear(nn.Sequential):
    """Two logits: the first pixel and its negative."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 2, bias=False))
        with torch.no_grad():
            self[1].weight.zero_()
            self[1].weight[0, 0], self[1].weight[1, 0] = -1.0, 1.0


class Counting:
    """A federation whose sites take part in counts; `right` of each site's images are recognised."""

    def __init__(self, fed, right=30, size=40, mechanisms=BOTH, classifier=Linear, **privacy):
        self.fed, self.right, self.size, self.mechanisms, self.classifier = fed, right, size, mechanisms, classifier
        raw = fed.plan.model_dump()
        asked = {"evaluation_noise": 4.0, "evaluation_every": 1, **privacy}
        self.plan = Plan.model_validate({**raw, "privacy": {**raw["privacy"], **asked}})
        self.sites = {number: self.site(number) for number in fed.sites}

    def site(self, number):
        images, labels = self.fed.data(number, self.size)
        images[:, 0, 0, 0] = torch.where(torch.arange(self.size) < self.right, 1.0, -1.0) * (labels * 2 - 1)
        eps_max = self.plan.privacy.eps_max
        policy = Policy(
            declared_size=self.size, mechanisms=self.mechanisms, delta=min(1e-5, 0.1 / self.size), eps_max=eps_max,
            eps_per_run=eps_max,
        )  # fmt: skip
        Ledger(self.path(number), policy.account(f"site-{number}")).close()
        return Site(
            f"site-{number}", Records(images, labels), policy=policy,
            models=Models(*self.fed.networks(), self.classifier and self.classifier()), ledger=self.path(number),
            learning_rate=1e-3, seed=0,
        )  # fmt: skip

    def path(self, number=0):
        return self.fed.path / "counting" / f"site-{number}.sqlite"

    def ledger(self, number=0):
        return LedgerReader(self.path(number))

    def run(self, spoil=None):
        """Run to the end; `spoil` changes what the sites answer."""
        self.fed.path.mkdir(parents=True, exist_ok=True)
        grid = LocalGrid({number + 10: handler(site) for number, site in self.sites.items()})
        if spoil:
            grid.handlers = {node: spoil(answer, node - 10) for node, answer in grid.handlers.items()}
        strategy = FedDPGAN(
            self.plan, *self.fed.networks(), folder=RunFolder(self.fed.path), run="test",
            train_classifier=lambda generator, number: Linear(),
        )  # fmt: skip
        strategy.start(grid)
        return strategy, grid, list(RunFolder(self.fed.path).rounds())

    def question(self, number=0, body=None, round_number=1):
        """An evaluation question as the strategy would send it; with it the plan."""
        message = self.fed.request(number)
        plan = self.plan.site_plan(self.size, self.ledger(number).account.order)
        request = wire.Request(
            run="test", round=round_number, site=f"site-{number}", plan=plan, mechanism="evaluation_count"
        )
        message.content = wire.pack(request, body or wire.dump(classifier=Linear()))
        return grid_sent(message)


def types(grid):
    return [message.metadata.message_type for message in grid.sent]


def test_invariant_1_by_default_no_count_is_asked_for(federation):
    counting = Counting(federation(), evaluation_noise=None)
    _, grid, log = counting.run()
    assert MessageType.EVALUATE not in types(grid)
    assert all("evaluation" not in record for record in log)
    assert {charge.event.mechanism for charge in counting.ledger().charges()} == {"discriminator_update"}


def test_invariant_1_a_policy_by_default_refuses_a_count_and_still_trains(federation):
    counting = Counting(federation(), mechanisms=("discriminator_update",))
    strategy, _, log = counting.run()
    for record in log:
        assert record["sites"]["site-0"]["status"] == "trained"
        assert record["evaluation"]["outcomes"]["site-0"]["rule"] == "mechanisms"
        assert "accuracy" not in record["evaluation"]
    assert {charge.event.mechanism for charge in counting.ledger().charges()} == {"discriminator_update"}
    assert strategy.sites["site-0"].evaluations == 0


def test_a_site_without_a_classifier_refuses_by_name(federation):
    counting = Counting(federation(), classifier=None)
    answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question()), wire.Answer)
    assert (answer.status, answer.rule, answer.count) == ("refused", "mechanisms", None)


def test_a_plan_without_noise_for_the_count_gets_none(federation):
    counting = Counting(federation(), evaluation_noise=None)
    answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question()), wire.Answer)
    assert (answer.status, answer.rule, answer.count) == ("refused", "mechanisms", None)
    assert counting.ledger().charges() == []


def test_the_answer_is_the_count_by_hand(federation):
    counting = Counting(federation())
    reply = Pack([counting.sites[0]]).evaluate(counting.question())
    answer, body = wire.unpack(reply, wire.Answer)
    noise = KeyedGenerator.from_seed(0, "site-0", "evaluation", 1).normal(1)[0] * 4.0 / 2
    grid = 4.0 / 1024
    assert answer.count == round((30 - 40 / 2 + noise) / grid) * grid
    assert answer.count == pytest.approx(30 - 40 / 2 + noise, abs=grid / 2)
    assert (answer.status, body) == ("counted", b"")
    header = json.loads(reply.content.config_records["fl_dpgan"]["headers"][0])
    assert set(header) == set(wire.LEAVES["Answer"]) - {"tensors"}


def test_invariant_2_a_count_is_charged_durably_before_it_is_taken(federation, monkeypatch):
    counting = Counting(federation())

    def crash(*args):
        (charge,) = counting.ledger().charges()  # through another connection: it is on disk
        assert charge.event == Event(1.0, 4.0, 1, "evaluation_count")
        assert charge.clipping_norm == 0
        raise RuntimeError("30 of 40")

    monkeypatch.setattr(site_module, "noised_count", crash)
    answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question()), wire.Answer)
    assert (answer.status, answer.count) == ("failed", None)
    assert "30" not in answer.reason
    assert len(counting.ledger().charges()) == 1


def test_invariant_2_a_repeated_question_gets_the_same_bytes_and_no_second_charge(federation):
    counting = Counting(federation())
    question = counting.question()
    counting.sites[0]._seed = None  # fresh entropy: a second draw would differ
    first = Pack([counting.sites[0]]).evaluate(question).content.config_records["fl_dpgan"]
    later = counting.site(0)  # a new process
    later._seed = None
    assert Pack([later]).evaluate(question).content.config_records["fl_dpgan"] == first
    assert len(counting.ledger().charges()) == 1
    other = {name: tensor * 2 for name, tensor in load(wire.dump(classifier=Linear())).items()}
    answer, _ = wire.unpack(Pack([later]).evaluate(counting.question(body=save(other))), wire.Answer)
    assert (answer.status, answer.rule, answer.count) == (
        "refused",
        "repeated",
        None,
    )  # another classifier under the same name gets no count
    assert len(counting.ledger().charges()) == 1


def test_a_question_in_a_message_of_another_kind_is_refused_uncharged(federation):
    counting = Counting(federation())
    answer, _ = wire.unpack(Pack([counting.sites[0]]).train(counting.question()), wire.Answer)
    assert (answer.status, answer.rule) == ("refused", "wire")
    assert verify(counting.path()).entries == 1  # the account alone


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invariant_7_weights_that_are_not_finite_are_refused_and_uncharged(federation, value):
    counting = Counting(federation())
    body = save({name: torch.full_like(t, value) for name, t in load(wire.dump(classifier=Linear())).items()})
    answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question(body=body)), wire.Answer)
    assert (answer.status, answer.rule) == ("refused", "wire")
    assert counting.ledger().charges() == []


def test_invariant_7_finite_weights_whose_outputs_overflow_get_a_finite_answer(federation):
    counting = Counting(federation())
    body = save({name: torch.full_like(t, 3e38) for name, t in load(wire.dump(classifier=Linear())).items()})
    answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question(body=body)), wire.Answer)
    assert answer.status == "counted"
    assert abs(answer.count) < 20 + 10 * 2


def test_the_accuracy_in_the_log_is_near_the_truth_for_many_records_and_little_noise(federation):
    counting = Counting(federation(sites=2, rounds=1), right=1500, size=2000, eps_max=1000.0, evaluation_noise=1.0)
    _, _, (record,) = counting.run()
    evaluation = record["evaluation"]
    assert evaluation["noise_sd"] == pytest.approx(0.5 * 2**0.5 / 4000)
    assert evaluation["accuracy"] == pytest.approx(0.75, abs=5 * evaluation["noise_sd"])
    assert evaluation["sites"] == 2


def test_counts_are_asked_for_in_the_rounds_that_the_plan_names(federation):
    counting = Counting(federation(rounds=5), evaluation_every=2)
    _, grid, log = counting.run()
    assert [record["round"] for record in log if "evaluation" in record] == [2, 4]
    assert types(grid).count(MessageType.EVALUATE) == 2 * 2


@pytest.mark.parametrize(("every", "rounds"), [(1, 3), (2, 5)])
def test_invariant_3_the_servers_epsilon_the_ledgers_and_dp_accountings_are_one_and_within_the_budget(
    federation, every, rounds
):
    counting = Counting(federation(rounds=rounds), evaluation_every=every)
    strategy, _, log = counting.run()
    ledger = counting.ledger()
    charged = [charge.event for charge in ledger.charges()]
    assert sum(event.mechanism == "evaluation_count" for event in charged) == rounds // every
    reference = RdpAccountant(orders=[ledger.account.order])
    for event in charged:
        gaussian = GaussianDpEvent(event.noise_multiplier)
        reference.compose(PoissonSampledDpEvent(event.sample_rate, gaussian), event.count)
    assert ledger.epsilon() == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)
    assert strategy.sites["site-0"].epsilon == pytest.approx(ledger.epsilon(), rel=1e-9)
    assert log[-1]["sites"]["site-0"]["epsilon"] == pytest.approx(ledger.epsilon(), rel=1e-9)
    assert 9.9 < ledger.epsilon() <= 10.0  # calibrated to the whole run, counts included
    for record in log:
        shown = [site["epsilon"] for site in record["sites"].values()]
        assert (record["epsilon_min"], record["epsilon_max"]) == (min(shown), max(shown))


def test_a_resumed_run_still_counts_the_counts(federation):
    counting = Counting(federation(rounds=2))
    counting.run()
    counting.plan = counting.plan.model_copy(
        update={"training": counting.plan.training.model_copy(update={"rounds": 3})}
    )
    strategy, _, _ = counting.run()
    # the third round is beyond the calibrated plan: the site withdraws, and nothing is forgotten
    assert strategy.sites["site-0"].epsilon == pytest.approx(counting.ledger().epsilon(), rel=1e-9)
    assert strategy.sites["site-0"].evaluations >= 2


def test_a_plan_that_asks_for_counts_needs_someone_to_train_the_classifier(federation):
    counting = Counting(federation())
    counting.fed.plan = counting.plan
    with pytest.raises(ConfigError, match="train_classifier"):
        counting.fed.strategy()


class Mixing(nn.Module):
    num_classes = 2

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images):
        return (images - images.mean(0)).flatten(1)[:, :2] * self.scale


def test_a_classifier_whose_output_depends_on_other_images_is_refused(federation):
    with pytest.raises(ConfigError, match="depends on another"):
        Counting(federation(), classifier=Mixing)


def telling(counts):
    """Sites that tell these counts instead of theirs, by number."""

    def spoil(answer, number):
        def handle(message):
            reply = answer(message)
            if message.metadata.message_type == MessageType.EVALUATE and number in counts:
                header, tensors = wire.unpack(reply, wire.Answer)
                reply.content = wire.pack(header.model_copy(update={"count": counts[number]}), tensors)
            return reply

        return handle

    return spoil


def outcomes(record):
    return {name: site["status"] for name, site in record["evaluation"]["outcomes"].items()}


@pytest.mark.parametrize("counts", [{0: 1e300, 1: 1e300}, {0: 1.7e308, 1: 1.7e308}, {0: -1e300, 1: 1e300}])
def test_invariant_7_counts_beyond_all_measure_crash_nothing_and_count_for_nothing(federation, counts):
    strategy, _, log = Counting(federation(rounds=2)).run(telling(counts))
    assert [record["round"] for record in log] == [1, 2]
    for number, record in enumerate(log, 1):
        assert outcomes(record) == {"site-0": "left out", "site-1": "left out"}
        assert set(record["evaluation"]) == {"outcomes"}  # no accuracy
        assert all(site["status"] == "trained" for site in record["sites"].values())
        assert "1e+300" in record["evaluation"]["outcomes"]["site-1"]["reason"] or counts[1] != 1e300
        assert record["sites"]["site-0"]["d_steps"] == 2 * number
    assert {site.evaluations for site in strategy.sites.values()} == {2}  # they may have charged them
    assert json.loads(json.dumps(log, allow_nan=False)) == log


def test_a_count_beyond_all_measure_leaves_the_other_sites_accuracy(federation):
    _, _, (record,) = Counting(federation("a", rounds=1)).run(telling({0: 1e300}))
    assert outcomes(record) == {"site-0": "left out", "site-1": "counted"}
    alone = Counting(federation("b", rounds=1))
    del alone.sites[0]
    _, _, (other,) = alone.run()
    for key in ("accuracy", "noise_sd", "sites"):
        assert record["evaluation"][key] == other["evaluation"][key]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_count_is_six_tenths_of_the_declared_size_and_ten_sigma(federation, sign):
    most = 0.6 * 40 + 10 * 4.0
    _, _, (record,) = Counting(federation("a", rounds=1)).run(telling({0: sign * most, 1: 0.0}))
    assert outcomes(record) == {"site-0": "counted", "site-1": "counted"}
    assert record["evaluation"]["accuracy"] == pytest.approx(sign * most / 80 + 0.5)
    _, _, (record,) = Counting(federation("b", rounds=1)).run(telling({0: sign * math.nextafter(most, 99), 1: 0.0}))
    assert outcomes(record) == {"site-0": "left out", "site-1": "counted"}
    assert record["evaluation"]["accuracy"] == 0.5


def test_a_count_is_on_the_grid_of_its_noise(federation):
    counting = Counting(federation())
    counting.sites[0]._seed = None
    for number in range(1, 6):
        answer, _ = wire.unpack(Pack([counting.sites[0]]).evaluate(counting.question(round_number=number)), wire.Answer)
        assert (answer.count * 1024 / 4.0).is_integer()
