"""Real processes that train are killed with SIGKILL: no answer ever leaves without its durable charge."""

import hashlib
import itertools
import json
import os
import random
import select
import signal
import sqlite3
import time
import traceback
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from killed_site import POINTS, WINDOW, new_site, read_answers, request, serve

from fl_dpgan.errors import LedgerError
from fl_dpgan.federation import wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.verify import verify

TRIALS = 200  # where all are asked for


class Trial:
    """One process on a ledger, killed a random moment after it reached a point of a round drawn beforehand."""

    def __init__(self, ledger: Path, first: int, aim: str, passes: int, delay: float, seed: int) -> None:
        reader, points = os.pipe()
        inbox, answers = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            try:
                os.close(reader), os.close(inbox)
                serve(ledger, first, points, answers, aim, seed)
            except BaseException:  # a fork must never get back into pytest
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(points), os.close(answers)
        self.reader, self.inbox = reader, inbox
        self.reached, self.raw, self.ended = b"", b"", False
        self._watch(aim, passes, delay)

    def _watch(self, aim: str, passes: int, delay: float) -> None:
        deadline = time.monotonic() + 30
        wanted = POINTS.index(aim)
        while self.reached.count(wanted) < passes and not self.ended and time.monotonic() < deadline:
            self._receive(0.1)
        due = time.monotonic() + delay
        while (left := due - time.monotonic()) > 0:
            self._receive(left)
        os.kill(self.child, signal.SIGKILL)
        _, status = os.waitpid(self.child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "the process ended by itself"
        while not self.ended:
            self._receive(1)
        os.close(self.reader), os.close(self.inbox)
        self.point = POINTS[self.reached[-1]]
        self.answers = read_answers(self.raw)

    def _receive(self, wait: float) -> None:
        ready, _, _ = select.select([self.reader, self.inbox], [], [], wait)
        got = {pipe: os.read(pipe, 1 << 20) for pipe in ready}
        self.reached += got.get(self.reader, b"")
        self.raw += got.get(self.inbox, b"")
        self.ended = len(ready) == 2 and not any(got.values())


def entries(path: Path) -> list[tuple[int, str, dict, str]]:
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT seq, kind, payload, hash FROM entries ORDER BY seq").fetchall()
    return [(seq, kind, json.loads(payload), digest) for seq, kind, payload, digest in found]


class Custody:
    """One ledger over several killed processes, and all answers that ever came from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.answers, self.charges, self.steps = path, [], 0, 0

    def examine(self, trial: Trial) -> None:
        """Every answer was paid for, once and before it left; nothing that was charged has gone."""
        self.answers += trial.answers
        told = trial.reached.count(POINTS.index("charged"))
        for before, after in itertools.pairwise(POINTS[point] for point in trial.reached):
            assert after != "training" or before == "charged"
            assert before != "creating" or after in ("creating", "asked")
            assert after != "sending" or before in ("stored", "asked")  # right after it was asked: a stored answer
        if not self.path.exists():
            assert not self.answers and not told
            with pytest.raises(LedgerError, match="no ledger"):  # and a site does not make itself a new budget
                new_site(self.path)
            assert not self.path.exists()
            return
        with closing(Ledger(self.path)) as ledger:  # SQLite recovers its log here
            assert ledger.steps() >= self.steps + 2 * told
            self.steps = ledger.steps()
        verified = verify(self.path)
        rows = entries(self.path)
        charges = {digest: (seq, payload) for seq, kind, payload, digest in rows if kind == "charge"}
        releases = {payload["digest"]: payload["event"] for _, kind, payload, _ in rows if kind == "release"}
        assert len(charges) >= self.charges + told
        assert len(charges) >= len({header for _, header, _ in self.answers})
        assert verified.releases_unknown == len(charges) - len(releases)
        self.charges = len(charges)
        for number, header, tensors in self.answers:
            answer = wire.Answer.model_validate_json(header)
            assert (answer.status, answer.round) == ("trained", number)
            seq, charge = charges[answer.head]
            assert (charge["round"], charge["request"]) == (number, f"kill/{number}/site-0/discriminator_update")
            assert releases[hashlib.sha256(header.encode() + b"\0" + tensors).hexdigest()] == seq

    def repeat(self, number: int) -> bool:
        """Ask again for the round that was in hand at the kill: the stored bytes if there are any, else a new charge.

        Returns:
            Whether the answer had been stored.
        """
        with closing(Ledger(self.path)) as ledger:
            last = ledger.last_answer("kill")
            stored = last if last and last.request.startswith(f"kill/{number}/") else None
        before = self.charges
        record = Pack([new_site(self.path)]).train(request(number)).content.config_records["fl_dpgan"]
        header, tensors = str(record["headers"][0]), bytes(record["tensors"][0])
        charges = sum(kind == "charge" for _, kind, _, _ in entries(self.path))
        assert charges == before + (stored is None)
        if stored:
            assert (header, tensors) == (stored.header, stored.body)
        for old, sent, weights in self.answers:
            assert old != number or (sent, weights) == (header, tensors)  # an answer that arrived stays the only one
        self.answers.append((number, header, tensors))
        self.charges = charges
        return stored is not None


@pytest.mark.slow
def test_invariant_2_killed_processes_release_nothing_without_their_durable_charge(tmp_path, thorough):
    trials = TRIALS if thorough else TRIALS // 2
    source = random.Random(20)
    killed: Counter[str] = Counter()
    again: Counter[str] = Counter()
    created: Counter[str] = Counter()
    custody, first, arrived, ledgers = Custody(tmp_path / "0.sqlite"), 1, 0, 1
    for number in range(trials):
        aim = POINTS[number % len(POINTS)]
        if aim == "creating" and custody.path.exists():
            custody, first, ledgers = Custody(tmp_path / f"{number}.sqlite"), 1, ledgers + 1
        passes = source.choice([1, 2, 3] if aim == "creating" else [1, 1, 2, 3])
        trial = Trial(custody.path, first, aim, passes, source.choice([0.0, source.uniform(0, 0.02)]), seed=number)
        custody.examine(trial)
        if trial.point == "creating":
            created["a whole ledger" if custody.path.exists() else "no ledger"] += 1
            created["one under another name"] += any(tmp_path.glob(f"{custody.path.name}.{trial.child}.new"))
            assert not custody.path.exists() or verify(custody.path).entries == 1  # the account
        killed[trial.point] += 1
        arrived += len(trial.answers)
        if asked := trial.reached.count(POINTS.index("asked")):
            first += asked - 1
            if number % 2:
                again["stored bytes" if custody.repeat(first) else "a new charge"] += 1
                first += 1
                verify(custody.path)
    print(f"\n{trials} processes killed, {ledgers} ledgers, {arrived} answers arrived, 0 without their charge")
    for point in POINTS:
        print(f"{killed[point]:5d} after {point!r}{' (between charge and send)' if point in WINDOW else ''}")
    print("asked again:", dict(again))
    print("killed while creating, and left:", dict(created))
    assert sum(killed[point] for point in WINDOW) >= trials // 2
    assert created["no ledger"] and created["a whole ledger"] and created["one under another name"]
    assert killed["creating"] and again["stored bytes"] and again["a new charge"]
