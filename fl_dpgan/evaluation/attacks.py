"""Membership inference on a finished simulation: from discriminators (LOGAN), and from synthetic images alone.

What it shows is a lower bound on the leak, of these attacks. It takes training and test records to be drawn alike:
where they are not, an attack finds that difference too. MNIST's test images were written by people of their own, so
they lie nearer to a reference set of such images than members do; the control, which sees nothing of the run, shows by
how much that alone tells them apart. Of many sites, one in twenty lies outside the coin's range by chance.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_dpgan.data import ImageData, load, to_unit, withhold
from fl_dpgan.errors import DataError, RunFolderError
from fl_dpgan.evaluation.membership import Scores, statistics
from fl_dpgan.federation.simulation import split_data
from fl_dpgan.federation.wire import read_parameters
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import draw

Indices = NDArray[np.int64]

#: The most records that an attack is measured on: so many members, and as many non-members.
_RECORDS = 10_000
#: At least so many synthetic images, as many of each class.
_SYNTHETIC = 10_000
#: The name of the attack that uses the reference images alone.
CONTROL = "control"
#: Records whose distances, or scores, are in memory at a time.
_AT_ONCE = 500


def attack_run(folder: RunFolder, generator: nn.Module, data_dir: Path | None, *, seed: int) -> dict[str, Any]:
    """Attack what a run gives away: the averaged D, each site's own D as the server received it, and synthetic images.

    A run whose D the sites do not train, and a site whose ledger holds no D, are spared the white-box attack.

    Args:
        generator: the run's. seed: chooses records and draws the synthetic images.

    Returns:
        `round`, `seed`, the numbers of `synthetic_images` and of `reference_images`, and `attacks`, each one with the
        `attack`'s name, what it is `against`, the number of `members` (as many non-members), and its `statistics`.
        Non-members are the withheld images, where there are any, and the reference is the test set; else one half of
        the test set is the reference, and the other half the black-box attacks' non-members.

    Raises:
        DataError: the data cannot be read, or the test set has no class of the training data.
        RunFolderError: the run has no checkpoint yet, or a damaged one.
    """
    scenario = folder.scenario
    model, random = scenario.model, np.random.default_rng(seed)
    train, parts = split_data(scenario, data_dir)
    read = partial(load, scenario.data.source, size=model.size, channels=model.channels, data_dir=data_dir)
    test = read(split="test")
    withheld = withhold(read(split="train"), scenario.data.withheld)[1] if scenario.data.withheld else None
    found = folder.load_checkpoint()
    if found is None:
        raise RunFolderError(f"{folder.path} has no checkpoint yet; let the run finish a round")
    tensors, meta = found

    seen = _discriminators(folder, tensors, meta["run"], parts)
    white_box = [_logan(against, d, train, records, withheld or test, seed) for against, d, records in seen]

    if withheld:
        reference, others = test, withheld
    else:
        reference, others = (test.subset(half) for half in halves(test.labels, random))
    everyone = np.concatenate(parts)
    inside, outside = matched(train.labels[everyone], others.labels, random)
    if not len(inside):
        raise DataError("the test set has no two records of a class that the sites have; give one that does")
    members, non_members = train.subset(everyone[inside]), others.subset(outside)
    scores = black_box_scores(generator, members, non_members, reference, seed=seed)
    black_box = [
        _row(name, "nothing of the run" if name == CONTROL else "synthetic images", *np.split(both, 2))
        for name, both in scores.items()
    ]
    return {
        "round": meta["round"], "seed": seed, "synthetic_images": _per_class(generator) * _num_classes(generator),
        "reference_images": len(reference), "attacks": [*filter(None, white_box), *black_box],
    }  # fmt: skip


def discriminator_scores(discriminator: nn.Module, images: NDArray[np.uint8], labels: Indices) -> Scores:
    """LOGAN's white-box attack (Hayes et al., arXiv 1705.07663, "White-Box Attack"): D's logit for each record.

    A D that has overfitted holds its own training records to be real more firmly than others.
    """
    device = next(discriminator.parameters()).device
    batches = [slice(i, i + _AT_ONCE) for i in range(0, len(labels), _AT_ONCE)]
    with torch.no_grad():
        logits = [
            discriminator(to_unit(torch.from_numpy(images[b]).to(device)), torch.from_numpy(labels[b]).to(device))
            for b in batches
        ]
    scores: Scores = torch.cat(logits).double().cpu().numpy()
    return scores


def black_box_scores(
    generator: nn.Module, members: ImageData, non_members: ImageData, reference: ImageData, *, seed: int
) -> dict[str, Scores]:
    """The scores of each attack for the members and then the non-members, each record within its class.

    Beside `gan_leaks` and `monte_carlo` there is GAN-Leaks calibrated (Chen et al., "Attack Calibration"): how much
    nearer the nearest synthetic image is than the nearest reference image. The paper calibrates with a generator
    trained on other records; here other real records stand in for one, as if it had learnt them by heart. The control
    is what calibration adds. Where it is no coin, believe the attack that is not calibrated.

    Distances are Euclidean, between plain pixels: nothing is fitted, and nothing of a memorised image is lost.

    Args:
        reference: real images of every class that is attacked, among them neither members nor non-members.
    """
    labels = np.concatenate([members.labels, non_members.labels])
    names = ("gan_leaks", "gan_leaks_calibrated", "monte_carlo", CONTROL)
    scores: dict[str, Scores] = {name: np.empty(len(labels)) for name in names}
    for label in np.unique(labels).tolist():  # one class at a time, which bounds the memory
        here = labels == label
        queries = torch.cat([_flat(data, label) for data in (members, non_members)])
        synthetic = draw(generator, torch.full((_per_class(generator),), label), seed=seed + label).flatten(1)
        scores["gan_leaks"][here] = gan_leaks(queries, synthetic)
        scores["monte_carlo"][here] = monte_carlo(queries, synthetic)
        scores[CONTROL][here] = -gan_leaks(queries, _flat(reference, label))
    scores["gan_leaks_calibrated"] = scores["gan_leaks"] + scores[CONTROL]
    return scores


def gan_leaks(queries: Tensor, synthetic: Tensor) -> Scores:
    """GAN-Leaks (Chen et al., arXiv 1909.03935, "Full Black-box"): minus the distance to the nearest synthetic image.

    Args:
        queries, synthetic: flattened images (n, d), (s, d) of one class.
    """
    scores: Scores = -nearest(queries, synthetic).double().numpy()
    return scores


def monte_carlo(queries: Tensor, synthetic: Tensor) -> Scores:
    """The share of synthetic images within a radius (Hilprecht et al., PoPETs 2019(4), "Monte Carlo Integration").

    The radius is theirs: the median over the queries, members or not, of the distance to the nearest synthetic image.

    Args:
        queries, synthetic: as for `gan_leaks`.
    """
    radius = nearest(queries, synthetic).median()
    shares = [(distances <= radius).double().mean(1) for distances in _distances(queries, synthetic)]
    scores: Scores = torch.cat(shares).numpy()
    return scores


def nearest(queries: Tensor, others: Tensor) -> Tensor:
    """The distance of each query to the nearest of the others."""
    return torch.cat([distances.amin(1) for distances in _distances(queries, others)])


def matched(members: Indices, others: Indices, random: np.random.Generator) -> tuple[Indices, Indices]:
    """Positions of as many members as non-members, as many of either in each class, in random order.

    A site's mix of classes may differ from the test set's; unmatched, the class alone would betray members.

    Args:
        members, others: labels.
    """
    pairs = [np.empty((2, 0), np.int64)]
    for label in np.unique(members):
        both = [random.permutation(np.flatnonzero(labels == label)) for labels in (members, others)]
        count = min(map(len, both))
        pairs.append(np.stack([positions[:count] for positions in both]))
    inside, outside = random.permutation(np.concatenate(pairs, axis=1), axis=1)[:, :_RECORDS]
    return inside, outside


def halves(labels: Indices, random: np.random.Generator) -> tuple[Indices, Indices]:
    """Positions of a random half of each class, and of the other half; a class's only record goes to the first."""
    first, second = [], []
    for label in np.unique(labels):
        positions = random.permutation(np.flatnonzero(labels == label))
        cut = max(1, len(positions) // 2)
        first.append(positions[:cut])
        second.append(positions[cut:])
    return np.concatenate(first), np.concatenate(second)


def _discriminators(
    folder: RunFolder, tensors: dict[str, Tensor], run: str, parts: list[Indices]
) -> Iterator[tuple[str, nn.Module, Indices]]:
    """Each D that the server has seen: whose it is, the network, and the training records it may betray."""
    prefix = "discriminator."
    state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    scenario = folder.scenario
    if not state or scenario.privacy.update != "discriminator_update" or not scenario.training.rounds:
        return
    _, discriminator = from_config(scenario.model, scenario.seed)
    discriminator.load_state_dict(state)
    yield "averaged D", discriminator.eval(), np.concatenate(parts)
    for index, part in enumerate(parts):
        path = folder.ledger(name := f"site-{index}")
        if not path.is_file():
            continue
        with closing(LedgerReader(path)) as ledger:
            answer = ledger.last_answer(run)
        if answer is not None:
            # what the server makes of it: buffers do not travel
            discriminator.load_state_dict({**state, **read_parameters(answer.body, discriminator)})
            yield name, discriminator, part


def _logan(
    against: str, discriminator: nn.Module, train: ImageData, records: Indices, test: ImageData, seed: int
) -> dict[str, Any] | None:
    """The attack on one D that saw these training records; None where the test set has none of their classes."""
    inside, outside = matched(train.labels[records], test.labels, np.random.default_rng(seed))
    if not len(inside):
        return None
    chosen = ((train, records[inside]), (test, outside))
    return _row("logan", against, *(discriminator_scores(discriminator, d.images[i], d.labels[i]) for d, i in chosen))


def _row(attack: str, against: str, members: Scores, non_members: Scores) -> dict[str, Any]:
    figures = statistics(members, non_members)
    return {"attack": attack, "against": against, "members": len(members), "statistics": figures}


def _num_classes(generator: nn.Module) -> int:
    return int(generator.num_classes)  # type: ignore[arg-type]


def _per_class(generator: nn.Module) -> int:
    return -(-_SYNTHETIC // _num_classes(generator))


def _flat(data: ImageData, label: int) -> Tensor:
    """The images of one class in [-1, 1], (n, channels * size * size)."""
    return to_unit(torch.from_numpy(data.images[data.labels == label])).flatten(1)


def _distances(queries: Tensor, others: Tensor) -> Iterator[Tensor]:
    """The distances of some queries at a time to all others, (up to _AT_ONCE, n)."""
    for part in queries.split(_AT_ONCE):
        yield torch.cdist(part, others)
