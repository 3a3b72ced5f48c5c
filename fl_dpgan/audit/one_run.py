"""The audit in one training run: many canaries at once, through the real `Site`, wire and ledger.

Steinke, Nasr and Jagielski, arXiv 2305.08846. The adversary is the server: it sees every D that the site releases.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from flwr.app import MessageType
from numpy.typing import NDArray
from torch import nn

from fl_dpgan.audit.canaries import Canaries, Coordinates, Kind, draw_canaries, planted
from fl_dpgan.audit.outcome import Outcome, Point
from fl_dpgan.config import Scenario
from fl_dpgan.data import to_unit
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.federation import wire
from fl_dpgan.federation.simulation import policy, split_data
from fl_dpgan.federation.site import Site
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.audit import one_run_bound
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.training.generator import GeneratorTrainer, adversarial
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records

#: The adversary commits itself on these shares of the canaries; the best of the bounds counts, and pays for the choice.
_SHARES = (0.1, 0.3, 1.0)
_RUN = "audit"


def audit_one_run(
    scenario: Scenario,
    data_dir: Path | None,
    *,
    kind: Kind,
    canaries: int,
    confidence: float,
    on_round: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train the scenario's first site with canaries among its records, and have the server guess which were there.

    Args:
        scenario: its seed draws the canaries, the site's sample and its noise.
        kind: how the canaries act. canaries: m, of which about half are in the data.

    Raises:
        ConfigError: the plan has no rounds of discriminator updates, or D has too few parameters.
        DataError: the data cannot be read or split.
        FederationError: the site refuses.
    """
    if scenario.privacy.update != "discriminator_update" or not scenario.training.rounds:
        raise ConfigError(f"method {scenario.method!r} releases no discriminators; audit one that does, as dp-dcgan")
    seed = scenario.seed
    generator, discriminator = from_config(scenario.model, seed)
    models = Models(generator, discriminator)
    drawn = draw_canaries(kind, canaries, models.image_shape, models.num_classes, seed=seed)
    coordinates = None
    if kind == "gradient":
        coordinates = Coordinates.draw(canaries, sum(p.numel() for p in discriminator.parameters()), seed=seed)
        models.engine = planted(models.engine, coordinates)
    with tempfile.TemporaryDirectory(prefix="fl-dpgan-audit-") as folder:
        site = _site(scenario, data_dir, drawn, models, Path(folder) / "site-0.sqlite")
        scores = np.zeros(canaries)
        before = _flat(discriminator)
        for released in _rounds(scenario, site, generator, discriminator, on_round):
            if coordinates is None:
                scores += _logits(released, drawn)
        if coordinates is not None:
            scores = coordinates.scores(_flat(discriminator) - before)
        with closing(LedgerReader(Path(folder) / "site-0.sqlite")) as ledger:
            claimed = ledger.epsilon()
    return _outcome(scores, drawn.included, claimed, scenario, kind, confidence)


def guesses(scores: NDArray[np.float64], included: NDArray[np.bool_], count: int) -> int:
    """How many of `count` guesses are right: half of them say "in" of the highest scores, half "out" of the lowest."""
    order = np.argsort(scores, kind="stable")
    low, high = order[: count // 2], order[len(order) - (count - count // 2) :]
    return int((~included[low]).sum() + included[high].sum())


def _site(scenario: Scenario, data_dir: Path | None, drawn: Canaries, models: Models, ledger: Path) -> Site:
    images, parts = split_data(scenario, data_dir)
    mine = images.subset(parts[0])
    joined = drawn.join(to_unit(torch.from_numpy(mine.images)), torch.from_numpy(mine.labels))
    patients = None
    if scenario.privacy.unit == "patient" and mine.patients is not None:
        patients = [*mine.patients, *(f"canary {number}" for number in range(int(drawn.included.sum())))]
    terms = policy(scenario, 0)
    Ledger(ledger, terms.account("site-0")).close()
    return Site(
        "site-0", Records(*joined, patients), policy=terms, models=models, ledger=ledger,
        learning_rate=scenario.training.d_learning_rate, seed=scenario.seed,
    )  # fmt: skip


def _rounds(
    scenario: Scenario, site: Site, generator: nn.Module, discriminator: nn.Module, on_round: Callable[[], None]
) -> Iterator[nn.Module]:
    """The server's part with one site: each D that it releases, with which G is trained."""
    plan, training = scenario.site_plan(scenario.declared_size(0)), scenario.training
    trainer = GeneratorTrainer(generator, ema_decay=training.ema_decay)
    for number in range(1, training.rounds + 1):
        request = wire.Request(run=_RUN, round=number, site=site.name, plan=plan)
        tensors = wire.dump(discriminator=discriminator, generator=generator)
        header, body = site.answer(request.model_dump_json(), tensors, MessageType.TRAIN)
        answer = wire.parse(header, wire.Answer)
        if answer.status != "trained":
            raise FederationError(f"round {number}: the audited site answered {answer.status!r}: {answer.reason}")
        discriminator.load_state_dict(wire.read_parameters(body, discriminator), strict=False)
        trainer.update(
            adversarial(discriminator), [training.g_learning_rate] * training.g_steps,
            batch_size=training.g_batch_size, seed=scenario.round_seed(number),
        )  # fmt: skip
        on_round()
        yield discriminator


def _logits(discriminator: nn.Module, drawn: Canaries) -> NDArray[np.float64]:
    """D's logit of each canary: higher where it takes them for real, as it learns of those that are in."""
    discriminator.eval()
    with torch.no_grad():
        found: NDArray[np.float64] = discriminator(drawn.images, drawn.labels).double().numpy()
    return found


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def _outcome(
    scores: NDArray[np.float64], included: NDArray[np.bool_], claimed: float, scenario: Scenario, kind: Kind,
    confidence: float,
) -> Outcome:  # fmt: skip
    delta, canaries = scenario.privacy.delta, len(scores)
    paid = 1 - (1 - confidence) / len(_SHARES)
    points = []
    for share in _SHARES:
        count = max(1, round(share * canaries))
        right = guesses(scores, included, count)
        bound = one_run_bound(canaries, count, right, delta=delta, confidence=paid)
        points.append(Point(count, bound, claimed, f"{right} of {count} guesses right"))
    return Outcome(f"one run, {canaries} {kind} canaries", "guesses", confidence, delta, tuple(points))
