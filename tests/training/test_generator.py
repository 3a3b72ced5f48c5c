import pytest
import torch
from torch.nn.functional import softplus

from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.training.generator import GeneratorTrainer

torch.set_num_threads(1)


def discriminator():
    torch.manual_seed(5)
    return Discriminator(size=28, channels=1, num_classes=3, width=2)


def trainer(decay=0.9):
    torch.manual_seed(6)
    generator = Generator(size=28, channels=1, num_classes=3, latent_dim=4, width=2)
    return GeneratorTrainer(generator, learning_rate=1e-2, batch_size=8, ema_decay=decay)


def copied(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_average_after_one_step_equals_a_computation_by_hand(decay):
    t = trainer(decay)
    old = copied(t.generator)
    t.update(discriminator(), 1, seed=1)
    new = copied(t.generator)
    assert not torch.equal(old["project.0.weight"], new["project.0.weight"])
    for key, value in t.average.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, decay * old[key] + (1 - decay) * new[key], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, new[key])


def test_the_average_after_three_steps_is_that_of_three_single_steps():
    t, by_hand = trainer(0.8), trainer(0.8)
    t.update(discriminator(), 1, seed=1)
    mean = {k: 0.8 * v for k, v in copied(by_hand.generator).items() if v.is_floating_point()}
    mean = {k: m + 0.2 * copied(t.generator)[k] for k, m in mean.items()}
    for seed in (2, 3):
        t.update(discriminator(), 1, seed=seed)
        mean = {k: 0.8 * m + 0.2 * copied(t.generator)[k] for k, m in mean.items()}
    for key, expected in mean.items():
        torch.testing.assert_close(t.average.state_dict()[key], expected, rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_a_bit_identical_generator_and_another_seed_another():
    trainers = [trainer() for _ in range(3)]
    losses = [t.update(discriminator(), 3, seed=seed) for t, seed in zip(trainers, (7, 7, 8), strict=True)]
    same, again, other = (copied(t.generator) for t in trainers)
    assert losses[0] == losses[1] != losses[2]
    assert all(torch.equal(same[key], again[key]) for key in same)
    assert all(torch.equal(a, b) for a, b in zip(*(copied(t.average).values() for t in trainers[:2]), strict=True))
    assert not torch.equal(same["project.0.weight"], other["project.0.weight"])


def test_the_same_seed_does_not_depend_on_torchs_global_generator():
    first, second = trainer(), trainer()
    torch.manual_seed(100)
    first.update(discriminator(), 1, seed=7)
    d = discriminator()
    torch.manual_seed(200)
    second.update(d, 1, seed=7)
    assert torch.equal(first.generator.project[0].weight, second.generator.project[0].weight)


def test_an_update_leaves_the_discriminators_weights_and_lets_them_be_trained_again():
    d = discriminator()
    before = copied(d)
    trainer().update(d, 2, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in d.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in d.parameters())


def test_the_loss_is_the_non_saturating_one():
    t, d = trainer(), discriminator()
    random = torch.Generator().manual_seed(4)
    z = torch.randn(8, 4, generator=random)
    labels = torch.randint(3, (8,), generator=random)
    expected = softplus(-d(trainer().generator.train()(z, labels), labels)).mean()
    assert t.update(d, 1, seed=4) == pytest.approx(float(expected), rel=1e-6)


def test_steps_against_a_fixed_discriminator_lower_the_loss():
    t, d = trainer(), discriminator()
    first = t.update(d, 1, seed=1)
    t.update(d, 30, seed=2)
    assert t.update(d, 1, seed=1) < first


def test_the_average_is_not_trained_and_stays_in_evaluation_mode():
    t = trainer()
    t.update(discriminator(), 1, seed=1)
    assert not t.average.training
    assert not any(p.requires_grad for p in t.average.parameters())
