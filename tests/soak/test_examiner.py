"""The examiner finds what it is for: in evidence that was tampered with, and in processes that have a fault of ours."""

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from examiner import Evidence, Exit, examine
from faults import SERVER, Fault, Schedule
from safetensors.numpy import load, save
from trial import Trial

from fl_dpgan.federation import wire
from fl_dpgan.federation.exchange import SiteRecord
from fl_dpgan.federation.site import Site
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.runs import RunFolder

QUIET = Schedule(0, rounds=2, quorum=2, tight=False, heartbeats=False, down=0.0, faults=())


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Evidence:
    """What a run leaves that nothing befell."""
    return Trial(QUIET, tmp_path_factory.mktemp("soak") / "quiet").run()


def test_a_run_that_nothing_befell_is_in_order(honest):
    assert examine(honest) == []
    assert [len(honest.answers(site)) for site in honest.ledgers] == [2, 2, 2]


def _without_a_charge(found):
    found.ledgers["site-1"] = [row for row in found.ledgers["site-1"] if row[0] != 2]


def _changed(body):
    return save({name: array + 1 for name, array in load(body).items()})


def _other_bytes(found):
    place = [fields["kind"] for fields, _ in found.guards["site-1"][0]].index("answer")
    fields, body = found.guards["site-1"][0][place]
    found.guards["site-1"][0][place] = (fields, _changed(body))


def _a_charge_of_another_round(found):
    seq, kind, payload, digest = found.ledgers["site-1"][1]
    found.ledgers["site-1"][1] = (seq, kind, payload | {"round": 2}, digest)


def _charges_that_nobody_made(found):
    found.ledgers["site-1"] += [(90, *found.ledgers["site-1"][1][1:3], "f" * 64)]


def _a_second_answer(found):
    place = [fields["kind"] for fields, _ in found.guards["site-1"][0]].index("answer")
    fields, body = found.guards["site-1"][0][place]
    found.guards["site-1"].append([(fields, _changed(body))])


def _trained_first(found):
    notes = found.guards["site-1"][0]
    place = [fields["kind"] for fields, _ in notes].index("training")
    notes[place - 1 : place + 1] = notes[place - 1 : place + 1][::-1]


def _fewer_steps(found):
    found.sites["site-1"]["steps"] -= 2


def _checkpoint(change):
    def tamper(found):
        notes = found.server[0]
        place = max(n for n, (fields, _) in enumerate(notes) if fields["kind"] == "checkpoint")
        tensors = load(notes[place][1])
        name = next(name for name in tensors if name.startswith("discriminator.") and tensors[name].ndim == 4)
        notes[place] = (notes[place][0], save(tensors | {name: change(tensors[name])}))

    return tamper


def _log(change):
    def tamper(found):
        found.log = change(found.log)

    return tamper


def _exit(end):
    return lambda found: found.exits.append(end)


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (_without_a_charge, "uncharged: site-1's answer to round 1 has no charge"),
        (_without_a_charge, "lost: site-1 has lost the charge"),
        (_a_charge_of_another_round, "uncharged: site-1's answer to round 1 has no charge"),
        (_other_bytes, "uncharged: site-1's answer to round 1 is not the one that was stored"),
        (lambda found: found.verified.update({"site-2": "entry 2: was changed"}), "lost: entry 2: was changed"),
        (_charges_that_nobody_made, "lost: site-1 has 3 charges, and made 2"),
        (_charges_that_nobody_made, "drawn_twice: site-1 has charged round 1 2 times, and was asked 1 times"),
        (_a_second_answer, "drawn_twice: site-1 has given 2 answers"),
        (_trained_first, "order: site-1 has trained"),
        (_fewer_steps, "undercounted: the server counts 2 steps at site-1, its ledger at least 4"),
        (_checkpoint(lambda tensor: tensor * np.float32("nan")), "averaged: the checkpoint of round 2 is not finite"),
        (_checkpoint(lambda tensor: tensor + 1e-3), "averaged: round 2: "),
        (lambda found: setattr(found, "ended", False), "course: the run has not come to its end"),
        (_log(lambda log: log[:-1]), "course: the run ended after 1 of 2 rounds"),
        (_log(lambda log: log + log[-1:]), "course: the log has the rounds [1, 2, 2]"),
        (_log(lambda log: [*log, {"stopped": "budget", "round": 3}]), "course: the run stopped, with budgets"),
        (lambda found: found.asked.append(["discriminator_update", {}]), "course: what was asked is kept"),
        (_exit(Exit("node", 1, 1, "")), "said: node-1 ended with 1"),
        (_exit(Exit("guard", 1, -9, "Traceback (most recent call last):\nOSError")), "said: guard-1 shows a traceback"),
        (_exit(Exit("server", 3, 2, "")), "said: server-3 failed with 0 lines of error"),
        (_exit(Exit("server", 3, 2, "error: no\nwarning: odd\n")), "said: the server says more than its error"),
    ],
)
def test_evidence_that_was_tampered_with_is_found_out(honest, tamper, complaint):
    found = deepcopy(honest)
    tamper(found)
    assert any(said.startswith(complaint) for said in examine(found)), examine(found)


def trains_before_it_charges():
    charge, store = Site._charge, Site._store

    def owe(site, ledger, *owed):
        site.owed = owed
        return "0" * 64

    def pay(site, ledger, request, digest, answer, body, state):
        head = charge(site, ledger, *site.owed)
        return store(site, ledger, request, digest, answer.model_copy(update={"head": head}), body, state)

    Site._charge, Site._store = owe, pay


def loses_what_was_not_checkpointed():
    """As a disk that was never synced does, where the power fails."""
    opened = LedgerReader._open

    def without_log(ledger, path, uri):
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
        opened(ledger, path, uri)

    LedgerReader._open = without_log


def draws_for_every_delivery():
    LedgerReader.last_answer = lambda *args: None
    LedgerReader.answered = lambda *args: False


def takes_what_comes():
    FedDPGAN._read = lambda strategy, tensors, plan: wire._load(tensors)
    FedDPGAN._check_finite = lambda strategy, number: None


def counts_nothing():
    SiteRecord.count = lambda record, mechanism: None


def shows_what_the_system_says():
    RunFolder._writing = lambda folder: nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "fault", "complaint"),
    [
        (trains_before_it_charges, Fault("guard killed", 1, 2, "storing"), "order: site-1 has trained"),
        (loses_what_was_not_checkpointed, Fault("guard killed", 1, 1, "training"), "lost: site-1 has lost the charge"),
        (draws_for_every_delivery, Fault("asked twice", SERVER, 1), "drawn_twice: site-1 has given 2 answers"),
        (takes_what_comes, Fault("lie: NaN", 1, 1), "averaged: the checkpoint of round 1 is not finite"),
        (takes_what_comes, Fault("lie: huge weights", 1, 2), "averaged: round 2: "),
        (counts_nothing, Fault("silent site", 1, 1), "undercounted: the server counts 0 steps at site-1"),
        (
            shows_what_the_system_says,
            Fault("disk full at the server", SERVER, 1, "sending", 1.0),
            "said: server-3 shows",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_fault_of_ours_is_found_out(tmp_path_factory, plant, fault, complaint):
    found = Trial(replace(QUIET, faults=(fault,)), tmp_path_factory.mktemp("soak") / "planted", plant).run()
    assert found.struck == [fault]
    assert any(said.startswith(complaint) for said in examine(found)), json.dumps(examine(found), indent=1)
