"""Times the ledger: charging a round beside training it, and reading a ledger of many events."""

import sqlite3
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from rich.table import Table
from safetensors.torch import save

from fl_dpgan.config import Scenario, load_scenario
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge, charge_payload
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.ledger import Ledger, StoredAnswer
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.records import Records
from fl_dpgan.training.state import optimizer_tensors
from simulations.benchmarks.common import Result, interleaved, scratch, table, torch_threads
from simulations.benchmarks.simulated import command

D_STEPS = 10
_SCENARIO = ["method=dp-dcgan", "data.declared_size=6000", f"training.d_steps={D_STEPS}"]


def measure(before: int, events: int, repeats: int) -> Result:
    """Seconds of each measurement; charging also as a share of the round's training.

    Args:
        before: rounds that a ledger holds already. events: of the large ledger that is read and verified.
        repeats: of all but the charging, which is repeated more often.
    """
    scenario = load_scenario("mnist", _SCENARIO)
    plan = scenario.site_plan(scenario.declared_size(0))
    with torch_threads(1), scratch() as folder:
        training, answer = _round(scenario, plan, repeats)
        rows = [{"what": f"a round: {D_STEPS} D steps, B = {plan.batch_size}", "seconds": training}]
        for rounds in (0, before):
            charging = _charging(folder / f"{rounds}.sqlite", plan, answer, rounds)
            what = f"open, charge and store, after {rounds:,} rounds"
            rows.append({"what": what, "seconds": charging, "of_the_round": charging / training, "limit": "2%"})
        path = folder / "many.sqlite"
        _write(path, plan, events)
        for arguments, limit in (((str(path),), "2 s"), (("verify", str(path)), "")):
            seconds = _median(lambda arguments=arguments: _fl_dpgan("budget", *arguments), repeats)
            shown = f"budget {'verify ' if len(arguments) > 1 else ''}LEDGER, {events:,} events"
            rows.append({"what": shown, "seconds": seconds, "limit": limit})
        rows.append({"what": "--version, to compare", "seconds": _median(lambda: _fl_dpgan("--version"), repeats)})
    return {"sqlite": sqlite3.sqlite_version, "rows": rows}


def render(result: Result) -> Table:
    """A row per measurement."""
    made = table(
        f"The ledger's cost (medians, one thread, SQLite {result['sqlite']})",
        "what", "seconds", "of the round", "limit",
    )  # fmt: skip
    for row in result["rows"]:
        share = f"{row['of_the_round']:.2%}" if "of_the_round" in row else ""
        made.add_row(row["what"], f"{row['seconds']:.4f}", share, row.get("limit", ""))
    return made


def _median(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the action; the first time, which imports and fills caches, does not count."""
    return statistics.median(interleaved({"it": action}, repeats)["it"])


def _round(scenario: Scenario, plan: SitePlan, repeats: int) -> tuple[float, StoredAnswer]:
    """Seconds of a site's local update, and an answer of the size that the site keeps."""
    generator, discriminator = from_config(scenario.model, scenario.seed)
    images = torch.rand(plan.declared_size, 1, 28, 28) * 2 - 1
    data = Records(images, torch.arange(plan.declared_size) % scenario.model.num_classes)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    random = KeyedGenerator.from_os()
    took = _median(
        lambda: local_update(
            discriminator, generator, optimizer, data, plan, first_step=0, random=random, engine=LayerEngine
        ),
        repeats,
    )
    body, state = save(dict(discriminator.state_dict())), save(optimizer_tensors(optimizer))
    return took, StoredAnswer("request", "0" * 64, "{}", body, state)


def _account(plan: SitePlan) -> Account:
    return Account("north", plan.declared_size, 1e6, plan.delta, plan.order)


def _charge(plan: SitePlan, event: Event, number: int) -> Charge:
    return Charge(event, 1.0, "run", number, f"request-{number}", 1e6, plan.digest)


def _charging(path: Path, plan: SitePlan, answer: StoredAnswer, before: int) -> float:
    """Seconds for what a site does with its ledger in a round; the ledger holds `before` rounds already."""
    _write(path, plan, before)
    numbers = iter(range(before, before + 10**6))

    def action() -> None:
        with closing(Ledger(path)) as ledger:
            ledger.last_answer("run")
            ledger.steps("run")
            head = ledger.charge(_charge(plan, plan.event, next(numbers)))
            ledger.store_answer("run", answer, head)

    return _median(action, repeats=31)


def _write(path: Path, plan: SitePlan, events: int) -> None:
    """A ledger of `events` released charges, in one transaction: one by one they would take minutes."""
    with closing(Ledger(path, _account(plan))) as ledger, ledger._transaction():
        for number in range(events):
            payload = charge_payload(_charge(plan, plan.event, number), delta=plan.delta, time=time.time())
            ledger._append("charge", payload)
            ledger._append("release", {"event": 2 * number + 2, "digest": "0" * 64, "time": time.time()})


def _fl_dpgan(*arguments: str) -> None:
    subprocess.run([*command(), *arguments], check=True, stdout=subprocess.DEVNULL)
