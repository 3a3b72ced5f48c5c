"""Moment releases and image gradients under hostile requests: charged, noised throughout, and bounded in one record."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import LocalGrid, grid_sent
from hostile import MOST_BATCH, MOST_MOMENTS, MOST_STEPS, RELEASES, Hostile, generate
from safetensors.torch import load
from test_hostile import KINDS, PAID, PLAN, POLICY, Attack, Draws, Outcome, Victim, genuine, images, networks
from torch import nn

from fl_dpgan.config import Plan
from fl_dpgan.federation import FedDPGAN, wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.federation.gs_wgan import GSWGAN
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.release import noised_sums
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.moments import Features, Fourier
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.evaluation import noised_count
from fl_dpgan.training.records import Records

BLOCK = 100  # for each kind of neighbours one block: 600 requests
SHARE = 0.3  # of requests with such changes alone as the schema and the policy allow
PARTS = [{"kind": "fourier", "count": 20}, {"kind": "wavelets", "count": 20, "side": 2}]
MOMENTS = PLAN.model_dump() | {
    # of so small a share that the noise is above the policy's least
    "privacy": {**PLAN.privacy.model_dump(), "moments": {"features": {"parts": PARTS}, "share": 0.005}},
    "matching": {"rounds": 1, "g_steps": 1, "batch_size": 4},
}
GRADIENTS = PLAN.model_dump() | {
    "privacy": {**PLAN.privacy.model_dump(), "evaluation_noise": None, "update": "image_gradient"}
}


class ReleasingVictim(Victim):
    """One whose policy allows every mechanism."""

    policy = POLICY.model_copy(
        update={
            "mechanisms": ("discriminator_update", "evaluation_count", "moment_release", "image_gradient"),
            "largest_moments": MOST_MOMENTS,
        }
    )

    def check_paid(self, hostile: Hostile, outcome: Outcome) -> None:
        if outcome.status != "released":
            super().check_paid(hostile, outcome)
            return
        request, charge = self.check_booked(hostile, outcome), outcome.after.charge
        plan, (_, tensors) = request.plan, wire.unpack(hostile.message(), wire.Request)
        assert not plan.non_private, hostile.done
        if request.mechanism == "moment_release":
            assert not tensors, hostile.done
            sigma, norm, reads = plan.moment_noise, 0.0, [len(self.data.units)]
            name, shape, kind = "sums", (2, plan.moments.numbers + 1), torch.float64
            assert plan.moments.numbers <= MOST_MOMENTS
        else:
            assert request.mechanism == plan.update == "image_gradient", hostile.done
            check_images(load(tensors), plan.batch_size)
            sigma, norm, reads = plan.noise_multiplier, plan.clipping.largest, [plan.batch_size] * plan.d_steps
            name, shape, kind = "gradient", (plan.batch_size, 1, 28, 28), torch.float32
            assert plan.batch_size <= MOST_BATCH and plan.d_steps <= MOST_STEPS
        priced = (charge["mechanism"], charge["sample_rate"], charge["noise_multiplier"], charge["count"])
        assert priced == (request.mechanism, 1.0, sigma, 1), hostile.done
        assert charge["clipping_norm"] == norm
        assert outcome.reads == reads, hostile.done
        ((found, released),) = load(outcome.body).items()
        assert (found, tuple(released.shape), released.dtype) == (name, shape, kind), hostile.done
        assert outcome.normals == released.numel(), hostile.done  # every number gets its noise
        grid = grid_of(request)
        assert torch.equal((released.double() / grid).round() * grid, released.double()), hostile.done


def check_images(given: dict[str, torch.Tensor], size: int) -> None:
    assert given.keys() == {"images", "labels"}
    assert given["images"].shape == (size, 1, 28, 28) and given["images"].abs().max() <= 1
    assert given["labels"].shape == (size,) and set(given["labels"].tolist()) <= {0, 1}


def sensitivity(request: wire.Request) -> float:
    """The most by which the numbers move with one record more or less: by a unit's vector, or by every gradient."""
    plan = request.plan
    return 1.0 if request.mechanism == "moment_release" else 2 * plan.clipping.largest * math.sqrt(plan.batch_size)


def grid_of(request: wire.Request) -> float:
    """The power of two at or below a thousandth of the noise's standard deviation."""
    plan = request.plan
    sigma = plan.moment_noise if request.mechanism == "moment_release" else plan.noise_multiplier
    return 2.0 ** (math.frexp(sigma * sensitivity(request) / 1024)[1] - 1)


class Releases(Attack):
    """Hostile requests for all four mechanisms, most of them for the two that answer `released`."""

    victim = ReleasingVictim

    def __init__(self, path: Path, kind: str, seed: int) -> None:
        super().__init__(path, kind, seed)
        self.replaced = kind in ("bright", "huge", "one pixel")
        self.moved: dict[str, list[float]] = {"moment_release": [], "image_gradient": []}

    def genuine(self, path: Path) -> tuple[Hostile, ...]:
        return *genuine(self.victims[0], path), *genuine_releases(self.victims[0], path)

    def base(self) -> Hostile:
        return self.source.choices(self.bases, weights=[1, 1, 6, 4])[0]

    def generate(self, base: Hostile) -> Hostile:
        return generate(self.source, base, share=SHARE, mutators=RELEASES)

    def send(self, hostile: Hostile) -> list[Outcome]:
        """As before; and what the two sites released, with the same noise, is no further apart than was paid for."""
        outcomes = super().send(hostile)
        if outcomes[0].status == "released":
            request, _ = wire.unpack(hostile.message(), wire.Request)
            self.tally[f"released {request.mechanism}"] += 1
            self.check_moved(request, *(next(iter(load(outcome.body).values())) for outcome in outcomes))
        return outcomes

    def check_moved(self, request: wire.Request, one: torch.Tensor, other: torch.Tensor) -> None:
        # a replaced record is one less and another one more; a gradient's bound is for any two critics
        most = sensitivity(request) * (2 if self.replaced and request.mechanism == "moment_release" else 1)
        moved, grid = float((one.double() - other.double()).norm()), grid_of(request)
        rounding = grid * math.sqrt(one.numel()) + 1e-4 * most  # of each number to the grid, and of the features
        assert moved <= most + rounding, (moved, most, rounding, request.plan)
        if rounding < 0.1 * most:  # else the rounding alone could fill the bound
            self.moved[request.mechanism].append(moved / most)


def genuine_releases(victim: Victim, path: Path) -> tuple[Hostile, Hostile]:
    """The strategies' own requests to a site: for a moment release, and for gradients of fakes."""
    generator, discriminator, classifier = networks()
    grid = LocalGrid({1: Pack([victim.site]).hello})
    (path / "moments").mkdir(exist_ok=True)
    (path / "gradients").mkdir(exist_ok=True)
    matching = FedDPGAN(
        Plan.model_validate(MOMENTS), generator, discriminator, folder=RunFolder(path / "moments"), run="test",
        train_classifier=lambda *_: classifier,
    )  # fmt: skip
    gs_wgan = GSWGAN(
        Plan.model_validate(GRADIENTS), generator, discriminator, folder=RunFolder(path / "gradients"), run="test"
    )
    for strategy in (matching, gs_wgan):
        strategy._join(grid)
    (release,) = matching._exchange.requests(1, b"", "moment_release", grid.get_node_ids())
    (gradient,) = gs_wgan.configure_train(10, None, None, grid)
    made = []
    for message in (release, gradient):
        header, tensors = wire.unpack(grid_sent(message), wire.Request)
        fields = {"state": load(tensors)} if tensors else {"state": {}, "body": b""}
        made.append(Hostile(header=header.model_dump(mode="json"), method="train", **fields))
    return made[0], made[1]


@pytest.fixture
def counted_noise(monkeypatch) -> None:
    """Count the Gaussian numbers that are drawn, but for those of the matrix that all parties share."""
    plain, seeded = KeyedGenerator.normal, KeyedGenerator.from_seed

    def from_seed(*parts):
        made = seeded(*parts)
        made.public = parts[0] in ("fourier", "wavelets")
        return made

    def normal(self, count):
        Draws.normals += 0 if self.public else count
        return plain(self, count)

    monkeypatch.setattr(KeyedGenerator, "from_seed", from_seed)
    monkeypatch.setattr(KeyedGenerator, "normal", normal)


@pytest.mark.slow
def test_invariants_1_2_4_7_hostile_requests_for_releases_get_no_more_than_what_is_charged(tmp_path, counted_noise):
    tally: Counter[str] = Counter()
    moved: dict[str, list[float]] = {"moment_release": [], "image_gradient": []}
    for number, kind in enumerate(KINDS):
        attack = Releases(tmp_path / str(number), kind, seed=number + 200)
        attack.run(BLOCK)
        tally += attack.tally
        for mechanism, shares in attack.moved.items():
            moved[mechanism] += shares
    print(f"\n{len(KINDS) * BLOCK} hostile requests, each to two sites that differ in one record")
    for what, times in tally.most_common():
        print(f"{times:6d} {what}")
    for mechanism, shares in moved.items():
        print(f"{max(shares):6.3f} of {mechanism}'s sensitivity was reached at most")
    assert tally["released moment_release"] >= 120 and tally["released image_gradient"] >= 60
    assert max(moved["moment_release"]) > 0.9  # a bound that nothing comes near would show nothing
    assert max(moved["image_gradient"]) > 0
    for rule in ("wire", "non_private", "update", "least_noise_multiplier", "largest_moments", "repeated"):
        assert tally[f"refused {rule}"], rule
    assert all(tally[f"genuine {status}"] for status in PAID)


@pytest.mark.parametrize("count", [2, 12, 13, 33, 129])
def test_invariant_1_one_record_moves_a_release_by_1_at_any_scale_that_the_schema_allows(count):
    """At such a scale rounding decides on the angles, and in a batch it would depend on the other records."""
    features = FeatureMap(Features(parts=[Fourier(count=2, scales=(1e-20,))]), (1, 28, 28))
    event, pictures = Event(1.0, 0.01, 1, "moment_release"), images(count)

    def released(some: torch.Tensor) -> torch.Tensor:
        data = Records(some, torch.zeros(len(some), dtype=torch.int64))
        return noised_sums(features, data, 1, event, KeyedGenerator.from_seed(0))  # always the same noise

    whole, *less = (released(some) for some in (pictures, pictures[1:], pictures[:-1]))
    assert max(float((whole - fewer).norm()) for fewer in less) <= 1.001


@pytest.mark.parametrize("count", [2, 13, 513])
def test_invariant_1_one_record_moves_a_count_by_half_where_rounding_decides_between_two_classes(count):
    torch.manual_seed(0)
    layer = nn.Linear(28 * 28, 2, bias=False)
    with torch.no_grad():
        layer.weight[0] = torch.randn(28 * 28) * 1e3
        layer.weight[1] = layer.weight[0] * (1 + 2**-23)
    classifier = nn.Sequential(nn.Flatten(), layer)
    event, pictures = Event(1.0, 0.5, 1, "evaluation_count"), images(count)

    def counted(some: torch.Tensor) -> float:
        data = Records(some, torch.zeros(len(some), dtype=torch.int64))
        return noised_count(classifier, data, event, KeyedGenerator.from_seed(0))

    whole, *less = (counted(some) for some in (pictures, pictures[1:], pictures[:-1]))
    assert max(abs(whole - fewer) for fewer in less) <= 0.5 + 0.001
