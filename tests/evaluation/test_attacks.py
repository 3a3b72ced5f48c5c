"""A planted leak is found, in D and in images, and none where there is none; a run is attacked with its own parts."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from scipy.spatial.distance import cdist
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import softplus

from fl_dpgan.config import load_scenario
from fl_dpgan.data import ImageData, load, to_tensor
from fl_dpgan.errors import DataError, RunFolderError
from fl_dpgan.evaluation import attacks
from fl_dpgan.evaluation.attacks import (
    attack_run,
    black_box_scores,
    discriminator_scores,
    gan_leaks,
    halves,
    matched,
    monte_carlo,
    nearest,
)
from fl_dpgan.evaluation.membership import statistics
from fl_dpgan.federation.simulation import Job, serve, simulated_site, split_data
from fl_dpgan.networks import Discriminator, Generator, from_config
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.report.synthetic import run_generator
from fl_dpgan.runs import RunFolder
from tests.conftest import LocalGrid, handler

SITES = 3


def digits(*counts: int) -> list[ImageData]:
    """So many digits each time, no digit twice."""
    data = load("digits", split="train", size=28, channels=1)
    order = np.random.default_rng(0).permutation(len(data))
    return [data.subset(part) for part in np.split(order, np.cumsum(counts))[: len(counts)]]


def auc_of(members, non_members):
    return statistics(members, non_members)["auc"]


def train_without_privacy(generator, discriminator, images, labels, epochs):
    """A plain GAN: neither clipping nor noise."""
    d_optimizer, g_optimizer = (
        torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for net in (discriminator, generator)
    )
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(50):
            drawn = labels[torch.randint(len(labels), (len(batch),))]
            fakes = generator(torch.randn(len(batch), generator.latent_dim), drawn)
            real, fake = discriminator(images[batch], labels[batch]), discriminator(fakes.detach(), drawn)
            step(d_optimizer, softplus(-real).mean() + softplus(fake).mean())
            step(g_optimizer, softplus(-discriminator(fakes, drawn)).mean())


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.slow  # half a minute of training
def test_the_planted_leak_is_found_in_d_and_was_not_there_before_training():
    """500 images under 100 labels drawn at random, five images each, as of a patient: such a D soon knows its records.

    With the ten classes as labels it takes many more epochs than a test has (AUC 0.6 after a minute).
    """
    members, non_members = digits(500, 500)
    random = np.random.default_rng(0)
    labels = {name: random.integers(100, size=500) for name in ("members", "non-members")}
    torch.manual_seed(0)
    shape = {"size": 28, "channels": 1, "num_classes": 100}
    generator, discriminator = Generator(**shape, latent_dim=32, width=16), Discriminator(**shape, width=16)

    def attack():
        return auc_of(
            discriminator_scores(discriminator, members.images, labels["members"]),
            discriminator_scores(discriminator, non_members.images, labels["non-members"]),
        )

    before = attack()
    assert before["interval"][0] < 0.5 < before["interval"][1]
    train_without_privacy(
        generator, discriminator, to_tensor(members.images), torch.from_numpy(labels["members"]), epochs=60
    )
    after = attack()
    assert after["value"] >= 0.9
    assert after["interval"][0] > after["coin"]["range"][1]


class Parrot(nn.Module):
    """A generator that has learnt images by heart and gives them with a little noise."""

    def __init__(self, data: ImageData, noise: float) -> None:
        super().__init__()
        self.num_classes, self.latent_dim, self.noise = len(data.classes), 2, noise
        self.images = nn.Parameter(to_tensor(data.images))
        self.labels = torch.from_numpy(data.labels)

    def forward(self, z, labels):
        """Labels must be all alike."""
        known = self.images[self.labels == labels[0]]
        return known[torch.arange(len(labels)) % len(known)] + self.noise * z[:, :1, None, None]


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(attacks, "_SYNTHETIC", 2000)


def test_synthetic_images_that_repeat_the_members_betray_them(few_images):
    members, non_members, reference = digits(300, 300, 300)
    for name, scores in black_box_scores(Parrot(members, 0.02), members, non_members, reference, seed=0).items():
        found = auc_of(*np.split(scores, 2))
        if name == "control":
            assert found["interval"][0] < 0.5 < found["interval"][1]
        else:
            assert found["value"] > 0.95, name


def test_synthetic_images_of_other_records_betray_nobody(few_images):
    """Of 20 intervals 15 hold 0.5, which fails with probability 3e-4 if each does with 0.95."""
    data, others = digits(1000, 437)
    held = dict.fromkeys(("gan_leaks", "gan_leaks_calibrated", "monte_carlo", "control"), 0)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(data))
        members, non_members, reference = (data.subset(order[i : i + 300]) for i in (0, 300, 600))
        for name, scores in black_box_scores(Parrot(others, 0.02), members, non_members, reference, seed=0).items():
            low, high = auc_of(*np.split(scores, 2))["interval"]
            held[name] += low <= 0.5 <= high
    assert min(held.values()) >= 15, held


def test_distances_scores_and_radius_by_scipy(monkeypatch):
    monkeypatch.setattr(attacks, "_AT_ONCE", 3)  # several passes
    random = np.random.default_rng(0)
    queries, synthetic = (random.normal(size=(n, 5)) for n in (11, 40))
    tensors = torch.from_numpy(queries), torch.from_numpy(synthetic)
    to_synthetic = cdist(queries, synthetic)
    assert nearest(*tensors).numpy() == pytest.approx(to_synthetic.min(1))
    assert gan_leaks(*tensors) == pytest.approx(-to_synthetic.min(1))
    radius = np.median(to_synthetic.min(1))
    assert monte_carlo(*tensors) == pytest.approx((to_synthetic <= radius).mean(1))


def test_every_record_is_compared_with_images_of_its_class_alone(few_images):
    members, non_members, reference, known = digits(50, 50, 300, 300)
    found = black_box_scores(Parrot(known, 0.0), members, non_members, reference, seed=0)
    queries, compared, learnt = (
        np.concatenate([to_tensor(data.images).flatten(1).numpy() for data in several])
        for several in ((members, non_members), (reference,), (known,))
    )
    labels = np.concatenate([members.labels, non_members.labels])
    for label in range(10):
        here = labels == label
        to_reference = cdist(queries[here], compared[reference.labels == label])
        distances = cdist(queries[here], learnt[known.labels == label])
        assert found["gan_leaks"][here] == pytest.approx(-distances.min(1), abs=0.01)
        assert found["control"][here] == pytest.approx(to_reference.min(1), abs=0.01)
        difference = to_reference.min(1) - distances.min(1)
        assert found["gan_leaks_calibrated"][here] == pytest.approx(difference, abs=0.02)
        radius = np.sort(distances.min(1))[(here.sum() - 1) // 2]  # torch's median is the lower of the middle two
        drawn = np.bincount(np.arange(200) % distances.shape[1])  # how often the parrot gives each image
        assert found["monte_carlo"][here] * 200 == pytest.approx((distances <= radius + 1e-3) @ drawn, abs=1)


def test_members_and_non_members_have_the_same_mix_of_classes():
    random = np.random.default_rng(0)
    members, others = random.choice(3, 500, p=[0.7, 0.2, 0.1]), random.choice(4, 300)
    inside, outside = matched(members, others, np.random.default_rng(1))
    assert np.array_equal(members[inside], others[outside])
    for positions in (inside, outside):
        assert len(set(positions.tolist())) == len(positions)
    counts = [min((members == c).sum(), (others == c).sum()) for c in range(4)]
    assert np.bincount(members[inside], minlength=4).tolist() == counts
    again = matched(members, others, np.random.default_rng(1))
    assert np.array_equal(inside, again[0]) and np.array_equal(outside, again[1])


def test_no_class_in_common_means_no_pairs():
    assert [len(side) for side in matched(np.array([0, 0]), np.array([1]), np.random.default_rng(0))] == [0, 0]


def test_at_most_so_many_records_are_attacked(monkeypatch):
    monkeypatch.setattr(attacks, "_RECORDS", 50)
    inside, _ = matched(np.zeros(100, int), np.zeros(200, int), np.random.default_rng(0))
    assert len(set(inside.tolist())) == 50


def test_the_reference_holds_every_class_that_is_attacked_and_no_record_of_it():
    labels = np.array([0] * 9 + [1] * 4 + [2])
    reference, evaluated = halves(labels, np.random.default_rng(0))
    assert sorted([*reference, *evaluated]) == list(range(14))
    assert np.bincount(labels[reference]).tolist() == [4, 2, 1]
    assert np.bincount(labels[evaluated]).tolist() == [5, 2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    """A run on digits, made without Ray; the tests may take files from it, and put them back."""
    narrow = ["model.g_width=2", "model.d_width=2", "model.latent_dim=4"]
    short = ["training.rounds=2", "training.d_steps=1", "training.g_steps=1", "privacy.batch_size=8"]
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", load_scenario("digits", [*narrow, *short]))
    job = Job(folder.path, None)
    serve(job, LocalGrid({n: lambda message, n=n: handler(simulated_site(job, n))(message) for n in range(SITES)}))
    return folder


@pytest.fixture
def attacked(finished, few_images):
    return lambda seed=0: attack_run(finished, run_generator(finished)[0], None, seed=seed)


def named(result):
    return [(row["attack"], row["against"]) for row in result["attacks"]]


AVERAGED = ("logan", "averaged D")
BLACK_BOX = [
    *((name, "synthetic images") for name in ("gan_leaks", "gan_leaks_calibrated", "monte_carlo")),
    ("control", "nothing of the run"),
]


def test_a_run_is_attacked_through_every_d_and_through_its_images(attacked):
    result = attacked()
    json.dumps(result, allow_nan=False)
    assert named(result) == [AVERAGED, *(("logan", f"site-{n}") for n in range(SITES)), *BLACK_BOX]
    assert (result["round"], result["seed"], result["synthetic_images"]) == (2, 0, 2000)
    counts = [row["members"] for row in result["attacks"]]
    assert counts[0] == 360  # all test digits
    assert all(300 < count <= 360 for count in counts[1:4])
    assert result["reference_images"] + counts[4] == 360
    assert result == attacked()
    assert result["attacks"][4] != attacked(seed=1)["attacks"][4]


def test_a_sites_d_is_the_one_that_it_answered_with_on_its_own_records(finished, attacked):
    scenario = finished.scenario
    train, parts = split_data(scenario, None)
    test = load("digits", split="test", size=28, channels=1)
    _, discriminator = from_config(scenario.model, 99)
    _, meta = finished.load_checkpoint()
    rows = {row["against"]: row for row in attacked(seed=3)["attacks"]}
    found = []
    for index, part in enumerate(parts):
        with closing(Ledger(finished.ledger(f"site-{index}"))) as ledger:
            discriminator.load_state_dict(load_tensors(ledger.last_answer(meta["run"]).body))
        inside, outside = matched(train.labels[part], test.labels, np.random.default_rng(3))
        chosen = [train.subset(part[inside]), test.subset(outside)]
        logits = [discriminator(to_tensor(data.images), torch.from_numpy(data.labels)) for data in chosen]
        found.append(roc_auc_score(np.repeat([1, 0], len(inside)), torch.cat(logits).detach().numpy()))
        assert rows[f"site-{index}"]["statistics"]["auc"]["value"] == pytest.approx(found[-1], abs=1e-3)
    assert len(set(found)) == SITES


def test_a_site_without_a_stored_d_is_left_out(finished, attacked):
    path = finished.ledger("site-1")
    aside = path.rename(path.with_suffix(".aside"))
    try:
        assert named(attacked()) == [AVERAGED, ("logan", "site-0"), ("logan", "site-2"), *BLACK_BOX]
        with closing(Ledger(finished.ledger("site-0"))) as ledger:
            account = ledger.account
        Ledger(path, account).close()  # one that has answered nothing
        assert named(attacked()) == [AVERAGED, ("logan", "site-0"), ("logan", "site-2"), *BLACK_BOX]
    finally:
        aside.rename(path)


def copy_with(finished: RunFolder, path: Path, tensors: dict[str, torch.Tensor] | None) -> RunFolder:
    folder = RunFolder.create(path, finished.scenario)
    if tensors is not None:
        folder.save_checkpoint(tensors, finished.load_checkpoint()[1])
    return folder


def test_a_run_without_a_discriminator_is_attacked_through_its_images_alone(finished, few_images, tmp_path):
    tensors, _ = finished.load_checkpoint()
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("discriminator.")}
    folder = copy_with(finished, tmp_path / "run", plain)
    assert named(attack_run(folder, run_generator(finished)[0], None, seed=0)) == BLACK_BOX


def test_a_run_without_a_checkpoint_is_named(finished, tmp_path):
    folder = copy_with(finished, tmp_path / "run", None)
    with pytest.raises(RunFolderError, match="has no checkpoint yet"):
        attack_run(folder, run_generator(finished)[0], None, seed=0)


def test_a_test_set_with_nothing_to_compare_is_named(finished, monkeypatch):
    test = load("digits", split="test", size=28, channels=1)
    monkeypatch.setattr(attacks, "load", lambda *args, **kwargs: test.subset([0]))  # the reference takes it
    with pytest.raises(DataError, match="no two records of a class"):
        attack_run(finished, run_generator(finished)[0], None, seed=0)
