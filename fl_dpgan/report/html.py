"""The report of a run: one HTML file that needs no network and says first, in plain words, what is guaranteed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fl_dpgan.errors import RunFolderError
from fl_dpgan.files import write_atomically
from fl_dpgan.report.figures import (
    MOST_LINES,
    Curve,
    Grid,
    accuracy_figure,
    clipping_figure,
    epsilon_figure,
    natural,
    rounded,
    sample_grids,
    site_names,
)
from fl_dpgan.runs import RunFolder

#: What an officer reads first of each budget, and how the heading calls it.
_BUDGET_FIELDS = {
    "site": "Site", "spent": "Spent (ε)", "remaining": "Left (ε)", "eps_max": "Cap (ε)", "delta": "δ", "unit": "Unit",
    "relation": "Relation", "budget": "Budget", "declared_size": "Declared size",
}  # fmt: skip
#: What the spending consists of, for whoever checks it; fields that a later version adds follow under their own names.
_DETAIL_FIELDS = {
    "run": "Latest run", "run_spent": "Spent by it (ε)", "share": "Its share (ε)", "rounds_left": "Rounds left",
    "events": "Events", "d_steps": "D steps", "releases_unknown": "Releases unknown", "sigma": "Noise multiplier σ",
    "q": "Sample rate q", "c": "Latest clipping norm C", "order": "Rényi order", "head": "Ledger's last hash",
}  # fmt: skip
_ROUNDED = {"spent": ROUND_CEILING, "run_spent": ROUND_CEILING, "remaining": ROUND_FLOOR}
_MOST_DROPOUTS = 2000


@dataclass(frozen=True)
class RunView:
    """All that a report shows.

    Attributes:
        name: the run's name. rows: what `budget --json` prints.
        rounds: the round log's records. scenario, versions: as `scenario.json` has them.
        curves: per site, (epsilon spent so far, clipping norm, round) per charged event; empty without ledgers.
        simulated: the noise came from the scenario's seed, so that no guarantee holds for one who knows it.
        evaluation: what `evaluation.json` holds. grids: samples in the order of the rounds.
        grids_left_out: how many grids were not taken into the page. written: when the report was written.
    """

    name: str
    rows: Sequence[dict[str, Any]] = ()
    rounds: Sequence[dict[str, Any]] = ()
    scenario: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    simulated: bool = True
    evaluation: Mapping[str, Any] | None = None
    grids: Sequence[Grid] = ()
    grids_left_out: int = 0
    written: str = ""


@dataclass(frozen=True)
class Cell:
    """One figure of a budget: as shown, and exactly, as JSON."""

    field: str
    shown: str
    exact: str


def render(view: RunView) -> str:
    """The page. Everything in the view is escaped; plotly.js is in the page once, and only if a figure needs it."""
    known = {**_BUDGET_FIELDS, **_DETAIL_FIELDS}
    later = {key: key for row in view.rows for key in row if key not in known}
    details = {"site": "Site", "budget": "Budget", **_DETAIL_FIELDS, **later}
    drawn = {
        "epsilon": epsilon_figure(view.rounds, view.rows),
        "clipping": clipping_figure(view.curves),
        "accuracy": accuracy_figure(view.rounds),
    }
    dropouts = _dropouts(view.rounds)
    environment = Environment(
        loader=PackageLoader("fl_dpgan.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        view=view,
        guarantees=_guarantees(view.rows),
        non_private=bool(view.scenario.get("privacy", {}).get("non_private")),
        units=sorted({str(row.get("unit", "image")) for row in view.rows}),
        most_lines=MOST_LINES,
        budget_headings=_BUDGET_FIELDS,
        budgets=[_cells(row, _BUDGET_FIELDS) for row in view.rows],
        detail_headings=details,
        details=[_cells(row, details) for row in view.rows],
        drawn=drawn,
        figures={key: Markup(figure.html) for key, figure in drawn.items() if figure},
        plotly=Markup(get_plotlyjs()) if any(drawn.values()) else None,
        last_round=max((record["round"] for record in view.rounds if "g_loss" in record), default=0),
        dropouts=dropouts[:_MOST_DROPOUTS],
        dropouts_left_out=max(0, len(dropouts) - _MOST_DROPOUTS),
        statuses={dropout["status"] for dropout in dropouts},
        settings=_settings(view.scenario),
    )


def write_report(folder: RunFolder, rows: list[dict[str, Any]], curves: Mapping[str, Curve]) -> Path:
    """Write RUN/report.html from the run's folder and return its path.

    Args:
        rows: what `budget --json` prints, a dict per site and budget.
        curves: per site, (epsilon spent so far, clipping norm, round) per charged event; empty without ledgers.

    Raises:
        RunFolderError: a file of the run is damaged, or the report cannot be written.
    """
    stored = _json(folder.path / "scenario.json")
    evaluation = folder.path / "evaluation.json"
    grids, left_out = sample_grids(folder.path)
    view = RunView(
        name=folder.path.resolve().name,
        rows=rows,
        rounds=list(folder.rounds()),
        scenario=stored.get("scenario", stored.get("federation", {})),
        versions=stored.get("versions", {}),
        curves=curves,
        simulated="federation" not in stored,
        evaluation=_json(evaluation) if evaluation.exists() else None,
        grids=grids,
        grids_left_out=left_out,
        written=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
    )
    target = folder.path / "report.html"
    try:
        # a reason from outside may hold half a surrogate pair, which UTF-8 cannot
        write_atomically(target, render(view).encode("utf-8", "replace"))
    except OSError as error:
        raise RunFolderError(f"{target} cannot be written: {error.strerror}; make room or mend its rights") from error
    return target


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise RunFolderError(f"{file} is damaged ({error}); put back a copy of it") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{file} is damaged (it holds no JSON object); put back a copy of it")
    return content


def _cells(row: Mapping[str, Any], headings: Mapping[str, str]) -> list[Cell]:
    return [
        Cell(key, _shown(key, row[key]), json.dumps(row[key])) if key in row else Cell(key, "–", "") for key in headings
    ]


def _shown(key: str, value: Any) -> str:
    """A figure for reading: epsilons rounded to the unfavourable side, so that the page never understates a spend."""
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value) and key in _ROUNDED:
        return rounded(value, _ROUNDED[key])
    if key == "delta":
        return _plain(value)
    if isinstance(value, float):
        return f"{value:g}" if key in ("eps_max", "share", "order") else f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _plain(delta: float) -> str:
    """Without an exponent where that can be read: 0.00001."""
    return format(Decimal(repr(delta)), "f") if 1e-9 <= delta < 1 else f"{delta:g}"


def _guarantees(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The guarantee once per kind of budget, worst first: sites, unit, largest spend, cap, delta, what that means."""
    groups: dict[tuple[str, str, float, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        terms = (
            str(row.get("unit", "image")),
            str(row.get("relation", "add/remove one")),
            row["eps_max"],
            row["delta"],
        )
        groups.setdefault(terms, []).append(row)
    found = []
    for (unit, relation, cap, delta), members in groups.items():
        spent = max(row["spent"] for row in members)
        found.append((spent, {
            "sites": site_names(sorted({str(row["site"]) for row in members}, key=natural)),
            "unit": f"one {unit}", "relation": relation, "spent": _shown("spent", float(spent)),
            "cap": f"{cap:g}", "delta": _plain(delta), "factor": _factor(spent), "certainty": _certainty(spent),
        }))  # fmt: skip
    return [guarantee for _, guarantee in sorted(found, key=lambda pair: -pair[0])]


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    if epsilon > 20:
        return f"over 10^{math.floor(epsilon / math.log(10))}"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 10) / 10:,}" if factor < 100 else f"{math.ceil(factor):,}"


def _certainty(epsilon: float) -> str:
    """How sure an observer can become who first held it as likely as not: e^epsilon / (1 + e^epsilon), rounded up."""
    percent = math.ceil(1000 / (1 + math.exp(-epsilon))) / 10
    return f"{percent:.1f} %" if percent <= 99.9 else "over 99.9 %"


def _dropouts(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each time a site did not do what was asked, or the run stopped; equal outcomes of successive rounds are one."""
    found: list[dict[str, Any]] = []
    latest: dict[tuple[str, str], dict[str, Any]] = {}

    def note(number: int, status: str, reason: str, site: str = "", asked: str = "", rule: str = "") -> dict[str, Any]:
        found.append({"first": number, "last": number, "site": site, "asked": asked, "status": status, "rule": rule,
                      "reason": reason})  # fmt: skip
        return found[-1]

    for record in rounds:
        number = record["round"]
        for reason in record.get("not_joined", ()):
            note(number, "not joined", str(reason))
        for site, asked, outcome in _outcomes(record):
            before = latest.pop((site, asked), None)
            status, rule, reason = (str(outcome.get(key) or "") for key in ("status", "rule", "reason"))
            if status in ("", "trained", "released", "counted", "not asked"):
                continue
            # a site that has withdrawn is not asked again: later rounds repeat its status without a reason
            same = before and before["status"] == status and number - before["last"] <= 1
            if before and same and ((before["rule"], before["reason"]) == (rule, reason) or not (rule or reason)):
                before["last"] = number
                latest[site, asked] = before
            else:
                latest[site, asked] = note(number, status, reason, site, asked, rule)
        if "stopped" in record:
            note(number, "run stopped", str(record["stopped"]))
    return found


def _outcomes(record: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """What became of each request of a round: the site, what it was asked for, the outcome."""
    evaluation = record.get("evaluation") or {}
    for asked, outcomes in (("training", record.get("sites", {})), ("evaluation", evaluation.get("outcomes", {}))):
        for site in sorted(outcomes, key=natural):
            yield site, asked, outcomes[site]


def _settings(scenario: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The scenario as sections of names and values; what stands outside a section comes first."""
    general = [(key, _setting(value)) for key, value in scenario.items() if not isinstance(value, Mapping)]
    sections = [(key, _flat(value)) for key, value in scenario.items() if isinstance(value, Mapping)]
    return ([("general", general)] if general else []) + sections


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in section.items():
        lines += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, _setting(value))]
    return lines


def _setting(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_setting(item) for item in value)
    return str(value)
