"""What a plan would cost, against dp-accounting; and the plans that are refused."""

import json
import math
import sys

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from fl_dpgan import cli
from fl_dpgan.errors import ConfigError
from fl_dpgan.report import forecast as module
from fl_dpgan.report.forecast import forecast

PLAN = {"records": 1000, "rate": 0.05, "rounds": 40, "d_steps": 5, "delta": 1e-5, "eps": None, "sigma": None}


def composed(accountant, *, rate: float, sigma: float, steps: int, moment_sigma: float | None = None):
    step = dp_accounting.GaussianDpEvent(sigma)
    if moment_sigma is not None:
        accountant = accountant.compose(dp_accounting.GaussianDpEvent(moment_sigma))
    if steps == 0:
        return accountant
    return accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, step) if rate < 1 else step, steps)


@pytest.mark.parametrize(
    "changes", [{"sigma": 1.2}, {"eps": 3.0}, {"eps": 1.0, "rate": 0.01}, {"sigma": 15.0, "rate": 1.0, "rounds": 12}]
)
def test_each_tenth_costs_what_dp_accounting_says(changes):
    plan = forecast(**PLAN | changes)
    rate, sigma, rounds = plan["sample_rate"], plan["noise_multiplier"], plan["rounds"]
    assert [row["round"] for row in plan["tenths"]] == [math.ceil(rounds * i / 10) for i in range(1, 11)]
    for row in plan["tenths"]:
        at = {"rate": rate, "sigma": sigma, "steps": row["round"] * 5}
        assert row["steps"] == at["steps"]
        expected = composed(rdp.RdpAccountant(orders=[plan["order"]]), **at).get_epsilon(1e-5)
        assert row["epsilon"] == pytest.approx(expected, rel=1e-3)
        assert row["prv"] <= row["epsilon"]
    tight = composed(pld.PLDAccountant(value_discretization_interval=1e-4), **at).get_epsilon(1e-5)
    assert 0.995 * tight <= plan["tenths"][-1]["prv"] <= 1.05 * tight


@pytest.mark.parametrize("changes", [{"sigma": 1.2}, {"eps": 4.0, "rate": 0.01}])
def test_a_moment_release_comes_first_and_counts_in_every_row(changes):
    plan = forecast(**PLAN | changes, moment_sigma=2.0)
    assert [row["round"] for row in plan["tenths"]] == [0, *(math.ceil(40 * i / 10) for i in range(1, 11))]
    assert plan["moment_noise"] == 2.0
    for row in plan["tenths"]:
        at = {"rate": plan["sample_rate"], "sigma": plan["noise_multiplier"], "steps": row["round"] * 5}
        assert row["steps"] == at["steps"]
        expected = composed(rdp.RdpAccountant(orders=[plan["order"]]), **at, moment_sigma=2.0).get_epsilon(1e-5)
        assert row["epsilon"] == pytest.approx(expected, rel=1e-3)
        assert row["prv"] <= row["epsilon"]
    tight = composed(pld.PLDAccountant(value_discretization_interval=1e-4), **at, moment_sigma=2.0).get_epsilon(1e-5)
    assert 0.995 * tight <= plan["tenths"][-1]["prv"] <= 1.05 * tight
    if "eps" in changes:
        assert 3.99 <= plan["tenths"][-1]["epsilon"] <= 4


@pytest.mark.parametrize("eps", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_noise_found_for_a_budget_spends_it_and_no_more(monkeypatch, eps, rate):
    monkeypatch.setattr(module, "_prv", lambda *_: None)
    plan = forecast(**PLAN | {"eps": eps, "rate": rate})
    assert eps - 0.01 <= plan["tenths"][-1]["epsilon"] <= eps


@pytest.mark.parametrize(("rounds", "ends"), [(1, [1]), (3, [1, 2, 3]), (7, [1, 2, 3, 4, 5, 6, 7])])
def test_a_plan_of_few_rounds_has_a_row_a_round(rounds, ends):
    assert [row["round"] for row in forecast(**PLAN | {"sigma": 2.0, "rounds": rounds})["tenths"]] == ends


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "one of --eps and --sigma"),
        ({"eps": 1.0, "sigma": 1.0}, "one of --eps and --sigma"),
        ({"sigma": 1.0, "rate": 0.0}, "rate"),
        ({"sigma": 1.0, "rate": -0.1}, "rate"),
        ({"sigma": 1.0, "rate": 1.1}, "rate"),
        ({"sigma": 1.0, "rate": math.nan}, "rate"),
        ({"eps": 1.0, "rate": 1.1}, "rate"),
        ({"sigma": 1.0, "rate": 0.0009}, "less than one record"),
        ({"sigma": 1.0, "delta": 1.1e-4}, "at most 1/"),
        ({"sigma": 1.0, "delta": 0.0}, "above 0"),
        ({"sigma": 1.0, "delta": math.nan}, "above 0"),
        ({"sigma": 1.0, "records": 0}, "delta"),
        ({"sigma": 0.0}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"eps": math.nan}, "not a budget"),
        ({"eps": math.inf}, "not a budget"),
        ({"eps": 0.0}, "not a budget"),
        ({"eps": -1.0}, "not a budget"),
        ({"eps": 1e-4, "rate": 1.0, "delta": 1e-12}, "no noise multiplier fits"),
        ({"sigma": 1.0, "rounds": 10**6, "d_steps": 10**6}, "steps"),
        ({"sigma": 1.0, "moment_sigma": 0.0}, "sigma"),
        ({"sigma": 1.0, "moment_sigma": math.nan}, "sigma"),
        ({"eps": 1.0, "moment_sigma": 0.5}, "beside 1 other events"),
    ],
)
def test_an_impossible_plan_is_refused_on_one_line(changes, says):
    with pytest.raises(ConfigError, match=says) as refused:
        forecast(**PLAN | changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"--rate": 1.0, "--sigma": 5.0},
        {"--sigma": 0.01},  # a grid for PRV would take hundreds of gigabytes
        {"--rate": 1.0, "--sigma": 0.3, "--rounds": 2},
        {"--sigma": 1e6},
        {"--rate": 0.001, "--sigma": 1.0, "--rounds": 10**6, "--d-steps": 1000},
        {"--sigma": 1.0, "--moments": 0.01},
        {"--sigma": 1.0, "--moments": 1e6},
    ],
)
def test_an_extreme_plan_gets_a_finite_figure_and_no_warning(monkeypatch, capfd, recwarn, changes):
    options = {"--records": 1000, "--rate": 0.05, "--rounds": 3, "--d-steps": 5} | changes
    words = [str(word) for pair in options.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["fl-dpgan", "budget", "plan", *words, "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    out, err = capfd.readouterr()
    assert err == "" and not recwarn.list
    for row in json.loads(out)["tenths"]:
        assert math.isfinite(row["epsilon"]) and row["epsilon"] >= 0
        assert row["prv"] is None or 0 <= row["prv"] <= row["epsilon"]
