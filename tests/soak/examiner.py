"""Judges what a schedule's processes left behind. It reads notes and rows, and takes nobody's word for a sum."""

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM
from typing import Any

import numpy as np
from faults import Fault, Schedule
from home import D_STEPS, DECLARED, NAMES
from safetensors.numpy import load

Note = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Exit:
    """How a process ended: its exit code, or minus its signal; and all that it said on standard error."""

    role: str
    number: int
    code: int
    said: str


@dataclass
class Evidence:
    """What was seen.

    Attributes:
        struck: the faults that came to pass. ended: whether the server came to its end.
        guards, nodes, server: notes, in order, of each start of each process.
        ledgers: rows of each site's ledger (seq, kind, payload, hash). verified: what the verifier finds wrong.
        log: the round log. sites: what the last checkpoint keeps of each. asked: what was asked since.
    """

    schedule: Schedule
    ended: bool
    struck: list[Fault]
    guards: dict[str, list[list[Note]]]
    nodes: dict[str, list[list[Note]]]
    server: list[list[Note]]
    ledgers: dict[str, list[tuple[int, str, dict[str, Any], str]]]
    verified: dict[str, str]
    log: list[dict[str, Any]]
    sites: dict[str, Any]
    asked: list[Any]
    exits: list[Exit]

    def answers(self, site: str) -> list[tuple[int, str, bytes]]:
        """Every answer with tensors that a site's guard began to send: its round, header and body."""
        notes = itertools.chain.from_iterable(self.guards[site])
        return [
            (fields["round"], fields["header"], body)
            for fields, body in notes
            if fields["kind"] == "answer" and fields["status"] == "trained"
        ]

    def charges(self, site: str) -> dict[str, tuple[int, dict[str, Any]]]:
        """The ledger's charges by hash: seq and payload."""
        return {digest: (seq, payload) for seq, kind, payload, digest in self.ledgers[site] if kind == "charge"}

    def noted(self, kind: str) -> list[dict[str, Any]]:
        """All that the server's starts noted of a kind."""
        return [fields for start in self.server for fields, _ in start if fields["kind"] == kind]


def examine(found: Evidence) -> list[str]:
    """What is wrong with it; nothing, if all was as it must be."""
    checks = (uncharged, lost, drawn_twice, order, undercounted, averaged, course, said)
    return [f"{check.__name__}: {complaint}" for check in checks for complaint in check(found)]


def uncharged(found: Evidence) -> Iterator[str]:
    """Every answer has its charge, under its own request, and its bytes are the ones whose release was noted."""
    for site in NAMES:
        charges = found.charges(site)
        releases = {
            payload["digest"]: payload["event"] for _, kind, payload, _ in found.ledgers[site] if kind == "release"
        }
        for number, header, body in found.answers(site):
            seq, charge = charges.get(json.loads(header)["head"], (0, {}))
            if not charge or (charge["round"], charge["request"].split("/")[1:3]) != (number, [str(number), site]):
                yield f"{site}'s answer to round {number} has no charge of its own"
            elif releases.get(hashlib.sha256(header.encode() + b"\0" + body).hexdigest()) != seq:
                yield f"{site}'s answer to round {number} is not the one that was stored"


def lost(found: Evidence) -> Iterator[str]:
    """The ledgers verify, and hold every charge that was ever said to be durable, and none that nobody made."""
    for site in NAMES:
        if found.verified[site]:
            yield found.verified[site]
        charges = found.charges(site)
        told = [fields["head"] for start in found.guards[site] for fields, _ in start if fields["kind"] == "charged"]
        for head in set(told) - set(charges):
            yield f"{site} has lost the charge {head:.12}"
        disturbed = sum(fault.kind in ("guard killed", "disk full at a site") for fault in found.struck)
        if len(charges) > len(told) + disturbed:
            yield f"{site} has {len(charges)} charges, and made {len(told)}"


def drawn_twice(found: Evidence) -> Iterator[str]:
    """A request has one answer, however often it is delivered, and is charged at most as often."""
    delivered = Counter((note["site"], note["round"]) for note in found.noted("delivered"))
    for site in NAMES:
        distinct = defaultdict(set)
        for number, header, body in found.answers(site):
            distinct[number].add((header, body))
        for number, answers in distinct.items():
            if len(answers) > 1:
                yield f"{site} has given {len(answers)} answers to round {number}"
        for number, times in Counter(payload["round"] for _, payload in found.charges(site).values()).items():
            if times > delivered[site, number]:
                yield f"{site} has charged round {number} {times} times, and was asked {delivered[site, number]} times"


def order(found: Evidence) -> Iterator[str]:
    """A site trains right after a charge, and not otherwise."""
    for site in NAMES:
        for start in found.guards[site]:
            kinds = [fields["kind"] for fields, _ in start if fields["kind"] in ("charged", "training")]
            if any(pair == ("training", "training") for pair in itertools.pairwise(["training", *kinds])):
                yield f"{site} has trained without a charge right before"


def undercounted(found: Evidence) -> Iterator[str]:
    """The server's count of a site's steps is not below its ledger's.

    A request that the network delivers more often than the server sends it may be charged more often than the server
    can know of: then its count is not below what it asked for.
    """
    asked = Counter((site, note["round"]) for note in found.noted("asked") for site in note["sites"])
    for site in NAMES:
        charged = Counter(payload["round"] for _, payload in found.charges(site).values())
        least = D_STEPS * sum(min(times, asked[site, number]) for number, times in charged.items())
        count = found.sites.get(site, {}).get("steps", 0) + D_STEPS * sum(site in sites for _, sites in found.asked)
        if count < least:
            yield f"the server counts {count} steps at {site}, its ledger at least {least}"


def averaged(found: Evidence) -> Iterator[str]:
    """Every checkpoint is finite, and its D is the mean of what the guards of the sites it counts have answered."""
    bodies = {(site, number): body for site in NAMES for number, _, body in found.answers(site)}
    for start in found.server:
        record: dict[str, Any] = {}
        for fields, body in start:
            if fields["kind"] == "record":
                record = fields["record"]
            if fields["kind"] != "checkpoint":
                continue
            tensors, number = load(body), record["round"]
            if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
                yield f"the checkpoint of round {number} is not finite"
            trained = [site for site, told in record["sites"].items() if told["status"] == "trained"]
            if unknown := [site for site in trained if (site, number) not in bodies]:
                yield f"{unknown[0]} is counted in round {number}, to which it gave no answer"
                continue
            parts = [(DECLARED[NAMES.index(site)], load(bodies[site, number])) for site in trained]
            weight = sum(declared for declared, _ in parts)
            for name in parts[0][1]:
                mean = sum(declared * part[name].astype(np.float64) for declared, part in parts) / weight
                if not np.allclose(mean, tensors[f"discriminator.{name}"], rtol=1e-5, atol=1e-7):
                    yield f"round {number}: {name} is not the mean of what {', '.join(trained)} have answered"
                    break


def course(found: Evidence) -> Iterator[str]:
    """The run ends: with all its rounds, each logged once, or for want of budget where budgets are tight."""
    if not found.ended:
        yield "the run has not come to its end"
        return
    stopped = [record for record in found.log if "stopped" in record]
    numbers = [record["round"] for record in found.log if "seconds" in record]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"the log has the rounds {numbers}"
    if stopped and not found.schedule.tight:
        yield f"the run stopped, with budgets that suffice: {stopped[0]['stopped']}"
    if not stopped and len(numbers) != found.schedule.rounds:
        yield f"the run ended after {len(numbers)} of {found.schedule.rounds} rounds"
    killed = any(fault.kind == "server killed" for fault in found.struck)  # between the checkpoint and its removal
    if not stopped and found.asked and not killed:
        yield "what was asked is kept beside the checkpoint that counts it"


def said(found: Evidence) -> Iterator[str]:
    """Nobody is shown a traceback, and a command that fails says why on one line."""
    for end in found.exits:
        who = f"{end.role}-{end.number}"
        if end.code not in (0, 2, -SIGKILL, -SIGTERM):
            yield f"{who} ended with {end.code}"
        if "Traceback" in end.said:
            yield f"{who} shows a traceback: {end.said.strip().splitlines()[-1]}"
        errors = [line for line in end.said.splitlines() if line.startswith("error: ")]
        if end.code == 2 and len(errors) != 1:
            yield f"{who} failed with {len(errors)} lines of error"
        if end.role == "server" and len(end.said.splitlines()) > len(errors[:1]):
            yield f"the server says more than its error: {end.said.strip().splitlines()[-1]}"
