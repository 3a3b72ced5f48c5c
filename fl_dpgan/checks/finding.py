"""A check's outcome, and the table of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "warning", "failed"]

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What one check found, on one line each; `remedy` says how to mend it, where it is not ok."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for field in ("found", "remedy"):
            # a file's name may hold anything, and this goes to a terminal
            text = "".join(c if c.isprintable() else " " for c in getattr(self, field))
            object.__setattr__(self, field, " ".join(text.split()))
        if (self.status == "ok") == bool(self.remedy):
            raise ValueError(f"{self.name}: a remedy goes with what is not ok, and with nothing else")


def ok(name: str, found: str) -> Finding:
    """In order."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Start all the same, but know this."""
    return Finding(name, "warning", found, remedy)


def failed(name: str, found: str, remedy: str) -> Finding:
    """Do not start before this is mended."""
    return Finding(name, "failed", found, remedy)


def refused(name: str, error: Exception, remedy: str = "see the README, then check again") -> Finding:
    """A typed error as a finding: it says what is wrong and, after its last semicolon, what to do."""
    what, separator, told = str(error).rpartition("; ")
    return failed(name, what, told) if separator else failed(name, str(error), remedy)


def may_start(findings: Iterable[Finding]) -> bool:
    """Whether nothing has failed."""
    return all(finding.status != "failed" for finding in findings)


def table(findings: Iterable[Finding], title: str) -> Table:
    """The findings for the terminal; what mends one stands under it, where there is room for it."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("check", no_wrap=True)
    made.add_column("result", no_wrap=True)
    made.add_column("found, and how to mend it", overflow="fold")
    for one in findings:
        style = _STYLES[one.status]
        remedy = f"\n[{style}]→[/] {escape(one.remedy)}" if one.remedy else ""
        made.add_row(escape(one.name), f"[{style}]{one.status}[/]", f"{escape(one.found)}{remedy}")
    return made
