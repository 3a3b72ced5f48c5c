import pytest
import torch
from torch.nn.functional import softplus

from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.training.generator import GeneratorTrainer, adversarial, cosine

torch.set_num_threads(1)


def discriminator():
    torch.manual_seed(5)
    return Discriminator(size=28, channels=1, num_classes=3, width=2)


def trainer(decay=0.9):
    torch.manual_seed(6)
    generator = Generator(size=28, channels=1, num_classes=3, latent_dim=4, width=2)
    return GeneratorTrainer(generator, ema_decay=decay)


def train(t, d, steps, *, seed):
    return t.update(adversarial(d), [1e-2] * steps, batch_size=8, seed=seed)


def copied(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_average_after_one_step_equals_a_computation_by_hand(decay):
    t = trainer(decay)
    old = copied(t.generator)
    train(t, discriminator(), 1, seed=1)
    new = copied(t.generator)
    assert not torch.equal(old["project.0.weight"], new["project.0.weight"])
    for key, value in t.average.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, decay * old[key] + (1 - decay) * new[key], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, new[key])


def test_the_average_after_three_steps_is_that_of_three_single_steps():
    t, by_hand = trainer(0.8), trainer(0.8)
    train(t, discriminator(), 1, seed=1)
    mean = {k: 0.8 * v for k, v in copied(by_hand.generator).items() if v.is_floating_point()}
    mean = {k: m + 0.2 * copied(t.generator)[k] for k, m in mean.items()}
    for seed in (2, 3):
        train(t, discriminator(), 1, seed=seed)
        mean = {k: 0.8 * m + 0.2 * copied(t.generator)[k] for k, m in mean.items()}
    for key, expected in mean.items():
        torch.testing.assert_close(t.average.state_dict()[key], expected, rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_a_bit_identical_generator_and_another_seed_another():
    trainers = [trainer() for _ in range(3)]
    losses = [train(t, discriminator(), 3, seed=seed) for t, seed in zip(trainers, (7, 7, 8), strict=True)]
    same, again, other = (copied(t.generator) for t in trainers)
    assert losses[0] == losses[1] != losses[2]
    assert all(torch.equal(same[key], again[key]) for key in same)
    assert all(torch.equal(a, b) for a, b in zip(*(copied(t.average).values() for t in trainers[:2]), strict=True))
    assert not torch.equal(same["project.0.weight"], other["project.0.weight"])


def test_the_same_seed_does_not_depend_on_torchs_global_generator():
    first, second = trainer(), trainer()
    torch.manual_seed(100)
    train(first, discriminator(), 1, seed=7)
    d = discriminator()
    torch.manual_seed(200)
    train(second, d, 1, seed=7)
    assert torch.equal(first.generator.project[0].weight, second.generator.project[0].weight)


def test_an_update_leaves_the_discriminators_weights_and_lets_them_be_trained_again():
    d = discriminator()
    before = copied(d)
    train(trainer(), d, 2, seed=1)
    assert all(torch.equal(value, before[key]) for key, value in d.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in d.parameters())


def test_the_loss_is_the_non_saturating_one():
    t, d = trainer(), discriminator()
    random = torch.Generator().manual_seed(4)
    z = torch.randn(8, 4, generator=random)
    labels = (torch.arange(8) + torch.randint(3, (), generator=random)) % 3
    expected = softplus(-d(trainer().generator.train()(z, labels), labels)).mean()
    assert train(t, d, 1, seed=4) == pytest.approx(float(expected), rel=1e-6)


def test_steps_against_a_fixed_discriminator_lower_the_loss():
    t, d = trainer(), discriminator()
    first = train(t, d, 1, seed=1)
    train(t, d, 30, seed=2)
    assert train(t, d, 1, seed=1) < first


def test_the_average_is_not_trained_and_stays_in_evaluation_mode():
    t = trainer()
    train(t, discriminator(), 1, seed=1)
    assert not t.average.training
    assert not any(p.requires_grad for p in t.average.parameters())


def test_the_learning_rate_rises_within_twenty_steps_and_falls_along_a_cosine_to_a_twentieth():
    rates = [cosine(step, 400, 2.0) for step in range(400)]
    assert rates[0] == pytest.approx(2.0 / 20) and rates[200] == pytest.approx(2.0 * (0.05 + 0.95 / 2))
    assert max(rates) == rates[19] == pytest.approx(2.0, rel=0.01)
    assert rates[-1] == pytest.approx(2.0 * 0.05, rel=0.01) and rates[20:] == sorted(rates[20:], reverse=True)


def test_every_class_comes_as_often_as_the_others():
    seen = []
    t = trainer()
    t.update(lambda images, labels: (seen.append(labels), images.mean())[1], [1e-3] * 30, batch_size=9, seed=0)
    assert all(torch.equal(torch.bincount(labels, minlength=3), torch.tensor([3, 3, 3])) for labels in seen)
    assert len({int(labels[0]) for labels in seen}) == 3  # not always the same first
