"""The audit in one run, through the real site: honest training passes, training without noise is found out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_cli

from fl_dpgan.audit.one_run import audit_one_run, guesses
from fl_dpgan.config import load_scenario
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.federation import site as site_module
from fl_dpgan.privacy.plan import SitePlan

torch.set_num_threads(1)
SHORT = ["privacy.eps_max=1", "training.rounds=2", "training.g_steps=1", "model.g_width=4", "model.d_width=4"]


def scenario(*more):
    return load_scenario("digits", [*SHORT, *more])


def run(kind, *more, canaries=200):
    return audit_one_run(scenario(*more), None, kind=kind, canaries=canaries, confidence=0.95)


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_honest_training_does_not_contradict_its_ledger(kind):
    found = run(kind)
    assert found.holds
    assert [point.claimed for point in found.points] == [pytest.approx(1.0, abs=2e-3)] * 3
    assert [point.x for point in found.points] == [20, 60, 200]


def test_training_without_noise_is_found_by_gradient_canaries(monkeypatch):
    monkeypatch.setattr(SitePlan, "noised", lambda self, total, clipping_norm, random: total)
    found = run("gradient", "training.rounds=6", 'model.d_features="scattering"', canaries=1000)
    assert not found.holds
    assert found.worst.bound > 2


def test_guesses_are_counted_by_hand():
    scores, included = np.array([5.0, 1, 4, 2, 3]), np.array([True, False, False, True, True])
    assert guesses(scores, included, 2) == 2  # the highest is in, the lowest is out
    assert guesses(scores, included, 4) == 2  # of the two highest one, of the two lowest one
    assert guesses(scores, included, 5) == 3


def test_the_same_seed_gives_the_same_outcome_and_another_seed_another():
    assert run("gradient") == run("gradient") != run("gradient", "seed=1")


def test_methods_without_discriminators_are_refused():
    with pytest.raises(ConfigError, match="'moments' releases no discriminators"):
        audit_one_run(load_scenario("digits", ["method=moments"]), None, kind="input", canaries=20, confidence=0.95)


def test_a_site_that_refuses_ends_the_audit_with_its_reason(monkeypatch):
    monkeypatch.setattr(site_module.Site, "_update", lambda *_: 1 / 0)
    with pytest.raises(FederationError, match="round 1: the audited site answered 'failed'"):
        run("input")


def test_the_command_prints_a_verdict_and_writes_a_figure_that_needs_no_network(monkeypatch, capsys, tmp_path: Path):
    options = [f"--set={override}" for override in SHORT[1:]]
    assert run_cli(monkeypatch, "audit", *options, "--canaries", 40, "--out", tmp_path / "found") == 0
    out = capsys.readouterr().out
    assert "nothing contradicts the claim" in out and "claimed: 0.999" in out
    written = json.loads((tmp_path / "found" / "audit.json").read_text())
    assert written["holds"] and written["confidence"] == 0.95 and len(written["points"]) == 3
    page = (tmp_path / "found" / "audit.html").read_text()
    assert "plotly" in page and 'src="http' not in page


def test_the_command_ends_with_1_where_the_claim_is_false(monkeypatch, capsys):
    monkeypatch.setattr(SitePlan, "noised", lambda self, total, clipping_norm, random: total)
    options = ["--set=training.rounds=1", "--set=privacy.batch_size=300", "--attack", "many-runs", "--runs", 60]
    assert run_cli(monkeypatch, "audit", *options) == 1
    assert "THE CLAIM IS FALSE" in capsys.readouterr().out


def test_the_command_says_on_one_line_what_it_cannot_audit(monkeypatch, capsys):
    assert run_cli(monkeypatch, "audit", "--set", "method=gs-wgan") == 2
    assert capsys.readouterr().err.count("\n") == 1
