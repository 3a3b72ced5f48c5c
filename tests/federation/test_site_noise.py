"""What sites answer with shares no noise: not between sites, rounds, mechanisms, processes or threads.

Where sites have seeds, a test either always passes or always fails, and an error rate is that of correct sites over the
choice of the seed. Where they draw from the operating system, a test fails by chance less than once in 10^9 times.
"""

import os
import random
import threading
import time

import numpy as np
import torch
from flwr.app import MessageType
from safetensors.torch import load, save

from fl_dpgan.baselines import kept
from fl_dpgan.baselines.critic import Critic
from fl_dpgan.baselines.gs_wgan import clipped_gradients
from fl_dpgan.federation import Policy, Records, Site, wire
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.release import unit_vectors
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.accountant import MECHANISMS
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.privacy.moments import Features, Fourier
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.models import Models
from tests.federation.forks import Forks
from tests.privacy.gaussian import assert_standard, assert_unrelated
from tests.training.released import watched

torch.set_num_threads(1)

ERROR = 1e-4
#: Of an assertion without a seed; less than promised, for a sum of products of Gaussians is only nearly Gaussian.
RARE = 1e-10
SIZE, B, RATE = 40, 24, 1e-3


def networks():
    torch.manual_seed(0)
    shape = {"size": 28, "channels": 1, "num_classes": 2}
    return Generator(**shape, latent_dim=4, width=2), Discriminator(**shape, width=20)


def records(seed=1):
    images = torch.rand(SIZE, 1, 28, 28, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return Records(images, torch.arange(SIZE) % 2)


POLICY = Policy(declared_size=SIZE, eps_max=1000, eps_per_run=1000, mechanisms=MECHANISMS)
PLAN = SitePlan(
    declared_size=SIZE, batch_size=B, d_steps=2, rounds=4, noise_multiplier=1.5, eps_max=1000.0, delta=1e-5,
    order=POLICY.ledger_order, clipping={"rule": "fixed", "c": 0.5}, moment_noise=2.0,
    moments=Features(parts=(Fourier(count=9000),)),
)  # fmt: skip


class Answering:
    """A site of its own folder, and the noise in its answers."""

    def __init__(self, folder, name="site-0", **seed):
        self.path = folder / f"{name}.sqlite"
        folder.mkdir(parents=True, exist_ok=True)
        Ledger(self.path, POLICY.account(name)).close()
        self.models, self.name, self.data = Models(*networks()), name, records()
        self.site = Site(
            name, self.data, policy=POLICY, models=self.models, ledger=self.path, learning_rate=RATE, **seed
        )

    def ask(self, mechanism, number, tensors, plan=PLAN, run="noise"):
        request = wire.Request(run=run, round=number, site=self.name, plan=plan, mechanism=mechanism)
        header, body = self.site.answer(request.model_dump_json(), tensors, MessageType.TRAIN)
        answer = wire.parse(header, wire.Answer)
        assert answer.status in ("trained", "released"), answer.reason
        return load(body)

    def update(self, number=1, run="noise"):
        """The standard noise of a round's D steps, (d_steps, numbers of D)."""
        generator, discriminator = networks()
        engine = self.models.engine
        with watched() as steps:
            self.models.engine = steps.of(engine)
            weights = wire.dump(discriminator=discriminator, generator=generator)
            released = self.ask("discriminator_update", number, weights, run=run)
            self.models.engine = engine
        if number == 1:
            self.assert_followed(discriminator, steps.gradients, released)
        return steps.noise(B) / PLAN.noise_multiplier

    def assert_followed(self, discriminator, gradients, released):
        """What was released is what Adam makes of those gradients and of nothing else."""
        optimizer = torch.optim.Adam(discriminator.parameters(), lr=RATE, betas=(0.5, 0.99))
        parameters = list(discriminator.parameters())
        for gradient in gradients:
            parts = gradient.float().split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
        for name, parameter in discriminator.named_parameters():
            torch.testing.assert_close(released[name], parameter.detach())

    def moments(self, number=1):
        """The standard noise of a moment release, one after another."""
        sums = self.ask("moment_release", number, b"")["sums"]
        features, exact = FeatureMap(PLAN.moments, self.models.image_shape), torch.zeros_like(sums)
        for image, label in zip(self.data.images, self.data.labels, strict=True):
            exact[label] += unit_vectors(features, image[None])[0]
        return ((sums - exact) / PLAN.moment_noise).numpy().ravel()

    def gradient(self, number=1):
        """The standard noise of an image gradient, one number after another."""
        plan = PLAN.model_copy(update={"update": "image_gradient"})
        images = torch.rand(B, 1, 28, 28, generator=torch.Generator().manual_seed(9)) * 2 - 1
        labels = torch.arange(B) % 2
        found = self.ask("image_gradient", number, save({"images": images, "labels": labels}), plan, "critic")
        file = kept.beside(self.path, "critic", "main")
        critic = Critic(file, self.models.initial_discriminator, learning_rate=RATE).module
        exact = clipped_gradients(critic, images, labels, 0.5, plan.clipping)
        return ((found["gradient"].double() - exact) / (1.5 * 2 * 0.5 * B**0.5)).numpy().ravel()


def test_sites_of_one_seed_share_no_noise_in_any_step_round_or_mechanism(tmp_path):
    rows = []
    for name in ("site-0", "site-1"):
        site = Answering(tmp_path, name, seed=7)
        rows += [*site.update(1), *site.update(2), site.moments(1), site.gradient(1)]
    for row in rows:
        assert_standard(row, ERROR / len(rows))
    shortest = min(map(len, rows))
    assert shortest > 16_000
    assert_unrelated(np.stack([row[:shortest] for row in rows]), ERROR)


def test_invariant_8_what_a_deployed_site_draws_follows_from_32_bytes_of_the_operating_system_for_each_answer(
    tmp_path, monkeypatch
):
    keys, taken = [bytes([n]) * 32 for n in (1, 1, 2, 3)], []

    def urandom(count):
        taken.append(count)
        return keys[len(taken) - 1]

    sites = [Answering(tmp_path / str(n)) for n in range(3)]
    monkeypatch.setattr(os, "urandom", urandom)
    one, again, other = (site.update() for site in sites)
    next_one = sites[2].update(2)
    assert taken == [32, 32, 32, 32]
    assert np.array_equal(one, again)
    assert_unrelated(np.concatenate([one, other, next_one]), ERROR)


def test_invariant_8_a_process_forked_from_a_deployed_site_does_not_repeat_it(tmp_path):
    site = Answering(tmp_path)
    before = site.update(run="before")
    forks = Forks(lambda: site.update(run="fork"))
    forks.go()
    rows = np.concatenate([before, site.update(run="parent"), *forks.found()])
    assert_standard(rows, RARE)
    assert_unrelated(rows, RARE)


def test_invariant_8_two_deployed_sites_begun_alike_at_one_instant_share_no_noise(tmp_path):
    def alike(site):
        """Both are copies of one process, begin at one instant, and clock and process id stand still."""
        for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
            setattr(time, name, lambda: 1)
        os.getpid = os.getppid = lambda: 4711
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return site.update()

    one, other = (Answering(tmp_path / name) for name in ("one", "other"))
    forks = Forks(lambda: alike(one), lambda: alike(other))
    forks.go()
    rows = np.concatenate(forks.found())
    assert_standard(rows, RARE)
    assert_unrelated(rows, RARE)


def test_invariant_8_two_threads_of_a_process_share_no_noise(tmp_path):
    sites, found = [Answering(tmp_path / str(n)) for n in range(2)], {}
    barrier = threading.Barrier(2)

    def answer(number):
        barrier.wait()
        found[number] = sites[number].update()

    threads = [threading.Thread(target=answer, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_unrelated(np.concatenate([found[0], found[1]]), RARE)


def test_invariant_2_a_fork_within_an_answer_comes_to_the_same_answer_and_not_to_a_second_draw():
    # both go on with one stream; two draws on one sum, for one charge, would be less noise than was charged for
    generator, discriminator = networks()
    found, told = os.pipe()
    children = []

    class Forking(LayerEngine):
        def clipped_sum(self, *arguments):
            result = super().clipped_sum(*arguments)
            if len(steps.gradients) == PLAN.d_steps - 1:
                children.append(os.fork())
            return result

    try:
        with watched() as steps:
            local_update(
                discriminator, generator, torch.optim.SGD(discriminator.parameters(), lr=RATE), records(), PLAN,
                first_step=0, random=KeyedGenerator.from_os(), engine=Forking,
            )  # fmt: skip
        gradients = torch.stack(steps.gradients).numpy()
        if children == [0]:
            with open(told, "wb") as pipe:
                pipe.write(gradients.tobytes())
    finally:
        if children == [0]:
            os._exit(0)
    os.close(told)
    with open(found, "rb") as pipe:
        of_the_child = pipe.read()
    os.waitpid(children[0], 0)
    assert of_the_child == gradients.tobytes()
    assert len(gradients) == PLAN.d_steps
