"""Whatever a server sends: nothing is released uncharged, the policy holds, and no record decides the answer."""

import copy
import hashlib
import json
import math
import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LocalGrid, grid_sent
from hostile import LEAST_NOISE, LEAST_NORM, MOST_BATCH, MOST_NORM, MOST_STEPS, Hostile, generate
from safetensors.torch import load
from torch import nn

from fl_dpgan.config import Plan
from fl_dpgan.errors import WireError
from fl_dpgan.federation import FedDPGAN, Policy, Records, Site, wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.verify import verify
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models

BLOCKS, BLOCK = 40, 250  # 10,000 requests where all are asked for; each block has sites and ledgers of its own
SIZE = 12
LATENT = 4
PLAN = Plan.model_validate(
    {
        "privacy": {"batch_size": 6, "eps_max": 1000, "noise_multiplier": 1.5, "evaluation_noise": 5.0},
        "training": {"rounds": 4, "d_steps": 1, "g_steps": 1, "g_batch_size": 4},
        "federation": {"sites": 1, "quorum": 1, "round_timeout": 1.0},
    }
)
POLICY = Policy(
    declared_size=SIZE,
    eps_max=1000,
    eps_per_run=1000,
    least_noise_multiplier=LEAST_NOISE,
    largest_batch_size=MOST_BATCH,
    largest_d_steps=MOST_STEPS,
    largest_clipping_norm=MOST_NORM,
    mechanisms=("discriminator_update", "evaluation_count"),
)
#: The statuses of answers that release something.
PAID = ("trained", "counted", "released")


def networks() -> tuple[Generator, Discriminator, nn.Module]:
    torch.manual_seed(0)
    shape = {"size": 28, "channels": 1, "num_classes": 2}
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 2))
    return Generator(**shape, latent_dim=LATENT, width=2), Discriminator(**shape, width=2), classifier


TEMPLATE = dict(networks()[1].named_parameters())
D_SIZE = sum(tensor.numel() for tensor in TEMPLATE.values())


# --- two sites that differ in one record


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1


def neighbours(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of two sites that are equal but for one record, or for what is in one record."""
    plain = images(SIZE)
    if kind == "one less":
        return plain, plain[:-1]
    if kind in ("one bright more", "one huge more"):
        return plain, torch.cat([plain, torch.full_like(plain[:1], 1.0 if "bright" in kind else 1e38)])
    spoiled = plain.clone()
    spoiled[0] = {"bright": 1.0, "huge": 3.4e38, "one pixel": spoiled[0]}[kind]
    spoiled[0, 0, 13, 13] = 1.0 if kind == "bright" else -3.4e38
    return plain, spoiled


KINDS = ("one less", "one bright more", "one huge more", "bright", "huge", "one pixel")


class WatchedRecords(Records):
    """Notes how many records each pass over the data reads, and whether a durable charge came before."""

    def __init__(self, pictures: torch.Tensor, ledger: Path) -> None:
        super().__init__(pictures, torch.arange(len(pictures)) % 2)
        self.ledger, self.reads, self.unpaid, self.charges_before = ledger, [], 0, 0

    def batch(self, records):
        self.reads.append(len(records))
        self.unpaid += Books(self.ledger).charges != self.charges_before + 1
        return super().batch(records)


class Books:
    """What another process sees of a ledger: the numbers of charges and releases, and the newest of each."""

    def __init__(self, path: Path) -> None:
        self.charges = self.releases = 0
        self.charge, self.charge_hash, self.release = {}, "", {}
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            count = "SELECT count(*), max(seq) FROM entries WHERE kind = ?"
            entry = "SELECT payload, hash FROM entries WHERE seq = ?"
            self.charges, last = db.execute(count, ("charge",)).fetchone()
            if self.charges:
                payload, self.charge_hash = db.execute(entry, (last,)).fetchone()
                self.charge = json.loads(payload)
            self.releases, last = db.execute(count, ("release",)).fetchone()
            if self.releases:
                self.release = json.loads(db.execute(entry, (last,)).fetchone()[0])


@dataclass
class Outcome:
    """One site's answer to one request, and what its ledger gained."""

    header: wire.Answer | wire.Hello
    text: str
    body: bytes
    before: Books
    after: Books
    reads: list[int]
    normals: int

    @property
    def status(self) -> str:
        return getattr(self.header, "status", "hello")

    @property
    def seen(self) -> tuple[Any, ...]:
        """All that may not depend on a record: everything but the values of what was paid for, and the clock's hash."""
        fields = self.header.model_dump(exclude={"head", "count"})
        tensors = load(self.body) if self.body else {}
        shapes = {name: (t.dtype, tuple(t.shape), bool(t.isfinite().all())) for name, t in tensors.items()}
        counted = getattr(self.header, "count", None) is not None
        return fields, shapes, counted, self.after.charges - self.before.charges


class Victim:
    """A site under attack, with everything that is checked at its border."""

    policy = POLICY

    def __init__(self, path: Path, pictures: torch.Tensor, *, seed: int | None = 0) -> None:
        generator, discriminator, classifier = networks()
        self.ledger = path / "site.sqlite"
        self.data = WatchedRecords(pictures, self.ledger)
        self.released: dict[str, bytes] = {}
        Ledger(self.ledger, self.policy.account("site-0")).close()
        self.site = Site(
            "site-0",
            self.data,
            policy=self.policy,
            models=Models(generator, discriminator, classifier),
            ledger=self.ledger,
            learning_rate=1e-3,
            seed=seed,
        )

    def answer(self, hostile: Hostile) -> Outcome:
        before = Books(self.ledger)
        self.data.reads, self.data.unpaid, self.data.charges_before = [], 0, before.charges
        Draws.normals = 0
        reply = getattr(Pack([self.site]), hostile.method)(hostile.message())
        header, body = wire.unpack(reply, wire.Hello if hostile.method == "hello" else wire.Answer)
        (record,) = reply.content.values()
        text = record["headers"][0]
        assert set(reply.content) == {"fl_dpgan"} and set(record) == {"headers", "tensors"}
        assert set(json.loads(text)) == set(wire.LEAVES[type(header).__name__]) - {"tensors"}
        outcome = Outcome(header, text, body, before, Books(self.ledger), self.data.reads, Draws.normals)
        self.check(hostile, outcome)
        return outcome

    def check(self, hostile: Hostile, outcome: Outcome) -> None:
        """Released if and only if charged just before, at the plan's price; every read of the data is paid for."""
        before, after = outcome.before, outcome.after
        assert outcome.status != "failed", hostile.done  # it would be an accident that a server can bring about
        assert not self.data.unpaid, hostile.done
        if outcome.status == "hello":
            hello = {"site": "site-0", "declared_size": SIZE, "unit": "image", "order": POLICY.ledger_order}
            assert outcome.header.model_dump() == hello
        else:
            assert outcome.header.reason.isprintable(), hostile.done
        if outcome.status not in PAID:
            assert (after.charges, after.releases) == (before.charges, before.releases), hostile.done
            assert not outcome.body and getattr(outcome.header, "count", None) is None
            assert not outcome.reads
        elif after.charges == before.charges:
            assert self.released.get(outcome.text) == outcome.body, hostile.done  # the very bytes of before
            assert not outcome.reads
        else:
            self.check_paid(hostile, outcome)
            self.released[outcome.text] = outcome.body

    def check_booked(self, hostile: Hostile, outcome: Outcome) -> wire.Request:
        """Charged and stored once, on this request's account, within the policy; gives the request."""
        before, after, charge = outcome.before, outcome.after, outcome.after.charge
        assert (after.charges, after.releases) == (before.charges + 1, before.releases + 1)
        assert outcome.header.head == after.charge_hash
        assert after.release["digest"] == hashlib.sha256(outcome.text.encode() + b"\0" + outcome.body).hexdigest()
        request, _ = wire.unpack(hostile.message(), wire.Request)
        assert (charge["request"], charge["run"], charge["round"]) == (request.id, request.run, request.round)
        assert charge["noise_multiplier"] >= LEAST_NOISE
        assert charge["clipping_norm"] <= MOST_NORM
        assert charge["share"] == request.plan.eps_max <= 1000
        return request

    def check_paid(self, hostile: Hostile, outcome: Outcome) -> None:
        charge, plan = outcome.after.charge, self.check_booked(hostile, outcome).plan
        updated = outcome.status == "trained"
        assert (charge["mechanism"], charge["sample_rate"], charge["noise_multiplier"], charge["count"]) == (
            ("discriminator_update", plan.batch_size / SIZE, plan.noise_multiplier, plan.d_steps)
            if updated
            else ("evaluation_count", 1.0, plan.evaluation_noise, 1)
        )
        if updated:
            assert 1 <= plan.d_steps <= MOST_STEPS and 1 <= plan.batch_size <= MOST_BATCH
            assert len(outcome.reads) == plan.d_steps
            per_step = plan.batch_size * LATENT + D_SIZE + (plan.clipping.rule == "quantile")
            assert outcome.normals == plan.d_steps * per_step, hostile.done  # every weight of every step gets its noise
            wire.check(load(outcome.body), TEMPLATE)
        else:
            assert outcome.reads == [len(self.data.units)]
            assert outcome.normals == 1
            assert on_grid(outcome.header.count, plan.evaluation_noise)
            assert not outcome.body


def on_grid(count: float, sigma: float) -> bool:
    """Whether a released count is a whole multiple of sigma / 1024, so that its low bits tell nothing."""
    grid = sigma / 1024
    return round(count / grid) * grid == count


class Draws:
    """How many Gaussian numbers were drawn since the count was set to 0."""

    normals = 0


@pytest.fixture
def counted_draws(monkeypatch) -> None:
    plain = KeyedGenerator.normal

    def normal(self, count):
        Draws.normals += count
        return plain(self, count)

    monkeypatch.setattr(KeyedGenerator, "normal", normal)


# --- the genuine requests


def genuine(victim: Victim, path: Path) -> tuple[Hostile, Hostile]:
    """The strategy's own first requests to a site: for an update, and for a count."""
    generator, discriminator, classifier = networks()
    path.mkdir(exist_ok=True)
    strategy = FedDPGAN(
        PLAN, generator, discriminator, folder=RunFolder(path), run="test", train_classifier=lambda *_: classifier
    )
    grid = LocalGrid({1: Pack([victim.site]).hello})
    strategy._join(grid)
    (update,) = strategy.configure_train(10, None, None, grid)
    (count,) = strategy.configure_evaluate(10, None, None, grid)
    return tuple(
        Hostile(header=json.loads(header.model_dump_json()), state=load(tensors), method=method)
        for message, method in ((update, "train"), (count, "evaluate"))
        for header, tensors in [wire.unpack(grid_sent(message), wire.Request)]
    )


class Attack:
    """Many hostile requests to two sites that differ in one record, with a genuine one from time to time."""

    victim = Victim

    def __init__(self, path: Path, kind: str, seed: int) -> None:
        self.source = random.Random(seed)
        self.victims = [self.victim(path / str(n), pictures) for n, pictures in enumerate(neighbours(kind))]
        self.bases = self.genuine(path)
        self.tally: Counter[str] = Counter()
        self.rounds = 100
        self.last: Hostile | None = None

    def run(self, requests: int) -> None:
        for number in range(requests):
            self.send(self.next())
            if number % 50 == 5:
                self.send_genuine()
        for victim in self.victims:
            verify(victim.ledger)

    def next(self) -> Hostile:
        if self.last and self.source.random() < 0.02:
            return self.last  # a repetition
        if self.last and self.source.random() < 0.02:
            self.last = self.generate(self.last)  # mostly under the same id, with other content
            return self.last
        base = self.base()
        self.rounds += 1
        base.header["round"] = self.rounds
        self.last = self.generate(base)
        return self.last

    def genuine(self, path: Path) -> tuple[Hostile, ...]:
        return genuine(self.victims[0], path)

    def base(self) -> Hostile:
        update, count = self.bases
        return count if self.source.random() < 0.12 else update

    def generate(self, base: Hostile) -> Hostile:
        return generate(self.source, base)

    def send(self, hostile: Hostile) -> list[Outcome]:
        outcomes = [victim.answer(hostile) for victim in self.victims]
        assert outcomes[0].seen == outcomes[1].seen, hostile.done
        first = outcomes[0]
        if first.status in PAID:
            repeated = first.after.charges == first.before.charges
            self.tally["repeated" if repeated else first.status] += 1
        else:
            self.tally[f"{first.status} {getattr(first.header, 'rule', '')}".strip()] += 1
        self.tally["schema"] += passes_schema(hostile)
        return outcomes

    def send_genuine(self) -> None:
        """No message has left the site in a state in which it does not answer."""
        for base in self.bases:
            self.rounds += 1
            base.header["round"] = self.rounds
            statuses = {victim.answer(base).status for victim in self.victims}
            assert statuses < {*PAID, "withdrawn"} and len(statuses) == 1
            self.tally[f"genuine {statuses.pop()}"] += 1


def passes_schema(hostile: Hostile) -> bool:
    try:
        wire.unpack(hostile.message(), wire.Request)
    except WireError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_invariants_1_2_4_7_hostile_requests_release_nothing_uncharged(tmp_path, counted_draws, thorough):
    tally: Counter[str] = Counter()
    blocks = BLOCKS if thorough else BLOCKS // 5
    for number in range(blocks):
        attack = Attack(tmp_path / str(number), KINDS[number % len(KINDS)], seed=number)
        attack.run(BLOCK)
        tally += attack.tally
    print(f"\n{blocks * BLOCK} hostile requests, each to two sites that differ in one record")
    for what, times in tally.most_common():
        print(f"{times:6d} {what}")
    assert tally["trained"] >= blocks * BLOCK // 5
    assert tally["repeated"] and tally["refused repeated"]


# --- the noise itself


def silenced(update: Hostile) -> Hostile:
    """A request in which no gradient is left, of a real or of a fake: what the site adds up is the noise alone."""
    quiet = copy.deepcopy(update)
    for name, tensor in quiet.state.items():
        if name.startswith("discriminator.features") and name.endswith("weight"):
            quiet.state[name] = torch.full_like(tensor, 1e30)  # overflows in the second layer, whatever the image
    quiet.header["plan"]["d_steps"] = 1
    return quiet


@pytest.mark.parametrize(
    "sigma, clipping, gradient_sigma, c",
    [
        (LEAST_NOISE, {"rule": "fixed", "c": MOST_NORM}, LEAST_NOISE, MOST_NORM),
        (1.5, {"rule": "fixed", "c": 1e-6}, 1.5, 1e-6),
        (1e6, {"rule": "automatic", "c": 1e-3}, 1e6, 1e-3),
        (LEAST_NOISE, {"rule": "automatic", "c": MOST_NORM}, LEAST_NOISE, MOST_NORM),
        (0.7, {"rule": "epsilon_adaptive", "c_min": 1e-6, "c_max": 0.1, "gamma": 100}, 0.7, 0.1),
        (
            1.0,
            {
                "rule": "quantile",
                "c_first": 0.5,
                "c_min": 0.5,
                "c_max": 2,
                "quantile": 0.5,
                "rate": 0.1,
                "count_noise": 0.6,
            },
            (1 - 1.2**-2) ** -0.5,
            0.5,
        ),
    ],
)
def test_invariant_1_what_a_site_adds_to_its_sum_is_noise_of_the_charged_sigma(
    tmp_path, sigma, clipping, gradient_sigma, c
):
    victim = Victim(tmp_path / "site", images(SIZE), seed=None)
    update, _ = genuine(victim, tmp_path)
    quiet = silenced(update)
    quiet.header["plan"].update(noise_multiplier=sigma, clipping=clipping)
    draws = []
    for number in range(12):
        quiet.header.update(run=f"noise-{number}", round=1)
        assert site_reply(victim, quiet).status == "trained"
        with closing(Ledger(victim.ledger)) as ledger:
            state = load(ledger.last_answer(f"noise-{number}").state)
            assert ledger.last_charge().event.noise_multiplier == sigma
        # Adam's first moment after one step is half of the gradient, and that is the noise over 2B
        noise = [t.flatten() for name, t in state.items() if name.endswith("exp_avg")]
        draws.append(torch.cat(noise) * 2 * 2 * quiet.header["plan"]["batch_size"])
    draws = torch.stack(draws).double() / (gradient_sigma * c)
    assert draws.numel() == 12 * D_SIZE
    error = draws.numel() ** -0.5
    assert abs(float(draws.mean())) < 5 * error
    assert abs(float(draws.std()) - 1) < 5 * error / 2**0.5
    assert abs(float((draws**4).mean()) - 3) < 5 * error * 96**0.5
    assert abs(float((draws[0] * draws[1]).mean())) < 5 * D_SIZE**-0.5  # no two answers share their noise


def test_invariant_1_a_count_carries_noise_of_the_charged_sigma(tmp_path):
    victim = Victim(tmp_path / "site", images(SIZE), seed=None)
    update, count = genuine(victim, tmp_path)
    site_reply(victim, update)
    count.header["plan"]["evaluation_noise"] = 40.0
    found = []
    for number in range(200):
        count.header["round"] = number + 1
        found.append(site_reply(victim, count).count)
        assert on_grid(found[-1], 40.0)
    assert abs(torch.tensor(found).std() / 20 - 1) < 5 / 400**0.5
    with closing(Ledger(victim.ledger)) as ledger:
        assert ledger.steps("test", "evaluation_count") == 200


def site_reply(victim: Victim, hostile: Hostile) -> wire.Answer:
    header, _ = wire.unpack(getattr(Pack([victim.site]), hostile.method)(hostile.message()), wire.Answer)
    return header


def test_invariant_8_no_message_has_a_say_in_the_randomness(tmp_path, monkeypatch):
    """Two sites that get the same hostile requests, word for word, answer with other tensors; no seed is ever used."""

    def from_seed(*parts):
        raise AssertionError("a site without a seed took one")

    plain = KeyedGenerator.normal

    def normal(self, count):
        drawn = plain(self, count)
        singles.extend(drawn.tolist() if count == 1 else [])
        return drawn

    singles: list[float] = []  # the noise of counts, those of the quantile rule included
    monkeypatch.setattr(KeyedGenerator, "from_seed", from_seed)
    monkeypatch.setattr(KeyedGenerator, "normal", normal)
    victims = [Victim(tmp_path / str(n), images(SIZE), seed=None) for n in range(2)]
    update, count = genuine(victims[0], tmp_path)
    source = random.Random(0)
    bodies: list[bytes] = []
    counts: list[float] = []
    for number in range(400):
        base = count if number % 5 == 1 else update
        base.header["run"] = f"run-{number}"
        hostile = generate(source, base) if number else copy.deepcopy(update)
        # with weights of 1e30 a step is below the last digit, and nothing is to be seen
        hostile.state.update(base.state)
        hostile.header["run"] = f"run-{number}"
        kind = wire.Hello if hostile.method == "hello" else wire.Answer
        for victim in victims:
            header, body = wire.unpack(getattr(Pack([victim.site]), hostile.method)(hostile.message()), kind)
            status = getattr(header, "status", "")
            assert status != "failed", hostile.done
            bodies += [body] if status == "trained" else []
            if status == "counted":
                request, _ = wire.unpack(hostile.message(), wire.Request)
                sigma = request.plan.evaluation_noise
                right = header.count + SIZE / 2 - sigma / 2 * singles[-1]  # but for the rounding to the grid
                assert abs(right - min(max(round(right), 0), SIZE)) <= sigma / 2048 * (1 + 1e-9) + 1e-9
                counts.append(header.count)
    assert len(bodies) > 100 and len(set(bodies)) == len(bodies)
    # on their grid of sigma / 1024 two counts may well be the same; the noise that each was seen to carry may not
    assert len(counts) > 20 and len(set(singles)) == len(singles) >= len(counts)


@pytest.mark.parametrize("c", [5e-324, 1e-310, 1e-45, 1e-38, 1e-30, math.nextafter(LEAST_NORM, 0)])
@pytest.mark.parametrize("rule", ["fixed", "automatic", "epsilon_adaptive", "quantile"])
def test_invariant_4_a_clipping_norm_too_small_for_noise_in_single_precision_is_refused_uncharged(tmp_path, rule, c):
    victim = Victim(tmp_path / "site", images(SIZE))
    update, _ = genuine(victim, tmp_path)
    norms = {"c": c} if rule in ("fixed", "automatic") else {"c_min": c, "c_max": 1.0}
    update.header["plan"]["clipping"] = {"rule": rule, **norms}
    header = site_reply(victim, update)
    assert (header.status, header.rule) == ("refused", "wire")
    assert verify(victim.ledger).entries == 1  # the account alone
    assert not victim.data.reads
