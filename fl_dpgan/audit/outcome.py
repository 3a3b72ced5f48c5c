"""What an audit found: the bounds beside the claims, a verdict, a table, a figure and JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_dpgan.files import write_atomically


@dataclass(frozen=True)
class Point:
    """One comparison: at `x`, what the adversary showed epsilon to be at least, and what is claimed that it is at most.

    `seen` says in words what the bound rests on.
    """

    x: float
    bound: float
    claimed: float
    seen: str

    @property
    def holds(self) -> bool:
        """Whether the claim can be true."""
        return self.bound <= self.claimed


@dataclass(frozen=True)
class Outcome:
    """An audit's comparisons, which hold together at its confidence.

    Attributes:
        audit: what was done. varied: what `Point.x` is. confidence: that all bounds are below the true epsilon.
        delta: of the claim. points: in the order of x, at least one.
    """

    audit: str
    varied: str
    confidence: float
    delta: float
    points: tuple[Point, ...]

    @property
    def worst(self) -> Point:
        """The comparison whose bound reaches the largest part of its claim, which is never 0."""
        return max(self.points, key=lambda point: point.bound / point.claimed)

    @property
    def holds(self) -> bool:
        """Whether no comparison contradicts its claim."""
        return self.worst.holds

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        worst = self.worst
        figures = (
            f"epsilon is at least {worst.bound:.3f} ({self.confidence:.0%} confidence); claimed: {worst.claimed:.3f}"
        )
        if self.holds:
            return f"nothing contradicts the claim: {figures}"
        return f"THE CLAIM IS FALSE: {figures}"

    def plain(self) -> dict[str, Any]:
        """All of it, as JSON can have it."""
        points = [{self.varied: p.x, "bound": p.bound, "claimed": p.claimed, "seen": p.seen} for p in self.points]
        return {
            "audit": self.audit, "confidence": self.confidence, "delta": self.delta, "holds": self.holds,
            "verdict": self.verdict, "points": points,
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write `audit.json` and `audit.html`, a figure that works offline, into a folder that is made if need be."""
        import plotly.graph_objects as go

        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "audit.json", (json.dumps(self.plain(), indent=2) + "\n").encode())
        x = [point.x for point in self.points]
        figure = go.Figure(
            [
                go.Scatter(x=x, y=[p.claimed for p in self.points], name="claimed: at most", line={"dash": "dash"}),
                go.Scatter(x=x, y=[p.bound for p in self.points], name=f"shown: at least ({self.confidence:.0%})"),
            ]
        )
        figure.update_layout(title=f"{self.audit}<br>{self.verdict}", template="plotly_white")
        figure.update_xaxes(title=self.varied, type="log" if self.varied == "delta" else "linear")
        figure.update_yaxes(title="epsilon", rangemode="tozero")
        write_atomically(folder / "audit.html", figure.to_html(include_plotlyjs=True).encode())
