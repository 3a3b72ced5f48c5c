"""A run's progress on the terminal: a bar, and a line for each site that did not do its part in a round."""

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fl_dpgan.text import printable

#: What a site's status is when there is nothing to say.
QUIET = ("trained", "released", "not asked")


class RoundProgress(Progress):
    """Fed with the round log's records; a context manager, as rich's own."""

    def __init__(self, console: Console, rounds: int, *, without_guarantee: str = "") -> None:
        super().__init__(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._without_guarantee = without_guarantee
        self._rounds = self.add_task("epsilon 0", total=rounds)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def take(self, record: dict[str, Any]) -> None:
        """Show a line of the round log."""
        if "not_joined" in record:
            for reason in record["not_joined"]:
                self.say(f"not joined: {reason}")
            return
        if "stopped" in record:
            self.say(f"stopped before round {record['round']}: {record['stopped']}")
            return
        for name, site in record["sites"].items():
            if site["status"] not in QUIET and (reason := site.get("reason")):  # one that has withdrawn said so once
                self.say(f"round {record['round']}: {name} {site['status']}: {reason}")
        most = record["epsilon_max"]
        known = most is not None and math.isfinite(most)  # the log has null for what is infinite
        spent = f"epsilon {record['epsilon_min']:.3f} to {most:.3f}" if known else self._without_guarantee
        self.update(self._rounds, completed=record["round"], description=spent)
