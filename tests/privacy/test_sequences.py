"""500 random sequences of events: the ledger's figure against dp-accounting, at its order and by distributions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from fl_dpgan.privacy.accountant import ORDERS, Event, epsilon, total_rdp
from fl_dpgan.privacy.entries import Account, Charge
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.verify import verify

DELTA = 1e-5
SEQUENCES = 500
LARGEST = 50.0  # an epsilon above it guarantees nothing, and a distribution of it takes minutes


@dataclass(frozen=True)
class Sequence:
    events: tuple[Event, ...]
    order: float


def drawn(random: np.random.Generator) -> Event:
    rate = 1.0 if random.random() < 0.15 else float(np.exp(random.uniform(math.log(1e-3), 0)))
    count = int(np.exp(random.uniform(0, math.log(2001))))
    return Event(rate, float(np.exp(random.uniform(math.log(0.5), math.log(8)))), max(1, min(2000, count)))


def sequences() -> Iterator[Sequence]:
    random = np.random.default_rng(20240611)
    orders = np.array(ORDERS)
    for _ in range(SEQUENCES):
        events = tuple(drawn(random) for _ in range(random.integers(1, 7)))
        yield Sequence(events, float(random.choice(orders)))


ALL = tuple(sequences())


def composed(accountant, events):
    for e in events:
        step = dp_accounting.GaussianDpEvent(e.noise_multiplier)
        if e.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(e.sample_rate, step)
        accountant.compose(step, e.count)
    return accountant


def expected(sequence: Sequence) -> float:
    return composed(rdp.RdpAccountant(orders=[sequence.order]), sequence.events).get_epsilon(DELTA)


def kept(path: Path, sequence: Sequence) -> Path:
    """A ledger that holds the sequence, with a budget that is large enough."""
    account = Account("north", 500, 1.01 * epsilon(sequence.events, sequence.order, DELTA) + 1.0, DELTA, sequence.order)
    ledger = Ledger(path, account)
    for number, event in enumerate(sequence.events):
        ledger.charge(Charge(event, 1.0, "run", number, str(number), account.eps_max, "plan"))
    ledger.close()
    return path


def best(events) -> float:
    return min(epsilon(events, order, DELTA) for order in ORDERS)


def test_the_sequences_cover_what_they_should():
    events = [e for s in ALL for e in s.events]
    assert {len(s.events) for s in ALL} == set(range(1, 7))
    assert sum(e.sample_rate == 1 for e in events) > 100
    assert min(e.sample_rate for e in events) < 2e-3
    assert max(e.count for e in events) > 1500
    assert len({s.order for s in ALL}) > 50


def test_epsilon_at_the_order_is_that_of_dp_accounting_for_all_sequences():
    wrong = [
        (s, ours, theirs)
        for s in ALL
        if not math.isclose(ours := epsilon(s.events, s.order, DELTA), theirs := expected(s), rel_tol=1e-3)
    ]
    assert wrong == []


def test_epsilon_is_the_same_however_the_events_are_ordered_or_split():
    for s in ALL:
        split = [Event(e.sample_rate, e.noise_multiplier, 1) for e in s.events]
        split += [Event(e.sample_rate, e.noise_multiplier, e.count - 1) for e in s.events if e.count > 1]
        assert total_rdp(split[::-1], s.order) == pytest.approx(total_rdp(s.events, s.order), rel=1e-12)


@pytest.mark.slow
def test_epsilon_is_never_below_the_tight_figure_of_privacy_loss_distributions():
    below, checked = [], 0
    for s in ALL:
        ours = best(s.events)
        if ours < LARGEST:
            checked += 1
            # each grid's figure is an upper bound of the tight one: the first that is not above ours is enough
            tight = math.inf
            for interval in (1e-2, 1e-3, 1e-4):
                tight = composed(pld.PLDAccountant(value_discretization_interval=interval), s.events).get_epsilon(DELTA)
                if tight <= ours:
                    break
            if tight > ours:
                below.append((s, ours, tight))
    assert below == []
    assert checked > 300


@pytest.mark.parametrize("number", range(0, SEQUENCES, 10))
def test_a_ledger_and_its_verifier_give_the_figure_of_dp_accounting(tmp_path, number):
    sequence = ALL[number]
    path = kept(tmp_path / "site.sqlite", sequence)
    ledger = Ledger(path)
    spent = ledger.epsilon()
    ledger.close()
    (figures,) = verify(path).budgets
    assert spent == pytest.approx(expected(sequence), rel=1e-3)
    assert figures.epsilon == pytest.approx(spent, rel=1e-6)
    assert figures.events == len(sequence.events)
    assert figures.d_steps == sum(e.count for e in sequence.events)
