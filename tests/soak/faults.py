"""What goes wrong and when: a schedule of faults, drawn from one number, so that the number repeats it."""

import random
from dataclasses import dataclass

SITES = 3
SERVER = SITES  # who is meant, beside the sites 0, 1, 2

#: Where a process can be struck, in the order in which it comes to pass.
GUARD_POINTS = ("asked", "charging", "charged", "training", "trained", "storing", "stored", "sending")
NODE_POINTS = ("given", "passing", "answering")
SERVER_POINTS = ("asking", "syncing", "sending", "answered", "logging", "logged", "saving", "saved")

#: Answers that a lying node makes of an honest one.
LIES = ("NaN", "huge weights", "an old answer", "another round", "another site", "rubbish")
#: Kinds of faults, the process that they befall, and how often they are drawn.
KINDS = {
    "guard killed": ("guard", 6),
    "node killed": ("node", 2),
    "server killed": ("server", 5),
    "disk full at a site": ("guard", 3),
    "disk full at the server": ("server", 2),
    "clock off at a site": ("guard", 2),
    "clock off at the server": ("server", 1),
    "slow site": ("node", 2),
    "silent site": ("node", 2),
    "request lost": ("node", 1),
    "asked twice": ("server", 3),
    "asked again a round later": ("server", 2),
    "introduction lost": ("node", 1),
    **{f"lie: {lie}": ("node", 1) for lie in LIES},
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: a key of `KINDS`. who: a site's number, or `SERVER`. round: in which; 0 for the introduction.
        point: where in the process's work. amount: seconds from there to a kill, or that a disk stays full, or that a
            clock is put forward.
    """

    kind: str
    who: int
    round: int
    point: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        who = "" if self.who == SERVER else f" site-{self.who}"
        return f"{self.kind}{who} r{self.round}{f' {self.point}' if self.point else ''} {self.amount:+.3g}s"


@dataclass(frozen=True)
class Schedule:
    """A federation and what befalls it.

    Attributes:
        tight: whether budgets cover the planned rounds and no more. heartbeats: whether the server is told at once
            that a node has gone. down: seconds until a killed process is started again.
    """

    seed: int
    rounds: int
    quorum: int
    tight: bool
    heartbeats: bool
    down: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        terms = f"{self.rounds} rounds, quorum {self.quorum}{', tight budgets' if self.tight else ''}"
        return f"schedule {self.seed}: {terms}; {'; '.join(map(str, self.faults))}"


def draw(seed: int) -> Schedule:
    """The schedule of this number."""
    source = random.Random(seed)
    rounds = source.choice([3, 4, 5])
    kinds = source.choices(list(KINDS), [weight for _, weight in KINDS.values()], k=source.choice([2, 3, 3, 4, 5]))
    faults: dict[tuple[str, int, int], Fault] = {}
    for kind in kinds:
        fault = _fault(kind, rounds, source)
        faults.setdefault((fault.kind.partition(":")[0], fault.who, fault.round), fault)
    return Schedule(
        seed,
        rounds,
        quorum=source.choice([1, 2, 2]),
        tight=source.random() < 0.2,
        heartbeats=source.random() < 0.5,
        down=source.choice([0.0, source.uniform(0, 0.5)]),
        faults=tuple(faults.values()),
    )


def _fault(kind: str, rounds: int, source: random.Random) -> Fault:
    process, _ = KINDS[kind]
    who = SERVER if process == "server" else source.randrange(SITES)
    number = 0 if kind == "introduction lost" else source.randint(1, rounds)
    points = {"guard": GUARD_POINTS, "node": NODE_POINTS, "server": SERVER_POINTS}[process]
    if kind.endswith("killed"):
        return Fault(kind, who, number, source.choice(points), source.choice([0.0, source.uniform(0, 0.03)]))
    if kind.startswith("disk"):
        return Fault(kind, who, number, source.choice(points), source.uniform(0.1, 1.0))
    if kind.startswith("clock"):
        return Fault(kind, who, number, source.choice(points), source.choice([-1, 1]) * source.uniform(60, 900))
    return Fault(kind, who, number)
