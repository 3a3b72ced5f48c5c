"""An export holds all that is needed: its figures are recomputed here with dp-accounting alone."""

import csv
import io
import json
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import rdp

from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import Account, Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger, StoredAnswer
from fl_dpgan.report.budgets import budget_rows
from fl_dpgan.report.export import as_csv, as_json

RATE, SIGMA = 0.1 + 0.2, 1 / 3 + 2  # neither has a short decimal form
CHARGE_KEYS = {
    "seq", "mechanism", "sample_rate", "noise_multiplier", "count", "clipping_norm", "delta", "run", "round", "request",
    "share", "plan", "budget", "time",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "site.sqlite"
    events = [
        ("main", Event(RATE, SIGMA, 7)),
        ("main", Event(1.0, 25.1, 1, "evaluation_count")),
        ("archive", Event(0.01, 0.9, 300)),
        ("main", Event(1 / 7, 3.3, 50)),
        ("archive", Event(1.0, 17.7, 2, "evaluation_count")),
    ]
    with closing(Ledger(path, Account("north", 500, 40.0, 1e-5, 7.0, "patient"))) as ledger:
        ledger.declare_disjoint(Declaration("archive", 300, 'born after 2020, "all", of them\nper Dr. É'))
        for number, (budget, event) in enumerate(events):
            head = ledger.charge(Charge(event, 0.1 * number, "run, one", number, f"q{number}", 30.0, "p" * 64, budget))
            if number != 3:
                ledger.store_answer("run", StoredAnswer("a", "d", "h", b"", b""), head, event.mechanism)
    return path


def recomputed(charges, *, order: float, delta: float) -> dict[str, float]:
    """Each budget's epsilon; nothing of fl_dpgan takes part."""
    accountants = defaultdict(lambda: rdp.RdpAccountant(orders=[order]))
    for c in charges:
        step = dp_accounting.GaussianDpEvent(float(c["noise_multiplier"]))
        if float(c["sample_rate"]) < 1:
            step = dp_accounting.PoissonSampledDpEvent(float(c["sample_rate"]), step)
        accountants[c["budget"]].compose(step, int(c["count"]))
    return {budget: accountant.get_epsilon(delta) for budget, accountant in accountants.items()}


def shown(path: Path) -> dict[str, float]:
    return {row["budget"]: row["spent"] for row in budget_rows(path)}


def test_epsilon_follows_from_the_json_alone(path):
    export = json.loads(as_json(path))
    account = export["account"]
    found = recomputed(export["charges"], order=account["order"], delta=account["delta"])
    assert found == pytest.approx(shown(path), rel=1e-6)
    assert set(found) == {"main", "archive"}


def test_epsilon_follows_from_the_csv_alone(path):
    rows = list(csv.DictReader(io.StringIO(as_csv(path))))
    found = recomputed(rows, order=float(rows[0]["order"]), delta=float(rows[0]["delta"]))
    assert found == pytest.approx(shown(path), rel=1e-6)


def test_the_json_has_the_documented_keys_and_stores_no_figure(path):
    export = json.loads(as_json(path))
    assert set(export) == {"format", "account", "disjoint", "charges", "releases", "head"}
    assert export["format"] == 1
    assert export["account"] == {
        "site": "north", "declared_size": 500, "eps_max": 40.0, "delta": 1e-5, "order": 7.0, "unit": "patient",
        "relation": "add/remove one",
    }  # fmt: skip
    assert all(set(charge) == CHARGE_KEYS for charge in export["charges"])
    assert [c["seq"] for c in export["charges"]] == [3, 5, 7, 9, 10]
    assert [r["event"] for r in export["releases"]] == [3, 5, 7, 10]
    (declared,) = export["disjoint"]
    assert (declared["name"], declared["declared_size"]) == ("archive", 300)
    assert "epsilon" not in as_json(path) and "spent" not in as_json(path)


def test_the_csv_has_the_same_columns_and_the_accounts_terms(path):
    reader = csv.DictReader(io.StringIO(as_csv(path), newline=""))
    rows = list(reader)
    assert set(reader.fieldnames) == CHARGE_KEYS | {"site", "unit", "order", "eps_max"}
    assert len(rows) == 5
    assert {row["run"] for row in rows} == {"run, one"}  # a comma is quoted
    assert {(row["site"], row["unit"], float(row["order"]), float(row["eps_max"])) for row in rows} == {
        ("north", "patient", 7.0, 40.0)
    }


def test_numbers_come_out_to_the_last_bit(path):
    first = json.loads(as_json(path))["charges"][0]
    row = next(csv.DictReader(io.StringIO(as_csv(path))))
    for charge in (first, row):
        assert float(charge["sample_rate"]) == RATE
        assert float(charge["noise_multiplier"]) == SIGMA
        assert float(charge["delta"]) == 1e-5
    assert float(row["time"]) == first["time"]


def test_a_ledger_without_charges_exports_too(tmp_path):
    path = tmp_path / "new.sqlite"
    Ledger(path, Account("north", 500, 8.0, 1e-5, 6.0)).close()
    export = json.loads(as_json(path))
    assert (export["charges"], export["releases"], export["disjoint"]) == ([], [], [])
    assert list(csv.DictReader(io.StringIO(as_csv(path)))) == []
    assert as_csv(path).count("\n") == 1
