"""Audits honest code over and over: how often an audit in many runs contradicts a claim that is true."""

import statistics

from rich.progress import track
from rich.table import Table

from fl_dpgan.audit.many_runs import audit_many_runs
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from simulations.benchmarks.common import Result, table, torch_threads

_CONFIDENCE = 0.95
#: One step over all ten records, where the claim leaves least room; and steps over samples of four.
_PLANS = {"one step, q = 1": (10, 1), "four steps, q = 0.4": (4, 4)}


def measure(seeds: int, runs: int) -> Result:
    """Audit two small plans of claimed epsilon 1 (delta 0.01) with each seed.

    Args:
        seeds: audits of each plan. runs: of each audit.
    """
    rows = []
    with torch_threads(1):
        for name, (batch, steps) in _PLANS.items():
            privacy = PrivacyConfig(batch_size=batch, eps_max=1.0, delta=0.01, clipping=Fixed())
            plan = SitePlan.derive(privacy, declared_size=10, d_steps=steps, rounds=1)
            found = [
                audit_many_runs(plan, runs=runs, confidence=_CONFIDENCE, seed=seed)
                for seed in track(range(seeds), name, transient=True)
            ]
            reached = [outcome.worst.bound / outcome.worst.claimed for outcome in found]
            rows.append(
                {
                    "plan": name,
                    "seeds": seeds,
                    "runs": runs,
                    "above": sum(not outcome.holds for outcome in found),
                    "most_expected": (1 - _CONFIDENCE) * seeds,
                    "median_reached": statistics.median(reached),
                    "largest_reached": max(reached),
                }
            )
    return {"confidence": _CONFIDENCE, "rows": rows}


def render(result: Result) -> Table:
    """A row per plan."""
    made = table(
        f"Audits of honest code at {result['confidence']:.0%} confidence",
        "plan", "audits", "runs of each", "above the claim", "at most expected", "bound / claim, median", "largest",
    )  # fmt: skip
    for row in result["rows"]:
        made.add_row(
            row["plan"], str(row["seeds"]), str(row["runs"]), str(row["above"]), f"{row['most_expected']:g}",
            f"{row['median_reached']:.2f}", f"{row['largest_reached']:.2f}",
        )  # fmt: skip
    return made
