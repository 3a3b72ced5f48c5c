"""What a plan would cost, before anyone runs anything: epsilon after each tenth of it, and the tighter PRV figure."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.accountant import Event, best_order, calibrate, epsilon

_PRV_ERROR = 0.01  # of epsilon
_PRV_POINTS = 2**23  # the largest grid: half a gigabyte and some seconds


def forecast(
    *, records: int, rate: float, rounds: int, d_steps: int, delta: float,
    eps: float | None, sigma: float | None, moment_sigma: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Cost of a plan of `rounds` rounds with `d_steps` D steps each, at rate `rate`, for a site of `records` units.

    Args:
        eps: calibrate sigma so that the whole plan costs at most this. sigma: or give it. Exactly one of the two.
        moment_sigma: noise multiplier of a moment release before the first round; left out, there is none.

    Returns:
        The plan's numbers and `tenths`, a list of `round` (0 is after the moment release), `steps`, `epsilon` (RDP at
        the plan's order, as a ledger counts) and `prv` (Gopi et al., arXiv 2106.02848; an upper bound, valid for a plan
        that is fixed in advance; `epsilon` where that is lower, None where the grid would be too large).

    Raises:
        ConfigError: a value is out of its range, delta is too large, or no noise fits.
    """
    if (eps is None) == (sigma is None):
        raise ConfigError("give one of --eps and --sigma: either the budget or the noise multiplier")
    if records < 1 or not 0 < delta <= 1 / (10 * records):
        raise ConfigError(f"delta = {delta:g} must be above 0 and at most 1/(10 N^) = {1 / (10 * max(records, 1)):.1e}")
    if eps is not None and not 0 < eps < math.inf:
        raise ConfigError(f"eps = {eps:g} is not a budget; give a number above 0")
    if 0 < rate < 1 / records:
        raise ConfigError(f"rate = {rate:g} is less than one record a D step; give at least 1/N^ = {1 / records:.1e}")
    steps = rounds * d_steps
    first = () if moment_sigma is None else (Event(1.0, moment_sigma, 1, "moment_release"),)
    whole = Event(rate, 1.0 if sigma is None else sigma, steps)
    if eps is not None:
        found = calibrate(eps_max=eps, delta=delta, sample_rate=rate, steps=steps, others=first)
        whole = Event(rate, found, steps)
    order = best_order([*first, whole], delta)
    ends = sorted({math.ceil(rounds * tenth / 10) for tenth in range(1, 11)})
    tenths = []
    for end in [0, *ends] if first else ends:
        done = (*first, Event(rate, whole.noise_multiplier, end * d_steps)) if end else first
        spent = epsilon(done, order, delta)
        tenths.append({"round": end, "steps": end * d_steps, "epsilon": spent, "prv": _prv(done, delta, spent)})
    return {
        "records": records, "batch_size": records * rate, "sample_rate": rate,
        "noise_multiplier": whole.noise_multiplier, "moment_noise": moment_sigma,
        "delta": delta, "order": order, "rounds": rounds, "d_steps": d_steps, "tenths": tenths,
    }  # fmt: skip


def forecast_table(plan: dict[str, Any]) -> Table:
    """The forecast for the terminal; rounded up, so that a copied sigma costs no more than is shown."""
    sigma = math.ceil(plan["noise_multiplier"] * 1e4) / 1e4
    title = (
        f"sigma = {sigma:.4f}, q = {plan['sample_rate']:g} (B = {plan['batch_size']:g}), "
        f"delta = {plan['delta']:g}, order {plan['order']:g}"
    )
    if plan["moment_noise"] is not None:
        title += f"; before round 1 a moment release with sigma = {plan['moment_noise']:g}"
    table = Table(title=title, caption="epsilon: as a ledger counts, valid whatever is decided on the way; "
                  "PRV: tighter, valid for this plan only if it is fixed in advance")  # fmt: skip
    for heading in ("round", "D steps", "epsilon", "PRV"):
        table.add_column(heading, justify="right")
    for row in plan["tenths"]:
        prv = "-" if row["prv"] is None else f"{row['prv']:.4f}"
        spent = math.ceil(row["epsilon"] * 1e4) / 1e4
        table.add_row(str(row["round"]), str(row["steps"]), f"{spent:.4f}", prv)
    return table


def _prv(events: Sequence[Event], delta: float, spent: float) -> float | None:
    """Opacus' PRV accountant, or `spent`; None where it cannot resolve the figure (little noise, or many steps)."""
    if _prv_points(events, delta) > _PRV_POINTS:
        return None
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(event.noise_multiplier, event.sample_rate, event.count) for event in events]
    try:
        found = float(accountant.get_epsilon(delta=delta, eps_error=_PRV_ERROR))
    except (ValueError, RuntimeError, ArithmeticError):
        return None
    return min(found, spent) if math.isfinite(found) else None


def _prv_points(events: Sequence[Event], delta: float) -> float:
    """How many points the PRV accountant's grid would have, as Opacus lays it out."""
    delta_error, count = delta / 1000, sum(event.count for event in events)
    ones = [Event(event.sample_rate, event.noise_multiplier, 1) for event in events]
    parts = [(events, delta_error / 4), *(([one], delta_error / (8 * count)) for one in ones)]
    reach = max(epsilon(part, best_order(part, at), at) for part, at in parts)
    mesh = _PRV_ERROR / math.sqrt(count * math.log(12 / delta_error) / 2)
    return 2 * (reach + 3) / mesh
