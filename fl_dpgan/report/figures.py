"""The report's figures with their captions: epsilon, clipping norm and accuracy as curves, and the sample grids."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import plotly.graph_objects as go

#: More lines than this cannot be told apart; beyond it a figure shows a band or a selection, and says so.
MOST_LINES = 20

#: Grids take room in the page; a few show the course.
MOST_GRIDS = 6

# Okabe and Ito's colours (without the yellow, too pale on white); dashes tell lines apart in a black-and-white print.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DASHES = ("solid", "dash", "dot")

Points = tuple[tuple[float, float], ...]
#: A site's charged events: epsilon spent so far, the clipping norm if there is one, the round.
Curve = Sequence[tuple[float, float | None, int]]


@dataclass(frozen=True)
class Drawn:
    """A figure with the element id it gets, its heading and its caption in plain text."""

    key: str
    title: str
    caption: str
    figure: go.Figure

    @property
    def html(self) -> str:
        """The figure as a div and a script that expects plotly.js on the page; `<`, `>` and `/` are escaped in it."""
        text: str = self.figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"figure-{self.key}",
            default_height="420px",
            config={"responsive": True, "displayModeBar": False},
        )
        return text


def natural(name: str) -> tuple[int, str]:
    """A sort key that puts site-2 before site-10."""
    return len(name), name


def rounded(value: float, direction: str = ROUND_CEILING) -> str:
    """Four decimals; an epsilon that was spent is rounded up, so that the page never understates it."""
    return str(Decimal(repr(value)).quantize(Decimal("0.0001"), rounding=direction))


def site_names(names: Sequence[str]) -> str:
    """One to three names, or the first and how many more."""
    short = [name if len(name) <= 24 else name[:23] + "…" for name in sorted(names, key=natural)]
    return ", ".join(short) if len(short) <= 3 else f"{short[0]} and {len(short) - 1:,} more"


def epsilon_figure(rounds: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Drawn | None:
    """What the run has spent at each site after each round; None before the first round."""
    series: dict[str, dict[int, float]] = {}
    for record in rounds:
        for site, outcome in record.get("sites", {}).items():
            if outcome.get("epsilon") is not None:
                series.setdefault(site, {})[record["round"]] = outcome["epsilon"]
    if not series:
        return None
    groups = _group({site: tuple(sorted(values.items())) for site, values in series.items()})
    last = [points[-1][1] for _, points in groups]
    caption = (
        f"Epsilon that this run has spent at {_count(series)} after each round, by the server's log, which counts what "
        "was asked of a site even if its answer never came. "
        f"At the end it is {_span(last)}. "
    )
    if len(groups) <= MOST_LINES:
        traces = _lines(groups)
        caption += _shared(groups, series)
    else:
        traces = _band(series)
        caption += (
            "These are too many different curves to tell apart: the line is the sites' median, the band reaches from "
            "the smallest to the largest. Every site's figure stands in the table of budgets above."
        )
    shares = {row["share"] for row in rows if row.get("share") is not None}
    if len(shares) == 1:
        share, ends = shares.pop(), _ends(series)
        line = {"color": "#444", "width": 1.5, "dash": "longdash"}
        traces.append(go.Scatter(x=ends, y=[share] * len(ends), mode="lines", name=f"share: {share:g}", line=line))
        caption += f" The dashed line is the run's share of the budget, {share:g}; a site refuses to go beyond it."
    figure = _figure(traces, "round", "epsilon spent by this run")
    return Drawn("epsilon", "Epsilon over rounds", caption.strip(), figure)


def clipping_figure(curves: Mapping[str, Curve]) -> Drawn | None:
    """The clipping norm of each charged event over the epsilon spent by then; None without a charged event."""
    # an event that clips nothing, as an evaluation count, has no norm
    clipped = {site: tuple((e, norm) for e, norm, _ in curve if norm is not None) for site, curve in curves.items()}
    series = {site: points for site, points in clipped.items() if points}
    if not series:
        return None
    groups = _group(series)
    norms = [norm for points in series.values() for _, norm in points]
    caption = (
        f"The clipping norm C at each charged event of {_count(series)}, over what the site's ledger had spent by then "
        f"in all its runs; C is {_span(norms)}. C bounds what one record can contribute to a step; the noise grows "
        "and shrinks with it, so that epsilon does not depend on it. "
    )
    if len(groups) > MOST_LINES:
        total = len(groups)
        by_end = sorted(groups, key=lambda group: group[1][-1])
        groups = [by_end[round(i * (total - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)]
        caption += f"Of {total:,} different curves {MOST_LINES} are drawn, evenly chosen by what was spent."
    else:
        caption += _shared(groups, series)
    return Drawn(
        "clipping",
        "Clipping norm over epsilon",
        caption.strip(),
        _figure(_lines(groups), "epsilon spent so far", "clipping norm C"),
    )


def accuracy_figure(rounds: Sequence[dict[str, Any]]) -> Drawn | None:
    """The accuracy that the sites measured during the run, with its noise; None where they were not asked."""
    found = [(r["round"], r["evaluation"]) for r in rounds if "accuracy" in (r.get("evaluation") or {})]
    if not found:
        return None
    x, y = [number for number, _ in found], [evaluation["accuracy"] for _, evaluation in found]
    noise = [evaluation.get("noise_sd") or 0.0 for _, evaluation in found]
    trace = go.Scatter(
        x=x, y=y, mode="lines+markers", name="accuracy", line={"color": _COLOURS[0]}, error_y={"array": noise}
    )
    caption = (
        "Accuracy of a classifier trained on synthetic images alone, counted at the sites on their own images. The "
        "counts are noised and charged to the sites' budgets like training steps; the bars are one standard deviation "
        f"of that noise. Last: {y[-1]:.4f} in round {x[-1]}."
    )
    figure = _figure([trace], "round", "accuracy (noised)")
    return Drawn("accuracy", "Accuracy over rounds", caption, figure)


@dataclass(frozen=True)
class Grid:
    """Sample images of one round: a PNG file's bytes."""

    title: str
    png: bytes

    @property
    def uri(self) -> str:
        """The image inside the page."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


def sample_grids(path: Path) -> tuple[list[Grid], int]:
    """The grids of at most `MOST_GRIDS` rounds, evenly chosen, the last one at the end, and how many were left out."""
    files = sorted((path / "samples").glob("round-*.png"), key=lambda file: natural(file.name))
    chosen = files
    if len(files) > MOST_GRIDS:
        chosen = [files[round(i * (len(files) - 1) / (MOST_GRIDS - 1))] for i in range(MOST_GRIDS)]
    grids = [Grid(f"Round {file.stem.removeprefix('round-').lstrip('0') or '0'}", file.read_bytes()) for file in chosen]
    final = path / "samples.png"
    if final.exists() and (not grids or grids[-1].png != final.read_bytes()):
        grids.append(Grid("End of the run", final.read_bytes()))
    return grids, len(files) - len(chosen)


def _group(series: Mapping[str, Points]) -> list[tuple[list[str], Points]]:
    """Sites with equal curves together, so that a line does not hide others that lie under it."""
    groups: dict[Points, list[str]] = {}
    for site in sorted(series, key=natural):
        groups.setdefault(series[site], []).append(site)
    return [(sites, points) for points, sites in groups.items()]


def _lines(groups: Sequence[tuple[list[str], Points]]) -> list[go.Scatter]:
    return [
        go.Scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers" if len(points) <= 40 else "lines",
            marker={"size": 5},
            name=escape(site_names(sites)),  # plotly reads markup in names
            line={"color": _COLOURS[i % len(_COLOURS)], "dash": _DASHES[i // len(_COLOURS) % len(_DASHES)], "width": 2},
        )
        for i, (sites, points) in enumerate(groups)
    ]


def _band(series: Mapping[str, Mapping[int, float]]) -> list[go.Scatter]:
    numbers = sorted({number for values in series.values() for number in values})
    columns = [[values[n] for values in series.values() if n in values] for n in numbers]
    edge = {"color": _COLOURS[0], "width": 0.75}
    fill = {"fill": "tonexty", "fillcolor": "rgba(0, 114, 178, 0.18)"}
    return [
        go.Scatter(x=numbers, y=[min(c) for c in columns], mode="lines", name="smallest", line=edge, showlegend=False),
        go.Scatter(x=numbers, y=[max(c) for c in columns], mode="lines", name="smallest to largest", line=edge, **fill),
        go.Scatter(
            x=numbers, y=[median(c) for c in columns], mode="lines", name="median", line={"color": "#000", "width": 2}
        ),
    ]


def _figure(traces: Sequence[go.Scatter], x_title: str, y_title: str) -> go.Figure:
    axis = {"gridcolor": "#e4e4e4", "linecolor": "#555", "ticks": "outside", "automargin": True, "zeroline": False}
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1a1a1a"},
        margin={"l": 10, "r": 12, "t": 12, "b": 10},
        xaxis={**axis, "title": {"text": x_title, "standoff": 8}},
        yaxis={**axis, "title": {"text": y_title, "standoff": 8}, "rangemode": "tozero"},
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
        showlegend=True,
        hovermode="closest",
    )
    return figure


def _ends(series: Mapping[str, Mapping[int, float]]) -> list[int]:
    numbers = {number for values in series.values() for number in values}
    return sorted({min(numbers), max(numbers)})


def _count(series: Mapping[str, Any]) -> str:
    return "one site" if len(series) == 1 else f"{len(series):,} sites"


def _span(values: Sequence[float]) -> str:
    low, high = rounded(min(values)), rounded(max(values))
    return low if low == high else f"between {low} and {high}"


def _shared(groups: Sequence[Any], series: Mapping[str, Any]) -> str:
    return "Sites with equal curves share a line." if len(groups) < len(series) else ""
