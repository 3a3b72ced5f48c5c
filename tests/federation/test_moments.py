import pytest
import torch
from conftest import charges, log
from flwr.app import Message, MessageType
from safetensors.torch import load, save

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.federation import wire
from fl_dpgan.privacy.accountant import Event, calibrate, epsilon
from fl_dpgan.runs import RunFolder

MOMENTS = {"features": {"parts": [{"kind": "fourier", "count": 20}, {"kind": "wavelets", "count": 20, "side": 2}]}}
ASKED = ("discriminator_update", "moment_release")


@pytest.fixture
def matching(federation):
    """A federation of two sites whose runs begin with a moment release."""

    def make(name="run", *, rounds=2, weight=0.5, mechanisms=ASKED, **kwargs):
        fed = federation(name, **kwargs)
        plan = fed.plan.model_dump()
        plan["privacy"]["moments"] = MOMENTS | {"share": 0.1}
        plan["matching"] = {"rounds": 3, "g_steps": 2, "batch_size": 6, "weight": weight if rounds else 0.0}
        plan["training"]["rounds"] = rounds
        fed.plan = Plan.model_validate(plan)
        fed.sites = {n: fed.site(n, mechanisms=mechanisms) for n in fed.sites}
        return fed

    return make


def asked(fed, number=0, **changes):
    plan = fed.plan.site_plan(40, fed.sites[number].introduction().order)
    fields = {"run": "test", "round": 1, "site": f"site-{number}", "plan": plan, "mechanism": "moment_release"}
    return wire.Request(**(fields | changes))


def answered(fed, request, tensors=b"", number=0, carrier=MessageType.TRAIN):
    header, body = fed.sites[number].answer(request.model_dump_json(), tensors, carrier)
    return wire.parse(header, wire.Answer), body


def test_invariants_1_and_3_the_release_is_one_charged_event_and_counts_in_every_epsilon(matching):
    fed = matching()
    fed.strategy().start(fed.grid())
    plan = fed.plan.site_plan(40, fed.sites[0].introduction().order)
    events = charges(fed)
    assert [e.mechanism for e in events] == ["moment_release", "discriminator_update", "discriminator_update"]
    assert events[0] == Event(1.0, plan.moment_noise, 1, "moment_release")
    for record, seen in zip([r for r in log(fed) if r["round"] in (0, 3, 4, 5)], (1, 1, 2, 3), strict=True):
        assert record["sites"]["site-0"]["epsilon"] == pytest.approx(epsilon(events[:seen], plan.order, plan.delta))


def test_the_whole_run_fits_its_share_with_the_release_in_it():
    plan = Plan.model_validate({"privacy": {"moments": MOMENTS | {"share": 0.1}}, "matching": {"rounds": 1}}).site_plan(
        6000
    )
    release = Event(1.0, plan.moment_noise, 1, "moment_release")
    assert min(epsilon([release], order, 1e-5) for order in range(2, 64)) == pytest.approx(1.0, abs=2e-3)
    assert epsilon(plan.whole_run, plan.order, 1e-5) == pytest.approx(10.0, abs=2e-3)
    assert plan.noise_multiplier > calibrate(eps_max=10.0, delta=1e-5, sample_rate=64 / 6000, steps=150)


def test_a_run_of_moments_alone_spends_its_share_on_them_and_asks_for_nothing_else(matching):
    fed = matching(rounds=0)
    grid = fed.grid()
    fed.strategy().start(grid)
    assert [e.mechanism for e in charges(fed)] == ["moment_release"]
    assert len(grid.sent) == 4  # an introduction and a release of two sites
    assert [record["round"] for record in log(fed)] == [0, 1, 2, 3]
    assert log(fed)[-1]["epsilon_max"] == pytest.approx(10.0, abs=0.05)


def test_the_generator_learns_the_sites_classes_from_the_moments_alone(matching):
    fed = matching(rounds=0)
    plan = fed.plan.model_dump()
    plan["privacy"] |= {
        "eps_max": 1000.0,
        "moments": {"features": {"parts": [{"kind": "fourier", "count": 1000, "scales": [300.0]}]}},
    }
    plan["matching"] |= {"rounds": 4, "g_steps": 60, "batch_size": 16, "learning_rate": 1e-2}
    fed.plan = Plan.model_validate(plan)
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    disc = ((x - 14) ** 2 + (y - 14) ** 2 < 60).float() * 2 - 1  # a bright disc, and in the other class its negative
    for number, path in [(n, fed.ledger(n)) for n in fed.sites]:
        path.unlink()
        labels = torch.arange(40) % 2
        data = torch.stack([disc if label else -disc for label in labels])[:, None], labels
        fed.sites[number] = fed.site(number, data=data, mechanisms=ASKED, eps_max=1000.0, eps_per_run=1000.0)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    with torch.no_grad():
        drawn = strategy._trainer.generator.eval()(torch.randn(20, 4), torch.arange(20) % 2)[:, 0]
    agreement = (drawn * disc).mean(dim=(1, 2))
    assert float(agreement[1::2].mean()) > 0.3 and float(agreement[::2].mean()) < -0.3


def test_a_resumed_run_asks_for_no_second_release_and_ends_bit_for_bit_the_same(matching):
    whole, cut = matching("whole"), matching("cut")
    whole.strategy().start(whole.grid())

    class StopError(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise StopError

    with pytest.raises(StopError):
        cut.strategy(on_round=stop).start(cut.grid())
    cut.strategy().start(cut.grid())
    assert [e.mechanism for e in charges(cut)].count("moment_release") == 1
    (a, _), (b, _) = RunFolder(whole.path).load_checkpoint(), RunFolder(cut.path).load_checkpoint()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_invariant_2_a_repeated_request_gets_the_stored_bytes_and_costs_nothing(matching):
    fed = matching()
    first, again = (answered(fed, asked(fed)) for _ in range(2))
    assert first == again and first[0].status == "released"
    assert len(charges(fed)) == 1


def test_invariant_4_a_site_whose_policy_does_not_name_the_release_refuses_it_uncharged(matching):
    fed = matching(mechanisms=("discriminator_update",))
    with pytest.raises(FederationError, match="moment_release may not leave this site"):
        fed.strategy().start(fed.grid())
    assert charges(fed) == []


@pytest.mark.parametrize(
    "changes, tensors, carrier, rule",
    [
        ({}, save({"x": torch.zeros(1)}), MessageType.TRAIN, "wire"),
        ({}, b"", MessageType.EVALUATE, "wire"),
        ({"mechanism": "image_gradient"}, b"", MessageType.TRAIN, "mechanisms"),
    ],
)
def test_invariant_4_a_request_for_something_else_is_refused_uncharged(matching, changes, tensors, carrier, rule):
    fed = matching()
    answer, body = answered(fed, asked(fed, **changes), tensors, carrier=carrier)
    assert (answer.status, answer.rule, body) == ("refused", rule, b"")
    assert charges(fed) == []


def test_invariant_4_too_little_noise_for_the_policy_is_refused(matching):
    fed = matching()
    request = asked(fed)
    weak = request.plan.model_copy(update={"moment_noise": 0.2})
    fed.sites[0] = fed.site(0, mechanisms=ASKED, least_noise_multiplier=0.5)
    answer, _ = answered(fed, request.model_copy(update={"plan": weak}))
    assert (answer.status, answer.rule) == ("refused", "least_noise_multiplier")


@pytest.mark.parametrize("fault", ["huge", "nan", "shape", "name", "rubbish"])
def test_sums_that_no_honest_site_can_have_are_left_out_and_the_run_goes_on(matching, fault):
    fed = matching()
    grid = fed.grid()
    honest = grid.handlers[10]

    def spoil(message: Message) -> Message | None:
        reply = honest(message)
        if reply is None or message.metadata.message_type != MessageType.TRAIN:
            return reply
        ((header, body),) = wire.unpack_parts(reply)
        if wire.parse(header, wire.Answer).status != "released":
            return reply
        sums = load(body)["sums"]
        spoiled = {
            "huge": {"sums": sums * 1e9}, "nan": {"sums": sums * float("nan")}, "shape": {"sums": sums[:, 1:]},
            "name": {"other": sums}, "rubbish": {},
        }[fault]  # fmt: skip
        return Message(wire.pack_parts([(header, b"rubbish" if fault == "rubbish" else save(
            {key: value.contiguous() for key, value in spoiled.items()}))]), reply_to=message)  # fmt: skip

    grid.handlers[10] = spoil
    fed.strategy().start(grid)
    first = log(fed)[0]["sites"]
    assert first["site-0"]["status"] == "left out" and first["site-1"]["status"] == "released"
    assert first["site-0"]["epsilon"] > 0  # charged all the same


def test_a_release_without_a_use_or_a_use_without_a_release_is_refused():
    for raw in (
        {"privacy": {"moments": MOMENTS | {"share": 0.1}}},
        {"matching": {"rounds": 3}},
        {"matching": {"weight": 1.0}},
    ):
        with pytest.raises(ValueError, match="go together"):
            Plan.model_validate(raw)
    with pytest.raises(ConfigError, match="does nothing"):
        Plan.model_validate({"training": {"rounds": 0}}).site_plan(6000)


class KilledError(Exception):
    pass


def killed(*_, **__):
    raise KilledError


def test_a_run_killed_between_the_release_and_the_first_round_goes_on_without_another(matching):
    whole, cut = matching("whole"), matching("cut")
    whole.strategy().start(whole.grid())
    strategy = cut.strategy()
    strategy._match = killed
    with pytest.raises(KilledError):
        strategy.start(cut.grid())
    cut.strategy().start(cut.grid())
    assert charges(cut) == charges(whole)
    assert [record["round"] for record in log(cut)] == [0, 1, 2, 3, 4, 5]
    (a, _), (b, _) = RunFolder(whole.path).load_checkpoint(), RunFolder(cut.path).load_checkpoint()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_invariant_2_a_run_killed_before_it_kept_the_release_gets_the_same_bytes_again(matching):
    whole, cut = matching("whole"), matching("cut")
    whole.strategy().start(whole.grid())
    strategy = cut.strategy()
    strategy._checkpoint = killed
    with pytest.raises(KilledError):
        strategy.start(cut.grid())
    cut.strategy().start(cut.grid())
    assert charges(cut) == charges(whole)
    (a, _), (b, _) = RunFolder(whole.path).load_checkpoint(), RunFolder(cut.path).load_checkpoint()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_quorum_that_comes_back_after_a_failed_release_goes_on_with_what_was_released(matching):
    fed = matching(quorum=2)
    grid = fed.grid()
    silent = grid.handlers[11]
    grid.handlers[11] = lambda m: None if m.metadata.message_type == MessageType.TRAIN else silent(m)
    with pytest.raises(FederationError, match="fewer answers than the quorum"):
        fed.strategy().start(grid)
    fed.strategy().start(fed.grid())
    assert [e.mechanism for e in charges(fed)].count("moment_release") == 1
    assert log(fed)[-1]["round"] == 5


def test_sites_without_budget_for_the_release_withdraw_and_the_run_ends_saying_so(matching):
    fed = matching()
    for number in fed.sites:
        fed.ledger(number).unlink()
        fed.sites[number] = fed.site(number, mechanisms=ASKED, eps_max=0.3)
    fed.strategy().start(fed.grid())
    assert "fewer than the quorum" in log(fed)[-1]["stopped"]
    assert log(fed)[-1]["sites"]["site-0"]["status"] == "withdrawn" and charges(fed) == []
