"""Every benchmark runs at a tiny size, prints its table and keeps its figures; how fast anything is is not asserted."""

import json

import pytest
from typer.testing import CliRunner

from simulations.benchmark import app

TINY = {
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
