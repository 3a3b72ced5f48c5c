"""What a coordinator sees of a run while it goes on: its sites, recomputed from the checkpoint and the round log."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.runs import RunFolder
from fl_dpgan.text import printable

#: With these a site did not answer in the round, or was not asked.
_UNSEEN = ("silent", "left out", "not asked", "withdrawn", "absent")
#: With these it did what it was asked.
_WELL = ("trained", "released", "counted", "not asked")
_SHOWN = 8


@dataclass
class SiteView:
    """A site as the server knows it. `epsilon` is None before the first checkpoint that has the site."""

    name: str
    status: str = "not asked"
    reason: str = ""
    seen_round: int | None = None
    seen_ago: float | None = None
    steps: int = 0
    epsilon: float | None = None
    eps_max: float | None = None
    delta: float | None = None


@dataclass
class Overview:
    """A run at one moment; `ago` is seconds since the last line of its log."""

    name: str
    round: int
    rounds: int
    ago: float | None = None
    stopped: str = ""
    sites: dict[str, SiteView] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    not_joined: list[str] = field(default_factory=list)


def overview(folder: RunFolder, now: datetime | None = None) -> Overview:
    """Read a run's folder; another process may be writing to it.

    Raises:
        RunFolderError: its settings or its checkpoint are damaged.
    """
    now, settings = now or datetime.now(UTC), folder.settings
    records, meta = list(folder.rounds()), folder.checkpoint_meta()
    view = Overview(settings.name, int(meta.get("round", 0)), settings.all_rounds)
    log = folder.path / "rounds.jsonl"
    written = datetime.fromtimestamp(log.stat().st_mtime, UTC) if log.exists() else None
    for number, record in enumerate(records):
        at = _time(record, written if number == len(records) - 1 else None)
        view.ago = (now - at).total_seconds() if at else None
        _take(view, record, view.ago)
    for name, memory in sorted(meta.get("sites", {}).items()):
        site, plan = view.sites.setdefault(name, SiteView(name)), SitePlan.model_validate(memory["plan"])
        # from the plan that the site accepted and what may have been charged of it; never what a log says of itself
        site.epsilon = plan.epsilon_after(memory["steps"], memory["evaluations"], releases=memory.get("releases", 0))
        site.steps, site.eps_max, site.delta = memory["steps"], plan.eps_max, plan.delta
    return view


def _take(view: Overview, record: dict[str, Any], ago: float | None) -> None:
    view.not_joined = record.get("not_joined", view.not_joined)
    view.stopped = record.get("stopped", "")
    for name, outcome in record.get("sites", {}).items():
        site = view.sites.setdefault(name, SiteView(name))
        site.status, site.reason = outcome["status"], outcome.get("reason", "")
        if site.status not in _UNSEEN:
            site.seen_round, site.seen_ago = record["round"], ago
        if site.status not in _WELL and site.reason:
            view.refusals.append(f"round {record['round']}: {name} {site.status}: {site.reason}")


def page(view: Overview) -> Group:
    """The overview for the terminal."""
    at = f", {_ago(view.ago)}" if view.ago is not None else ""
    head = f"{view.name}: round {view.round} of {view.rounds}{at}"
    table = Table(box=SIMPLE_HEAD, title=_text(head), title_justify="left")
    for heading in ("site", "last seen", "last status", "D steps", "epsilon", "of", "delta"):
        table.add_column(heading, justify="right" if heading in ("D steps", "epsilon", "of", "delta") else "left")
    for site in sorted(view.sites.values(), key=lambda s: s.name):
        figures = (str(site.steps), _epsilon(site.epsilon), _number(site.eps_max), _number(site.delta))
        style = "" if site.status in _WELL else "yellow"
        table.add_row(_text(site.name), _seen(site), _text(site.status, style), *figures)
    lines = [_text(f"stopped: {view.stopped}", "red")] if view.stopped else []
    lines += [_text(f"not joined: {reason}", "yellow") for reason in view.not_joined]
    lines += [_text(refusal, "yellow") for refusal in view.refusals[-_SHOWN:]]
    note = "epsilon: what this run can have cost a site at most, recomputed from the plan that it accepted"
    return Group(table, *lines, Text(note, style="dim"))


def _time(record: dict[str, Any], otherwise: datetime | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(record["time"])
    except (KeyError, TypeError, ValueError):
        return otherwise
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _seen(site: SiteView) -> str:
    if site.seen_round is None:
        return "never"
    return f"round {site.seen_round}" + ("" if site.seen_ago is None else f", {_ago(site.seen_ago)}")


def _ago(seconds: float) -> str:
    seconds = max(seconds, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def _epsilon(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else "no limit"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _text(value: str, style: str = "") -> Text:
    """Names and reasons come from other machines: nothing in them acts on the terminal."""
    return Text(printable(value, None), style=style)
