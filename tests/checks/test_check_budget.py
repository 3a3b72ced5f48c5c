"""The budget: a real ledger, on its terms, and what still fits it of the federation's plan."""

from contextlib import closing

import pytest
from expected import expect
from test_check_data import federation

from fl_dpgan.checks import budget
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.site_file import SiteFile

TRAINING = {"rounds": 10, "d_steps": 20}
MOMENTS = {"moments": {"share": 0.5}}
MATCHING = {"rounds": 5}


def site(folder, name="north", ledger=True, **policy):
    file = SiteFile(
        name=name, ledger=folder / "ledger.sqlite", policy=Policy(**{"declared_size": 500, "order": 5.0, **policy})
    )
    if ledger:
        Ledger(file.ledger, file.policy.account(name)).close()
    return file


def check(file, **options):
    return {f.name: f for f in budget.check_budget(file, federation(**{"training": TRAINING, **options}))}


def charge(file, plan, steps, run="one", *, digest=None, event=None):
    event = event or Event(plan.sample_rate, plan.noise_multiplier, steps, plan.update)
    with closing(Ledger(file.ledger)) as ledger:
        ledger.charge(Charge(event, 1.0, run, 1, f"{run}{steps}", plan.eps_max, digest or plan.digest, file.budget))


def plan_of(file, **options):
    return federation(**{"training": TRAINING, **options}).site_plan(file.policy.declared_size, 5.0)


def test_a_budget_in_order(tmp_path):
    found = check(site(tmp_path))
    expect(found["ledger"], "ok", "verifies: 0 charges", "order 5")
    expect(found["policy"], "ok", "discriminator_update", "10 rounds of 20 D steps", "q 0.128")
    expect(found["cost of a run"], "ok", "0.0000 of 10 spent", "10 of 10 rounds fit")
    whole = plan_of(site(tmp_path, ledger=False)).epsilon_after(200)
    assert float(found["cost of a run"].found.split()[4]) == pytest.approx(whole, abs=1e-4)


def test_no_ledger(tmp_path):
    found = check(site(tmp_path, ledger=False))
    expect(found["ledger"], "failed", "there is none", "site ledger")
    assert list(found) == ["ledger", "policy"]
    expect(found["policy"], "ok")


def test_a_ledger_that_was_changed(tmp_path):
    file = site(tmp_path)
    content = file.ledger.read_bytes()
    file.ledger.write_bytes(content.replace(b'"site":"north"', b'"site":"south"'))
    found = check(file)
    expect(found["ledger"], "failed", "hash", "never make a new ledger")
    assert "cost of a run" not in found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "south"),
        ("eps_max", 12.0),
        ("delta", 2e-6),
        ("unit", "patient"),
        ("declared_size", 501),
        ("order", 6.0),
    ],
)
def test_a_ledger_on_other_terms(tmp_path, key, value):
    site(tmp_path)
    found = check(site(tmp_path, ledger=False, **{key: value}))
    expect(found["ledger"], "failed", f"{key} is {value}", "ledger's terms")


def test_a_budget_that_the_ledger_does_not_have_and_one_of_its_own(tmp_path):
    file = site(tmp_path).model_copy(update={"budget": "second"})
    expect(check(file)["ledger"], "failed", "'second'", "declare-disjoint")
    with closing(Ledger(file.ledger)) as ledger:
        ledger.declare_disjoint(Declaration("second", 500, "another cohort"))
    expect(check(file)["cost of a run"], "ok")


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ({"eps_per_run": 5.0}, {}, ["the site's eps_per_run is 5", "policy.eps_per_run"]),
        ({"largest_d_steps": 19}, {}, ["policy.largest_d_steps"]),
        ({"mechanisms": ("evaluation_count",)}, {}, ["discriminator_update may not leave", "policy.mechanisms"]),
        ({}, {"privacy": {"evaluation_noise": 50.0, "evaluation_every": 5}}, ["evaluation_count may not leave"]),
        ({}, {"privacy": MOMENTS, "matching": MATCHING}, ["moment_release may not leave"]),
        ({}, {"privacy": {"update": "image_gradient", "noise_multiplier": 100.0}}, ["image_gradient may not leave"]),
        ({}, {"privacy": {"delta": 2e-5}}, ["the plan has delta = 2e-05", "policy.delta"]),
        ({}, {"privacy": {"batch_size": 501}}, ["batch size 501 is larger", "coordinator"]),
    ],
)
def test_a_plan_that_the_policy_does_not_allow(tmp_path, policy, options, words):
    found = check(site(tmp_path, **policy), **options)
    expect(found["policy"], "failed", *words, "coordinator")


def test_every_mechanism_of_the_plan_that_the_policy_allows(tmp_path):
    mechanisms = ("discriminator_update", "evaluation_count", "moment_release")
    privacy = {**MOMENTS, "evaluation_noise": 50.0, "evaluation_every": 5}
    found = check(site(tmp_path, mechanisms=mechanisms), privacy=privacy, matching=MATCHING)
    expect(found["policy"], "ok", *mechanisms)
    expect(found["cost of a run"], "ok", "10 of 10 rounds fit")


def test_a_release_without_rounds(tmp_path):
    options = {"privacy": MOMENTS, "matching": MATCHING, "training": {"rounds": 0}}
    file = site(tmp_path, mechanisms=("moment_release",))
    found = check(file, **options)
    expect(found["policy"], "ok", "moment_release")
    expect(found["cost of a run"], "ok", "it fits")
    plan = plan_of(file, **options)
    charge(file, plan, 1, "old", digest="another", event=plan.moment_release)
    expect(check(file, **options)["cost of a run"], "failed", "does not fit", "fewer rounds")


def test_what_still_fits_after_another_run(tmp_path):
    file = site(tmp_path)
    plan = plan_of(file)
    charge(file, plan, 70, digest="another")
    found = check(file)
    expect(found["ledger"], "ok", "1 charges, 1 of them without an answer")
    expect(found["cost of a run"], "warning", "6 of 10 rounds fit", "fewer rounds")
    charge(file, plan, 125, "two", digest="another")
    expect(check(file)["cost of a run"], "failed", "0 of 10 rounds fit", "fewer rounds")


def test_a_run_that_was_begun_is_gone_on_with(tmp_path):
    file = site(tmp_path)
    plan = plan_of(file)
    charge(file, plan, 60)
    expect(check(file)["cost of a run"], "ok", "3 of the 10 rounds", "7 of 7 rounds fit")
    charge(file, plan, 140)
    # that run is over, and a new one would not be paid for
    expect(check(file)["cost of a run"], "failed", "a run costs", "0 of 10 rounds fit")
