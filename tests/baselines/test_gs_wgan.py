"""GS-WGAN: what leaves a site is a charged Gaussian mechanism, the critic stays, and one round is one G step."""

import math
import stat
from contextlib import closing

import pytest
import torch
from conftest import charges, handler, log
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from flwr.app import Message, MessageType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from fl_dpgan.baselines import kept
from fl_dpgan.baselines.gs_wgan import (
    clipped_gradients,
    critic_loss,
    critic_steps,
    noise_sd,
    noised,
    paper_epsilon,
    sanitised_gradient,
)
from fl_dpgan.config import Plan, parse_scenario
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.federation import simulation, wire
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation.gs_wgan import GSWGAN
from fl_dpgan.privacy.accountant import Event, calibrate, epsilon
from fl_dpgan.privacy.clipping import Automatic, EpsilonAdaptive, Fixed
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import GeneratorTrainer
from fl_dpgan.training.records import Records
from tests.privacy.gaussian import assert_standard, assert_unrelated

GRADIENTS = ("image_gradient",)
B = 4


class Scores(nn.Module):
    """A critic whose gradient with respect to each image differs: a quadratic form of it."""

    def __init__(self, scale=1.0, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2, 784, generator=random) * scale)

    def forward(self, images, labels):
        flat = images.flatten(1)
        return (flat * self.weight[labels]).sum(1) + 0.1 * (flat**2).sum(1) * self.weight[labels].mean(1)


@pytest.fixture
def gradients(federation):
    """A federation of GS-WGAN: its plan, its sites and its strategy."""

    def make(name="run", *, eps_max=10.0, **kwargs):
        fed = federation(name, **kwargs)
        plan = fed.plan.model_dump()
        plan["privacy"]["update"] = "image_gradient"
        fed.plan = Plan.model_validate(plan)
        fed.new_site = lambda n, **terms: fed.site(n, **({"mechanisms": GRADIENTS, "eps_max": eps_max} | terms))
        fed.sites = {n: fed.new_site(n) for n in fed.sites}

        def strategy(**options):
            fed.path.mkdir(parents=True, exist_ok=True)
            return GSWGAN(fed.plan, *fed.networks(), folder=RunFolder(fed.path), run="test", **options)

        fed.strategy = strategy
        return fed

    return make


def critic_files(fed):
    return sorted(fed.ledger(0).parent.glob("*.critic-*"))


def checkpoint(fed):
    return RunFolder(fed.path).load_checkpoint()[0]


def alike(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def fakes(count=B, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=random) * 2 - 1, torch.arange(count) % 2


def asked(fed, number=0, **changes):
    plan = fed.plan.site_plan(40, fed.sites[number].introduction().order)
    fields = {"run": "test", "round": 1, "site": f"site-{number}", "plan": plan, "mechanism": "image_gradient"}
    return wire.Request(**(fields | changes))


def sent(**changes):
    images, labels = fakes()
    return save({"images": images, "labels": labels} | changes)


def answered(site, request, tensors=None):
    header, body = site.answer(request.model_dump_json(), sent() if tensors is None else tensors, MessageType.TRAIN)
    return wire.parse(header, wire.Answer), body


# --- the site's maths


@pytest.mark.parametrize("rule", [Fixed(c=0.7), Automatic(c=0.7), EpsilonAdaptive(c_max=0.7)])
def test_the_clipped_gradients_are_autograds_image_by_image_clipped_by_hand(rule):
    critic, (images, labels) = Scores(scale=0.02), fakes()
    images[1] *= 0.01
    found = clipped_gradients(critic, images, labels, 0.7, rule)
    for i in range(B):
        point = images[i : i + 1].clone().requires_grad_()
        (-critic(point, labels[i : i + 1])).sum().backward()
        norm = float(point.grad.norm())
        factor = 0.7 / (norm + 0.01) if rule.rule == "automatic" else min(1.0, 0.7 / norm)
        torch.testing.assert_close(found[i].float(), point.grad[0] * factor)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
@settings(max_examples=25, deadline=None)
def test_two_arbitrary_critics_move_the_clipped_batch_by_at_most_the_sensitivity(seed, one, other):
    images, labels = fakes()
    rows = [
        clipped_gradients(Scores(scale, s), images, labels, 0.5, Fixed(c=0.5)) for scale, s in ((one, seed), (other, 1))
    ]
    assert float((rows[0] - rows[1]).norm()) <= noise_sd(1.0, 0.5, B) * (1 + 1e-9)


def test_opposite_critics_reach_the_sensitivity():
    critic, opposite = Scores(scale=100.0), Scores(scale=-100.0)
    rows = [clipped_gradients(c, *fakes(), 0.5, Fixed(c=0.5)) for c in (critic, opposite)]
    assert float((rows[0] - rows[1]).norm()) == pytest.approx(2 * 0.5 * math.sqrt(B)) == noise_sd(1.0, 0.5, B)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_invariant_7_gradients_that_are_not_finite_count_as_zero(value):
    critic = Scores()
    with torch.no_grad():
        critic.weight[1] = value
    found = clipped_gradients(critic, *fakes(), 0.5, Fixed(c=0.5))
    assert found.isfinite().all()
    assert not found[1::2].any() and found[::2].any()


def test_the_noise_has_the_standard_deviation_of_the_event_and_lies_on_a_grid():
    plan = SitePlan.derive(
        PrivacyConfig(batch_size=B, noise_multiplier=1.5, clipping=EpsilonAdaptive(c_max=0.5), update="image_gradient"),
        declared_size=40, d_steps=1, rounds=1,
    )  # fmt: skip
    critic, random = Scores(scale=0.0), KeyedGenerator.from_seed("noise")
    draws = torch.stack([sanitised_gradient(critic, *fakes(), plan, random) for _ in range(40)])
    sd = 1.5 * 2 * 0.5 * math.sqrt(B)
    assert float(draws.double().std()) == pytest.approx(sd, rel=0.01)
    assert float(draws.double().mean()) == pytest.approx(0.0, abs=5 * sd / math.sqrt(draws.numel()))
    grid = 2.0 ** math.floor(math.log2(sd / 1024))
    assert torch.equal((draws / grid).round() * grid, draws)


def test_the_noise_is_added_to_the_clipped_gradient():
    clipped = torch.full((B, 1, 28, 28), 3.0, dtype=torch.float64)
    assert float(noised(clipped, 0.01, KeyedGenerator.from_seed(0)).mean()) == pytest.approx(3.0, abs=1e-3)


def test_the_noise_of_image_gradients_is_gaussian_and_unrelated_between_images_and_releases():
    size, releases, error = 160, 8, 1e-4  # the error rate of a correct mechanism over the choice of the key, in each
    privacy = PrivacyConfig(batch_size=size, noise_multiplier=1.5, clipping=Fixed(c=0.3), update="image_gradient")
    plan = SitePlan.derive(privacy, declared_size=size, d_steps=1, rounds=1)
    critic, (images, labels), random = Scores(scale=0.02), fakes(size), KeyedGenerator.from_seed("gradients")
    exact = clipped_gradients(critic, images, labels, 0.3, plan.clipping)
    found = torch.stack([sanitised_gradient(critic, images, labels, plan, random) for _ in range(releases)])
    noise = ((found.double() - exact) / (1.5 * 2 * 0.3 * math.sqrt(size))).flatten(1).numpy()
    assert noise.size > 10**6
    assert_standard(noise, error)
    assert_unrelated(noise, error)


def test_the_critics_loss_is_that_of_wgan_with_gradient_penalty():
    critic, reals, made = Scores(scale=0.02), fakes(seed=2), fakes(seed=3)
    shares = torch.tensor([0.1, 0.4, 0.6, 0.9])
    penalty = 0.0
    for i, share in enumerate(shares):
        point = (share * reals[0][i] + (1 - share) * made[0][i])[None].requires_grad_()
        label = reals[1][i] if share > 0.5 else made[1][i]
        (slope,) = torch.autograd.grad(critic(point, label[None]).sum(), point)
        penalty += 10 * (float(slope.norm()) - 1) ** 2 / B
    by_hand = float(critic(*made).mean() - critic(*reals).mean()) + penalty
    assert float(critic_loss(critic, reals, made, shares)) == pytest.approx(by_hand, rel=1e-5)


def test_the_critic_learns_to_tell_reals_from_fakes(federation):
    _, critic = federation().networks()
    y = torch.linspace(-1, 1, 28)[:, None].expand(28, 28)
    data = Records(y.repeat(40, 1, 1, 1), torch.arange(40) % 2)
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_steps(critic, optimizer, data, fakes(), 40, KeyedGenerator.from_seed("critic"))
    with torch.no_grad():
        assert critic(data.images[:B], data.labels[:B]).mean() > critic(*fakes()).mean() + 1


# --- the accounting


def test_invariants_1_and_3_a_round_is_one_charged_event_and_the_whole_run_fits(gradients):
    fed = gradients(rounds=3)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    plan = fed.plan.site_plan(40, fed.sites[0].introduction().order)
    assert charges(fed) == [Event(1.0, plan.noise_multiplier, 1, "image_gradient")] * 3
    spent = epsilon(charges(fed), plan.order, plan.delta)
    assert 9.9 < spent <= 10.0
    assert strategy.sites["site-0"].epsilon == pytest.approx(spent, rel=1e-9)
    reference = RdpAccountant(orders=[plan.order])
    reference.compose(GaussianDpEvent(plan.noise_multiplier), 3)
    assert spent == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)
    assert [record["epsilon_max"] for record in log(fed)][-1] == pytest.approx(spent)


def test_the_papers_noise_would_cost_what_research_says():
    sigma = 1.07 / (2 * math.sqrt(32))  # in units of the sensitivity 2 C sqrt(B)
    one, many = RdpAccountant(), RdpAccountant()
    one.compose(GaussianDpEvent(sigma))
    assert one.get_epsilon(1e-5) == pytest.approx(105, abs=0.5)
    assert min(epsilon([Event(1.0, sigma, 1)], order, 1e-5) for order in range(2, 64)) >= one.get_epsilon(1e-5)
    many.compose(GaussianDpEvent(268 / (2 * math.sqrt(32))), 2000)
    assert many.get_epsilon(1e-5) == pytest.approx(10, abs=0.05)
    ours = calibrate(eps_max=10, delta=1e-5, sample_rate=1.0, steps=2000) * 2 * math.sqrt(32)
    assert 268 <= ours <= 1.02 * 268  # whole orders cost a little


def test_the_papers_own_accounting_claims_far_less_than_a_federation_can():
    privacy = PrivacyConfig(batch_size=32, noise_multiplier=0.1, eps_max=1000, update="image_gradient")
    plan = SitePlan.derive(privacy, declared_size=60, d_steps=5, rounds=2000)
    claimed = paper_epsilon(plan, 1000)
    reference = RdpAccountant(orders=list(range(2, 64)))
    step = PoissonSampledDpEvent(1 / 1000, GaussianDpEvent(0.1 * 2 * math.sqrt(32)))
    reference.compose(step, 32 * 2000)
    assert claimed == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)
    assert claimed < 10 and plan.epsilon_after(2000) > 1e5


# --- the site


def test_invariant_1_the_critic_stays_in_a_file_that_only_its_owner_reads_and_never_in_the_ledger(gradients):
    fed = gradients(sites=1)
    _, body = answered(fed.sites[0], asked(fed))
    (file,) = critic_files(fed)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ledger = b"".join(part.read_bytes() for part in fed.ledger(0).parent.glob("*.sqlite*"))
    tensors, _ = kept.read(file)
    weights = {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if tensor.numel() > 8}
    assert weights and any("optimizer" in name for name in weights)
    for content in weights.values():
        parts = [content[at : at + 32] for at in range(0, len(content), 32)]  # a page of the file may end anywhere
        assert not any(part in ledger or part in body for part in parts if any(part))
    assert body[-32:] in ledger  # so would the others be, were they there
    with closing(Ledger(fed.ledger(0))) as opened:
        assert opened.last_answer("test", "image_gradient").state == b""


def test_each_run_and_budget_has_a_critic_of_its_own(tmp_path):
    ledger = tmp_path / "site.sqlite"
    names = {kept.beside(ledger, run, budget) for run in ("a", "..") for budget in ("main", "b")}
    assert len(names) == 4 and {name.parent for name in names} == {tmp_path}


def test_invariant_2_a_repeated_request_gets_the_stored_bytes_and_costs_nothing(gradients):
    fed = gradients()
    first, again = answered(fed.sites[0], asked(fed)), answered(fed.new_site(0), asked(fed))
    assert first == again and first[0].status == "released"
    assert len(charges(fed)) == 1
    assert answered(fed.sites[0], asked(fed), sent(labels=torch.ones(B, dtype=torch.int64)))[0].rule == "repeated"


def test_invariant_2_a_site_that_stops_before_its_answer_stays_charged_and_ends_like_one_that_does_not(
    gradients, monkeypatch
):
    whole, cut = gradients("whole"), gradients("cut")
    with monkeypatch.context() as patch:
        patch.setattr(site_module, "sanitised_gradient", lambda *a: 1 / 0)
        assert answered(cut.sites[0], asked(cut))[0].status == "failed"
    assert len(charges(cut)) == 1
    bodies = [answered(fed.new_site(0), asked(fed))[1] for fed in (whole, cut)]
    assert bodies[0] == bodies[1]
    assert len(charges(cut)) == 2
    assert [f.read_bytes() for f in critic_files(whole)] == [f.read_bytes() for f in critic_files(cut)]


def test_a_site_that_moves_between_processes_answers_as_one_that_stays(gradients):
    stays, moves = gradients("stays", rounds=3), gradients("moves", rounds=3)
    stays.strategy().start(stays.grid())
    grid = moves.grid()
    grid.handlers = {n + 10: lambda message, n=n: handler(moves.new_site(n))(message) for n in moves.sites}
    moves.strategy().start(grid)
    assert alike(checkpoint(stays), checkpoint(moves))


@pytest.mark.parametrize(
    "tensors",
    [
        sent(images=torch.zeros(B + 1, 1, 28, 28)),
        sent(images=torch.zeros(B, 1, 32, 32)),
        sent(images=torch.full((B, 1, 28, 28), float("nan"))),
        sent(images=torch.full((B, 1, 28, 28), 1.5)),
        sent(images=torch.zeros(B, 1, 28, 28, dtype=torch.float64)),
        sent(labels=torch.full((B,), 2)),
        sent(labels=torch.full((B,), -1)),
        sent(more=torch.zeros(1)),
        b"rubbish",
        b"",
    ],
    ids=["count", "shape", "nan", "range", "type", "label", "negative", "extra", "rubbish", "nothing"],
)
def test_invariant_9_images_that_do_not_fit_are_refused_uncharged(gradients, tensors):
    fed = gradients()
    answer, body = answered(fed.sites[0], asked(fed), tensors)
    assert (answer.status, answer.rule, body) == ("refused", "wire", b"")
    assert charges(fed) == [] and critic_files(fed) == []


def test_invariant_4_a_site_whose_policy_does_not_name_the_gradients_refuses_them_uncharged(gradients):
    fed = gradients()
    fed.sites = {n: fed.site(n) for n in fed.sites}
    with pytest.raises(FederationError, match="image_gradient may not leave this site"):
        fed.strategy().start(fed.grid())
    assert charges(fed) == []


def test_invariant_7_a_record_that_overflows_changes_neither_whether_nor_how_a_site_answers(gradients):
    outcomes = []
    for name, value in (("plain", 0.5), ("huge", 3e38)):
        fed = gradients(name)
        images, labels = fed.data(0)
        images[:] = value
        answer, body = answered(fed.new_site(0, data=(images, labels)), asked(fed))
        gradient = load(body)["gradient"]
        outcomes.append((answer.status, gradient.shape, gradient.dtype, bool(gradient.isfinite().all())))
    assert outcomes[0] == outcomes[1] == ("released", (B, 1, 28, 28), torch.float32, True)


# --- the server


def test_a_preview_shows_the_images_of_the_next_step_and_moves_nothing(federation):
    trainer = GeneratorTrainer(federation().networks()[0], ema_decay=0.9)
    before = {name: tensor.clone() for name, tensor in trainer.generator.state_dict().items()}
    images, labels = trainer.preview(batch_size=B, seed=5)
    assert alike(before, trainer.generator.state_dict())
    seen = []

    def loss(drawn, of):
        seen.append((drawn.detach().clone(), of))
        return drawn.sum()

    trainer.update(loss, [1e-3], batch_size=B, seed=5)
    assert torch.equal(seen[0][0], images) and torch.equal(seen[0][1], labels)


def test_a_round_is_one_step_of_g_along_the_mean_of_the_gradients(gradients):
    fed = gradients(rounds=1)
    grid, strategy = fed.grid(), fed.strategy()
    reference = GeneratorTrainer(fed.networks()[0], ema_decay=fed.plan.training.ema_decay)
    strategy.start(grid)
    plan = fed.plan.site_plan(40, fed.sites[0].introduction().order)
    bodies = []
    for n in fed.sites:
        with closing(Ledger(fed.ledger(n))) as ledger:
            bodies.append(load(ledger.last_answer("test", "image_gradient").body)["gradient"])
    mean = (bodies[0].double() + bodies[1].double()) / 2
    assert plan.steps_a_round == 1
    reference.update(
        lambda images, labels: (images * mean.float()).sum() / B, [fed.plan.training.g_learning_rate], batch_size=B,
        seed=strategy.plan.round_seed(1),
    )  # fmt: skip
    for name, tensor in reference.generator.state_dict().items():
        torch.testing.assert_close(strategy._trainer.generator.state_dict()[name], tensor)


def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_not_stopped(gradients):
    whole, cut = gradients("whole", rounds=4), gradients("cut", rounds=4)
    whole.strategy().start(whole.grid())

    class StopError(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise StopError

    with pytest.raises(StopError):
        cut.strategy(on_round=stop).start(cut.grid())
    cut.sites = {n: cut.new_site(n) for n in cut.sites}
    cut.strategy().start(cut.grid())
    assert alike(checkpoint(whole), checkpoint(cut))
    assert [record["round"] for record in log(cut)] == [1, 2, 3, 4]
    assert len(charges(cut)) == 4


@pytest.mark.parametrize("fault", ["huge", "nan", "shape", "name", "rubbish", "silent"])
def test_gradients_that_no_honest_site_can_have_are_left_out_and_stay_charged(gradients, fault):
    fed = gradients(rounds=1)
    grid = fed.grid()
    honest = grid.handlers[10]

    def spoil(message: Message) -> Message | None:
        reply = honest(message)
        if message.metadata.message_type != MessageType.TRAIN:
            return reply
        if fault == "silent":
            return None
        ((header, body),) = wire.unpack_parts(reply)
        gradient = load(body)["gradient"]
        spoiled = {
            "huge": {"gradient": gradient * 1e4}, "nan": {"gradient": gradient * float("nan")},
            "shape": {"gradient": gradient[1:].contiguous()}, "name": {"other": gradient}, "rubbish": {},
        }[fault]  # fmt: skip
        return Message(
            wire.pack_parts([(header, b"rubbish" if fault == "rubbish" else save(spoiled))]), reply_to=message
        )

    grid.handlers[10] = spoil
    fed.strategy().start(grid)
    ((record),) = log(fed)
    sites = record["sites"]
    assert sites["site-0"]["status"] == ("silent" if fault == "silent" else "left out")
    assert sites["site-1"]["status"] == "released"
    assert sites["site-0"]["epsilon"] == sites["site-1"]["epsilon"] > 0

    without = gradients("without", rounds=1)
    alone = without.grid()
    alone.handlers[10] = lambda m: handler(without.sites[0])(m) if m.metadata.message_type == "query" else None
    without.strategy().start(alone)
    assert alike(checkpoint(fed), checkpoint(without))


def test_a_spent_site_withdraws_and_the_run_stops_below_the_quorum(gradients):
    fed = gradients(rounds=3)
    fed.sites = {0: fed.new_site(0, eps_max=8.0), 1: fed.new_site(1, eps_max=0.5)}
    fed.strategy().start(fed.grid())
    first, *_, last = log(fed)
    assert first["sites"]["site-1"]["status"] == "withdrawn" and first["sites"]["site-1"]["epsilon"] == 0
    assert first["sites"]["site-0"]["status"] == "released"
    assert "fewer than the quorum" in last["stopped"]


def test_several_steps_of_g_a_round_are_refused(gradients):
    fed = gradients()
    fed.plan = Plan.model_validate(fed.plan.model_dump() | {"training": {"g_steps": 2}})
    with pytest.raises(ConfigError, match=r"training\.g_steps = 2"):
        fed.strategy()
    scenario = parse_scenario({"privacy": {"update": "image_gradient"}, "training": {"g_steps": 2}})
    with pytest.raises(ConfigError, match=r"training\.g_steps = 2"):
        simulation.check(scenario, None)


def test_a_simulated_sites_policy_names_the_mechanisms_that_its_scenario_asks_for():
    for privacy, rest, named in (
        ({}, {}, {"discriminator_update"}),
        ({"evaluation_noise": 5.0}, {}, {"discriminator_update", "evaluation_count"}),
        ({"update": "image_gradient"}, {"training": {"g_steps": 1}}, {"image_gradient"}),
        ({"moments": {}}, {"matching": {"rounds": 1}}, {"discriminator_update", "moment_release"}),
        ({"moments": {}}, {"matching": {"rounds": 1}, "training": {"rounds": 0}}, {"moment_release"}),
    ):
        scenario = parse_scenario({"privacy": privacy, **rest})
        assert set(simulation.policy(scenario, 0).mechanisms) == named
