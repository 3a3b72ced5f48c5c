"""Every benchmark runs at a tiny size, prints its table and keeps its figures; how fast anything is is not asserted."""

import json

import pytest
from typer.testing import CliRunner

from simulations.benchmark import app

TINY = {
    "audit": "audit --seeds 1 --runs 40",
    "ledger": "ledger --rounds 1 --before 3 --events 20",
    "step": "speed step --rounds 1 --samples 8 --width 4 --threads 1",
    "startup": "speed startup --rounds 1",
    "fakes": "speed fakes --rounds 1 --fakes 4 --batch-size 4",
    "batching": "speed batching --rounds 1 --samples 8 --batch 4 --width 4",
}


def run(arguments, file):
    result = CliRunner().invoke(app, [*arguments.split(), "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    kept = json.loads(file.read_text())
    assert {"commit", "date", "cpu", "cores", "torch_threads", "versions"} <= kept["environment"].keys()
    return result.output, kept


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_its_table_and_keeps_its_figures(name, tmp_path):
    printed, kept = run(TINY[name], tmp_path / "result.json")
    assert "┃" in printed
    assert len(kept["rows"]) > 0


@pytest.mark.slow
def test_many_sites_are_timed_on_both_sides(tmp_path):
    arguments = "speed sites --sites 2 --repeats 1 --rounds 1 --d-steps 1 --width 4"
    printed, kept = run(arguments, tmp_path / "result.json")
    assert "Flower + Opacus" in printed
    assert min(kept["ours_median"], kept["stock_median"], kept["stock_to_ours"]) > 0


def test_the_curves_of_scale_are_drawn(tmp_path):
    from simulations.benchmarks.scale import draw

    rows = [{"sites": n, "second_round": n / 10, "peak_bytes": 10**9 * n} for n in (1, 10, 100)]
    draw({"rows": rows}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def utility_result(method, seed, accuracy, **changes):
    figures = {
        "utility": {f"{name}_accuracy": accuracy for name in ("svm", "mlp", "cnn", "mean")},
        "fidelity": {"fid": 10 * accuracy, "precision": 0.5, "recall": 0.5, "diversity_min": 0.5},
        "robustness": {"fgsm_success": 0.25, "pgd_success": None},
    }
    return {
        "scenario": "mnist", "method": method, "epsilon": 10.0, "label": "", "seed": seed, "evaluation": figures,
        "cpu_seconds": 100.0 + seed, "tested_on": "test images",
    } | changes  # fmt: skip


def test_the_utility_table_has_a_row_a_method_with_mean_and_spread_over_its_seeds():
    from simulations.benchmarks.utility import tables

    found = [utility_result("weak", 0, 0.5), utility_result("good", 0, 0.8), utility_result("good", 1, 0.9)]
    lines = tables(found).splitlines()
    assert lines[0] == "**mnist**" and lines[2].startswith("| method | eps | mean | SVM |")
    good, weak = lines[4:6]  # the best first
    assert good.startswith("| good | 10 | 0.850 ± 0.071 |") and good.endswith("| 0, 1 | 100 |")
    assert "| 8.500 ± 0.707 |" in good and "| - |" in good
    assert weak.startswith("| weak | 10 | 0.500 |") and weak.endswith("| 0 | 100 |")


def test_an_attack_has_a_row_with_its_interval_and_a_coins_range():
    from simulations.benchmarks.utility import attack_tables

    figure = {"value": 0.5, "interval": [0.4, 0.6], "coin": {"value": 0.98, "range": [0.96, 0.99]}}
    attack = {"attack": "logan", "against": "averaged D", "members": 9, "statistics": {
        "auc": figure, "tpr_at_fpr_0.01": figure, "resistance": figure}}  # fmt: skip
    one = utility_result("good", 2, 0.8)
    one["evaluation"]["membership"] = {"attacks": [attack]}
    rows = attack_tables([one, one | {"label": "tried"}]).splitlines()[2:]
    figures = "| logan | averaged D |" + " 0.500 (0.400 to 0.600) |" * 3 + " 0.960 to 0.990 |"
    assert rows == [f"| mnist, good, eps 10, seed 2 {figures}", f"| mnist, good, tried, eps 10, seed 2 {figures}"]


@pytest.mark.slow
def test_a_utility_run_is_kept_and_not_repeated_and_its_method_is_tested_on_withheld_images(tmp_path):
    from simulations.benchmarks.utility import Bench, Trial, results, tables

    settings = (
        "training.rounds=1", "training.d_steps=1", "training.g_steps=1", "evaluation.images=200", "evaluation.epochs=1",
        "data.withheld=100", "data.declared_size=400",
    )  # fmt: skip
    told: list[str] = []
    bench = Bench(None, withheld=True, results=tmp_path / "results", runs=tmp_path / "runs", tell=told.append)
    for method in ("dp-dcgan", "real"):
        file = bench.run(Trial("digits", method, 5.0, 0, settings, "tiny"))
        kept = json.loads(file.read_text())
        assert kept["tested_on"] == "withheld training images" and kept["settings"]["seed"] == 0
    bench.run(Trial("digits", "dp-dcgan", 5.0, 0, settings, "tiny"))
    assert "there already" in told[-1]
    found = results(tmp_path / "results", withheld=True)
    assert results(tmp_path / "results") == [] and len(found) == 2
    run = next(one for one in found if one["method"] == "dp-dcgan")
    assert 0 < run["epsilon_spent"] <= 5 and run["cpu_seconds"] > 0 and run["round"] == 1
    assert "| dp-dcgan, tiny | 5 |" in tables(found) and "| real, tiny | - |" in tables(found)
