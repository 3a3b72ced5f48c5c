"""The budget: whether the policy allows what the federation plans, and whether the ledger can still pay for it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from fl_dpgan.checks.finding import Finding, failed, ok, refused, warning
from fl_dpgan.errors import ConfigError, LedgerError, PolicyError
from fl_dpgan.privacy.accountant import Event, epsilon, steps_that_fit, total_rdp

if TYPE_CHECKING:
    from fl_dpgan.config import Federation
    from fl_dpgan.privacy.plan import SitePlan
    from fl_dpgan.privacy.policy import Policy
    from fl_dpgan.site_file import SiteFile

_FEWER = "ask the coordinator for fewer rounds or a smaller privacy.eps_max: what is spent does not come back"


def check_budget(file: SiteFile, federation: Federation) -> list[Finding]:
    """The ledger, the policy, and what a run of the federation would cost here."""
    from fl_dpgan.privacy.ledger import LedgerReader

    ledger, order = check_ledger(file), None
    if ledger.status == "ok":
        with closing(LedgerReader(file.ledger)) as opened:  # it has just been verified
            order = opened.account.order
    try:
        plan = federation.site_plan(file.policy.declared_size, order or file.policy.ledger_order)
    except ConfigError as error:
        return [ledger, failed("policy", f"no plan for this site: {error}", "ask the coordinator to change the plan")]
    findings = [ledger, allowed(file.policy, plan)]
    if order is None:
        return findings
    try:
        with closing(LedgerReader(file.ledger)) as opened:
            spent, last, of_run = opened.totals(budget=file.budget), opened.last_charge(file.budget), []
            if last and last.plan == plan.digest:
                of_run = opened.totals(last.run, file.budget)
    except LedgerError as error:
        return [*findings, refused("cost of a run", error)]
    return [*findings, cost(plan, spent=spent, of_run=of_run, eps_max=file.policy.eps_max)]


def check_ledger(file: SiteFile) -> Finding:
    """Whether there is a ledger, it verifies, and it is kept on the policy's terms, as a site starts by them."""
    from fl_dpgan.privacy.ledger import LedgerReader
    from fl_dpgan.privacy.verify import verify

    policy = file.policy
    if not os.path.exists(file.ledger):
        remedy = "make it once, with `fl-dpgan site ledger`; if there was one, put back its newest copy"
        return failed("ledger", f"there is none at {file.ledger}, or not for this user to see", remedy)
    owner, home = file.ledger.stat().st_uid, file.ledger.parent.stat().st_uid
    if owner != home:
        remedy = f"chown {home} {file.ledger}, if that is the guard's user"
        return failed("ledger", f"it belongs to user {owner}, its folder to user {home}", remedy)
    if not all(os.access(path, os.R_OK | os.W_OK, effective_ids=True) for path in (file.ledger, file.ledger.parent)):
        return failed("ledger", f"{file.ledger} is not this user's to write", "run this as the guard's user or as root")
    try:
        verified = verify(file.ledger)
        with closing(LedgerReader(file.ledger)) as opened:
            account, size = opened.account, opened.budgets.get(file.budget)
    except LedgerError as error:
        return failed("ledger", str(error), "put back the newest copy that verifies; never make a new ledger instead")
    if size is None:
        return failed(
            "ledger",
            f"it has no budget {file.budget!r}",
            "correct `budget` in site.toml, or open it with `fl-dpgan budget declare-disjoint`",
        )
    terms = {
        "name": (file.name, account.site),
        "eps_max": (policy.eps_max, account.eps_max),
        "delta": (policy.delta, account.delta),
        "unit": (policy.unit, account.unit),
        "declared_size": (policy.declared_size, size),
        "order": (policy.order or account.order, account.order),
    }
    if other := [f"{key} is {here}, the ledger's {there}" for key, (here, there) in terms.items() if here != there]:
        return failed(
            "ledger",
            f"site.toml has other terms: {'; '.join(other)}",
            "set site.toml to the ledger's terms, which are fixed for ever",
        )
    unknown = f", {verified.releases_unknown} of them without an answer" if verified.releases_unknown else ""
    events = sum(budget.events for budget in verified.budgets)
    return ok("ledger", f"verifies: {events} charges{unknown}, order {account.order:g}")


def allowed(policy: Policy, plan: SitePlan) -> Finding:
    """Whether the policy allows every mechanism that the plan uses."""
    needed = [event.mechanism for event in plan.whole_run]
    broken: dict[str, str] = {}
    for mechanism in needed:
        try:
            policy.check(plan, mechanism)
        except PolicyError as error:
            broken[f"{error.rule} {mechanism if error.rule == 'mechanisms' else ''}"] = str(error)
    if broken:
        keys = ", ".join(dict.fromkeys(f"policy.{key.split()[0]}" for key in broken))
        return failed(
            "policy",
            "; ".join(broken.values()),
            f"ask the coordinator for other terms, or change {keys} in site.toml if your officer agrees",
        )
    rounds = f", {plan.rounds} rounds of {plan.d_steps} D steps, sigma {plan.noise_multiplier:.4g}"
    rate = f", q {plan.sample_rate:.4g}, B {plan.batch_size}"
    return ok("policy", f"allows {', '.join(needed)}{rounds + rate if plan.rounds else ''}")


def cost(plan: SitePlan, *, spent: Sequence[Event], of_run: Sequence[Event], eps_max: float) -> Finding:
    """What a run of the plan costs, and how much of it fits what is left.

    Args:
        spent: all that the budget has paid. of_run: what of it was for a run of this very plan, if the last one was:
            a site that comes back goes on with it.
    """
    order, delta = plan.order, plan.delta
    if plan.rounds and _steps(plan, of_run) >= plan.rounds * plan.steps_a_round:
        of_run = ()  # that run is over; another one would be a new one
    done = _steps(plan, of_run) // plan.steps_a_round
    charged = {event.mechanism: event.count for event in of_run}
    others = [
        replace(event, count=event.count - charged.get(event.mechanism, 0))
        for event in plan.whole_run[1 if plan.rounds else 0 :]
        if event.count > charged.get(event.mechanism, 0)
    ]
    used, whole = epsilon(spent, order, delta), epsilon(plan.whole_run, order, delta)
    budget = f"{_up(used)} of {eps_max:g} spent"
    head = f"a run costs epsilon {_up(whole)} at delta {delta:g} ({budget})"
    if of_run:
        head = f"{done} of the {plan.rounds} rounds of the last run are charged ({budget})"
    caps = ((spent, eps_max), (of_run, plan.eps_max))
    if not plan.rounds:
        if all(epsilon([*before, *others], order, delta) <= cap * (1 + 1e-9) for before, cap in caps):
            return ok("cost of a run", f"{head}; it fits")
        return failed("cost of a run", f"{head}; it does not fit", _FEWER)
    wanted = plan.rounds - done
    steps = min(
        steps_that_fit(
            spent_rdp=total_rdp([*before, *others], order), event=plan.event, order=order, delta=delta, cap=cap
        )
        for before, cap in caps
    )
    fit = min(wanted, steps // plan.steps_a_round)
    found = f"{head}; {fit} of {wanted} rounds fit"
    if fit == wanted:
        return ok("cost of a run", found)
    if fit:
        return warning("cost of a run", found, f"the site leaves the run after them, or {_FEWER}")
    return failed("cost of a run", found, _FEWER)


def _steps(plan: SitePlan, events: Sequence[Event]) -> int:
    return sum(event.count for event in events if event.mechanism == plan.update)


def _up(value: float) -> str:
    return f"{math.ceil(value * 1e4) / 1e4:.4f}"
