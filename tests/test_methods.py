"""A scenario's methods: one key chooses, what it changes goes over the file, and every one runs from end to end."""

from contextlib import closing

import pytest
import torch
from conftest import LocalGrid, handler

from fl_dpgan.config import load_scenario
from fl_dpgan.errors import ConfigError
from fl_dpgan.federation.simulation import Job, serve, simulated_site
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.report.synthetic import run_generator
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import draw

FILE = """
name = "own"
method = "a"
[data]
declared_size = 100
[privacy]
batch_size = 10
clipping = { rule = "epsilon_adaptive", c_min = 0.5, c_max = 1.5, gamma = 1.0 }
[methods.a]
training = { rounds = 7 }
[methods.b]
privacy.clipping = { rule = "fixed", c = 2.0 }
training.d_steps = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(FILE)
    return str(path)


def test_the_files_own_method_is_taken_where_none_is_named(file):
    found = load_scenario(file)
    assert (found.method, found.training.rounds, found.privacy.clipping.rule) == ("a", 7, "epsilon_adaptive")


def test_another_method_replaces_what_it_names_and_leaves_the_rest(file):
    found = load_scenario(file, ["method=b"])
    assert (found.method, found.training.rounds, found.training.d_steps) == ("b", 30, 3)
    assert found.privacy.clipping.model_dump() == {"rule": "fixed", "c": 2.0}
    assert found.privacy.batch_size == 10


def test_other_overrides_come_last_wherever_they_stand(file):
    assert load_scenario(file, ["training.d_steps=4", "method=b"]).training.d_steps == 4


@pytest.mark.parametrize("method", ["c", "A", "3"])
def test_a_method_that_the_file_does_not_hold_is_named_with_those_that_it_does(file, method):
    with pytest.raises(ConfigError, match="choose one of a, b"):
        load_scenario(file, [f"method={method}"])


def test_an_unknown_key_within_a_method_is_refused(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(FILE + "\n[methods.c]\ntraining.round = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key 'training\.round'"):
        load_scenario(str(path), ["method=c"])


METHODS = ("fl-dpgan", "dp-dcgan", "moments", "dp-merf", "dp-sgd-gan", "gs-wgan", "non-private")


@pytest.mark.parametrize("scenario", ["digits", "mnist", "fashion-mnist"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_a_shipped_scenario_is_a_plan_that_fits(scenario, method):
    found = load_scenario(scenario, [f"method={method}"])
    plan = found.site_plan(found.declared_size(0))
    spent = plan.epsilon_after(plan.steps_a_round * plan.rounds, releases=int(plan.moments is not None))
    assert spent <= found.privacy.eps_max or found.privacy.non_private


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_the_digits_and_is_charged_for_what_it_asks(method, tmp_path):
    small = ["matching.rounds=1", "matching.g_steps=2", "matching.batch_size=20", "training.d_steps=1",
             "training.g_steps=1"]  # fmt: skip
    released = method in ("fl-dpgan", "moments", "dp-merf")
    trained = method not in ("moments", "dp-merf")
    settings = [*(small if released else small[3:]), *(["training.rounds=1"] if trained else [])]
    scenario = load_scenario("digits", [f"method={method}", *settings])
    folder = RunFolder.create(tmp_path / "run", scenario)
    job = Job(folder.path, None)
    serve(job, LocalGrid({n: lambda message, n=n: handler(simulated_site(job, n))(message) for n in range(3)}))
    last = list(folder.rounds())[-1]
    assert last["round"] == scenario.all_rounds
    generator, _ = run_generator(folder)
    images = draw(generator, torch.arange(10), seed=0)
    assert images.shape == (10, 1, 28, 28) and float(images.std()) > 0
    if method == "non-private":
        assert last["epsilon_max"] is None and not (folder.path / "ledgers").exists()
        return
    charged = {"gs-wgan": "image_gradient"}.get(method, "discriminator_update")
    expected = ["moment_release"] * released + [charged] * trained
    for n in range(3):
        with closing(LedgerReader(folder.ledger(f"site-{n}"))) as ledger:
            assert [charge.event.mechanism for charge in ledger.charges()] == expected
            assert ledger.epsilon() == pytest.approx(last["sites"][f"site-{n}"]["epsilon"])
