"""What the ledger costs: charging a round beside training it, and reading a ledger of 100,000 events.

Run it from the checkout, on a quiet machine: `python -m simulations.benchmarks.ledger`.
"""

import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
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

REPEATS = 9
D_STEPS = 10
BEFORE = 1_000
MANY = 100_000
_SCENARIO = ["data.declared_size=6000", f"training.d_steps={D_STEPS}"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    scenario = load_scenario("mnist", _SCENARIO)
    plan = scenario.site_plan(scenario.declared_size(0))
    table = Table(title="The ledger's cost (medians)")
    for heading in ("what", "seconds", "of the round", "limit"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    # beside this file, not in /tmp: that may be memory, where fsync costs nothing
    with TemporaryDirectory(dir=Path(__file__).parent, prefix="ledger-") as folder:
        training, answer = _round(scenario, plan)
        table.add_row(f"a round: {D_STEPS} D steps, B = {plan.batch_size}", f"{training:.4f}", "", "")
        for before in (0, BEFORE):
            charging = _charging(Path(folder) / f"{before}.sqlite", plan, answer, before)
            name = f"open, charge and store, after {before:,} rounds"
            table.add_row(name, f"{charging:.4f}", f"{charging / training:.2%}", "2%")
        path = Path(folder) / "many.sqlite"
        _write(path, plan, MANY)
        for command, limit in (((str(path),), "2 s"), (("verify", str(path)), "")):
            took = _median(lambda command=command: _fl_dpgan("budget", *command), repeats=7)
            shown = f"budget {'verify ' if len(command) > 1 else ''}LEDGER"
            table.add_row(f"{shown}, {MANY:,} events", f"{took:.3f}", "", limit)
        took = _median(lambda: _fl_dpgan("--version"), repeats=7)
        table.add_row("--version, to compare", f"{took:.3f}", "", "")
    console = Console()
    console.print(table)
    console.print(_machine(), soft_wrap=True)


def _median(action: Callable[[], object], repeats: int = REPEATS) -> float:
    action()  # imports and caches are not what is measured
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _round(scenario: Scenario, plan: SitePlan) -> tuple[float, StoredAnswer]:
    """Seconds of a site's local update, and an answer of the size that the site keeps."""
    generator, discriminator = from_config(scenario.model, scenario.seed)
    images = torch.rand(plan.declared_size, 1, 28, 28) * 2 - 1
    data = Records(images, torch.arange(plan.declared_size) % scenario.model.num_classes)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    random = KeyedGenerator.from_os()
    took = _median(
        lambda: local_update(
            discriminator, generator, optimizer, data, plan, first_step=0, random=random, engine=LayerEngine
        )
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
    subprocess.run([sys.executable, "-m", "fl_dpgan.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def _machine() -> str:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} torch thread, load {load}; {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, SQLite {sqlite3.sqlite_version}"
    )


if __name__ == "__main__":
    main()
