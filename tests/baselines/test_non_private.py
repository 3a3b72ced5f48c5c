"""Training without noise and clipping: only simulated sites take part, and nothing shows a budget for it."""

import copy
import json
import math

import pytest
import torch
from conftest import LocalGrid, handler, log
from flwr.app import MessageType
from safetensors.torch import load
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan import cli
from fl_dpgan.baselines.non_private import UnprotectedSite, plain_update
from fl_dpgan.config import Plan, parse_scenario
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.federation import simulation, wire
from fl_dpgan.federation.site import Site
from fl_dpgan.privacy.entries import MAIN
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.report.synthetic import card, run_generator
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.discriminator import draw_fakes
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records


@pytest.fixture
def unprotected(federation):
    """A federation of sites that nothing protects."""

    def make(name="run", **kwargs):
        fed = federation(name, **kwargs)
        plan = fed.plan.model_dump()
        plan["privacy"]["non_private"] = True
        fed.plan = Plan.model_validate(plan)

        def new_site(number, rate=1e-3, data=None):
            return UnprotectedSite(
                f"site-{number}", Records(*(data or fed.data(number))), policy=Policy(declared_size=40),
                models=Models(*fed.networks()), state=state(fed, number), learning_rate=rate, seed=fed.plan.seed,
            )  # fmt: skip

        fed.new_site = new_site
        fed.protected, fed.sites = fed.sites, {n: new_site(n) for n in fed.sites}
        return fed

    return make


def state(fed, number):
    return fed.path / "unprotected" / f"site-{number}.safetensors"


def checkpoint(fed):
    return RunFolder(fed.path).load_checkpoint()[0]


def alike(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def asked(fed, **changes):
    plan = fed.plan.site_plan(40, fed.sites[0].introduction().order)
    request = wire.Request(run="test", round=1, site="site-0", plan=plan).model_copy(update=changes)
    generator, discriminator = fed.networks()
    return request, wire.dump(discriminator=discriminator, generator=generator)


def answered(site, request, tensors):
    header, body = site.answer(request.model_dump_json(), tensors, MessageType.TRAIN)
    return wire.parse(header, wire.Answer), body


def test_invariant_4_a_deployed_site_refuses_a_plan_without_noise_uncharged(unprotected):
    fed = unprotected()
    answer, body = answered(fed.protected[0], *asked(fed))
    assert (answer.status, answer.rule, body) == ("refused", "non_private", b"")
    assert LedgerReader(fed.ledger(0)).charges() == []
    fed.sites = fed.protected
    with pytest.raises(FederationError, match="noise and clipping off"):
        fed.strategy().start(fed.grid())
    assert LedgerReader(fed.ledger(0)).charges() == []


def test_an_unprotected_site_refuses_a_private_plan_and_other_requests(unprotected, federation):
    fed = unprotected()
    request, _ = asked(fed)
    private = request.plan.model_copy(update={"non_private": False})
    assert answered(fed.sites[0], *asked(fed, plan=private))[0].rule == "non_private"
    assert answered(fed.sites[0], *asked(fed, mechanism="moment_release"))[0].rule == "mechanisms"
    assert answered(fed.sites[0], *asked(fed, site="site-1"))[0].rule == "wire"
    assert answered(fed.sites[0], request, b"rubbish")[0].rule == "wire"
    assert not state(fed, 0).exists()


def test_the_update_is_plain_gradient_descent_on_the_same_loss(unprotected):
    fed = unprotected()
    plan = asked(fed)[0].plan.model_copy(update={"d_steps": 1})
    data, (generator, discriminator) = Records(*fed.data(0)), fed.networks()
    before = copy.deepcopy(discriminator)
    plain_update(
        discriminator, generator, torch.optim.SGD(discriminator.parameters(), lr=1.0), data, plan,
        KeyedGenerator.from_seed("plain"),
    )  # fmt: skip
    random = KeyedGenerator.from_seed("plain")
    fakes = draw_fakes(generator, plan.batch_size, random)
    reals = data.batch(plan.sample(data.units, random))
    loss = sum(
        binary_cross_entropy_with_logits(before(image[None], label[None]), torch.tensor([target]))
        for (images, labels), target in ((reals, 1.0), (fakes, 0.0))
        for image, label in zip(images, labels, strict=True)
    ) / (2 * plan.batch_size)
    loss.backward()
    for old, new in zip(before.parameters(), discriminator.parameters(), strict=True):
        torch.testing.assert_close(new, old - old.grad)


def test_a_repeated_request_gets_the_stored_bytes_and_one_with_other_content_none(unprotected):
    fed = unprotected()
    request, tensors = asked(fed)
    first, again = answered(fed.sites[0], request, tensors), answered(fed.new_site(0), request, tensors)
    assert first == again and first[0].status == "trained"
    generator, discriminator = fed.networks()
    changed = {name: tensor + 1 for name, tensor in discriminator.state_dict().items() if tensor.is_floating_point()}
    discriminator.load_state_dict(changed, strict=False)
    other = wire.dump(discriminator=discriminator, generator=generator)
    assert answered(fed.sites[0], request, other)[0].rule == "repeated"
    assert answered(fed.sites[0], request.model_copy(update={"run": "other"}), tensors)[0].rule == "non_private"


def test_a_federation_without_noise_learns_and_shows_that_nothing_is_guaranteed(unprotected):
    fed = unprotected(rounds=6)
    plan = fed.plan.model_dump()
    plan["training"] |= {
        "d_steps": 10,
        "g_learning_rate": 1e-6,
        "d_learning_rate": 5e-3,
    }  # G stands: D's loss must fall
    fed.plan = Plan.model_validate(plan)
    fed.sites = {n: fed.new_site(n, 5e-3) for n in fed.sites}
    seen = []
    strategy = fed.strategy(on_round=seen.append)
    losses = [d_loss(fed, strategy)]
    strategy.start(fed.grid())
    losses.append(d_loss(fed, strategy))
    assert losses[1] < 0.5 * losses[0]
    assert strategy.sites["site-0"].epsilon == math.inf
    assert [record["epsilon_max"] for record in seen] == [math.inf] * 6
    assert "Infinity" not in (fed.path / "rounds.jsonl").read_text()
    assert {record["epsilon_max"] for record in log(fed)} == {None}
    assert {site["epsilon"] for record in log(fed) for site in record["sites"].values()} == {None}
    assert all(not LedgerReader(fed.ledger(n)).charges() for n in fed.protected)


def d_loss(fed, strategy):
    images, labels = (torch.cat(parts) for parts in zip(*(fed.data(n) for n in fed.sites), strict=True))
    made, of = draw_fakes(strategy.average_generator, len(labels), KeyedGenerator.from_seed("loss"))
    with torch.no_grad():
        logits = strategy.discriminator(torch.cat([images, made]), torch.cat([labels, of]))
    targets = torch.cat([torch.ones(len(labels)), torch.zeros(len(of))])
    return float(binary_cross_entropy_with_logits(logits, targets))


def test_a_site_that_moves_between_processes_answers_as_one_that_stays(unprotected):
    stays, moves = unprotected("stays", rounds=3), unprotected("moves", rounds=3)
    stays.strategy().start(stays.grid())
    grid = moves.grid()
    grid.handlers = {n + 10: lambda message, n=n: handler(moves.new_site(n))(message) for n in moves.sites}
    moves.strategy().start(grid)
    assert alike(checkpoint(stays), checkpoint(moves))


def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_not_stopped(unprotected, monkeypatch):
    whole, cut = unprotected("whole", rounds=4), unprotected("cut", rounds=4)
    whole.strategy().start(whole.grid())

    def stop(*args):
        raise KeyboardInterrupt  # after the sites have answered round 3, before its checkpoint

    strategy = cut.strategy(on_round=lambda record: monkeypatch.setattr(
        strategy, "_check_finite", stop if record["round"] == 2 else lambda number: None))  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        strategy.start(cut.grid())
    cut.sites = {n: cut.new_site(n) for n in cut.sites}
    cut.strategy().start(cut.grid())
    assert alike(checkpoint(whole), checkpoint(cut))
    assert [record["round"] for record in log(cut)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "privacy, rest",
    [
        ({"moments": {}}, {"matching": {"rounds": 1}}),
        ({"evaluation_noise": 5.0}, {}),
        ({"update": "image_gradient"}, {"training": {"g_steps": 1}}),
    ],
)
def test_what_would_be_released_besides_is_refused_with_it(privacy, rest):
    with pytest.raises(ConfigError, match="non_private"):
        parse_scenario({"privacy": {"non_private": True, **privacy}, **rest})


# --- the baselines as a user runs them, on Flower's messages but without Ray

TINY = {
    "federation": {"sites": 2, "quorum": 2},
    "data": {"declared_size": 700},
    "model": {"g_width": 2, "d_width": 2, "latent_dim": 4},
    "training": {"rounds": 2, "d_steps": 2, "g_steps": 1, "g_batch_size": 16},
}


@pytest.fixture
def simulated(tmp_path):
    """A simulation's server and its sites in this process."""

    def run(**privacy):
        job = simulation.Job(tmp_path / "run", None)
        scenario = parse_scenario({**TINY, "privacy": {"batch_size": 16, **privacy}})
        simulation.check(scenario, None)
        folder = RunFolder.create(job.out, scenario)
        sites = {n: lambda message, n=n: handler(simulation.simulated_site(job, n))(message) for n in range(2)}
        simulation.serve(job, LocalGrid(sites))
        return job, folder

    return run


def test_a_simulation_without_noise_has_no_ledger_and_says_so_wherever_a_budget_would_stand(simulated, capsys):
    job, folder = simulated(non_private=True)
    assert type(simulation.simulated_site(job, 0)) is UnprotectedSite
    assert not (job.out / "ledgers").exists()
    cli._finish(folder)
    assert "no guarantee: noise and clipping were off" in capsys.readouterr().out
    assert not (job.out / "budgets.json").exists()
    _, meta = run_generator(folder)
    made = card(folder, meta)
    assert made["statement"] == "no guarantee: noise and clipping were off" and made["sites"] == []
    json.dumps(made, allow_nan=False)
    assert [record["epsilon_max"] for record in folder.rounds()] == [None, None]


def test_a_simulation_of_gs_wgan_shows_its_budget_and_what_the_paper_would_claim(simulated, capsys):
    job, folder = simulated(update="image_gradient")
    assert type(simulation.simulated_site(job, 0)) is Site
    cli._finish(folder)
    shown = capsys.readouterr().out
    assert "no guarantee here, where the server knows which site answers" in shown.replace("\n", " ")
    for row in json.loads((job.out / "budgets.json").read_text()):
        assert (row["budget"], row["events"]) == (MAIN, 2) and 9.9 < row["spent"] <= 10
    assert load((job.out / "checkpoint.safetensors").read_bytes())
