import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from fl_dpgan.errors import ConfigError
from fl_dpgan.moments.discriminant import Discriminant
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.objective import MomentObjective
from fl_dpgan.privacy.moments import Features, Fourier, Frequencies

PARTS = (Fourier(count=20), Frequencies(side=2, weight=3.0))
MAP = FeatureMap(Features(parts=PARTS), (1, 28, 28))
COUNTS = torch.tensor([1000.0, 1000.0, 1000.0])


def images(count=90, seed=0):
    """Three classes: brighter above, brighter on the left, brighter in a corner; with noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    steps = torch.linspace(-0.4, 0.4, 28)
    kinds = torch.stack([-steps[:, None] + 0 * steps, 0 * steps[:, None] - steps, steps[:, None] + steps])
    strength = 0.5 + torch.rand(count, 1, 1, generator=random)
    noise = torch.randn(count, 28, 28, generator=random) * 0.6
    return (kinds[labels] * strength + noise)[:, None].clamp(-1, 1), labels


def means_of(x, labels):
    return torch.stack([MAP(x[labels == label]).mean(0) for label in range(3)])


def fitted(seen=(True, True, True), noise_sd=0.0):
    x, labels = images()
    made = Discriminant(MAP, 3)
    made.fit(means_of(x, labels), torch.tensor(seen), COUNTS, noise_sd)
    return made


def test_the_scores_are_the_log_densities_of_gaussians_with_the_classes_second_moments():
    x, labels = images()
    u = MAP.parts[1].directions((x + 1) / 2).double().numpy()
    found = fitted().scores(x).numpy()
    expected = np.stack(
        [multivariate_normal(np.zeros(4), u[labels == k].T @ u[labels == k] / 30).logpdf(u) for k in range(3)], axis=1
    )
    # up to a constant that is the same for all classes
    np.testing.assert_allclose(found - found[:, :1], expected - expected[:, :1], rtol=1e-3, atol=1e-3)


def test_new_images_are_put_into_their_class():
    x, labels = images(seed=1)
    assert float((fitted().scores(x).argmax(1) == labels).float().mean()) > 0.9


def test_a_direction_lost_in_the_noise_weighs_no_more_than_the_noise():
    noise_sd = 60.0  # 0.06 a mean, over the part's weight
    made = fitted(noise_sd=noise_sd)
    entry = noise_sd / 1000 / MAP.weights[1] / np.sqrt(2)
    largest = torch.linalg.eigvalsh(made.precision.double()).max()
    assert float(largest) == pytest.approx(1 / (3 * entry), rel=1e-3)


def test_a_class_that_is_not_seen_never_wins_and_takes_no_part_in_the_loss():
    made = fitted(seen=(True, False, True))
    x, labels = images(seed=1)
    assert 1 not in made.scores(x).argmax(1)
    x.requires_grad_()
    made(x, labels).backward()
    assert bool(x.grad.isfinite().all())
    assert float(x.grad[labels == 1].abs().max()) == 0 < float(x.grad[labels == 0].abs().max())
    assert float(made(x, torch.ones_like(labels))) == 0


def test_its_gradient_draws_images_into_their_class():
    made = fitted()
    x, labels = images(seed=1)
    wrong = (labels + 1) % 3
    moved = x.clone().requires_grad_()
    for _ in range(60):
        (slope,) = torch.autograd.grad(made(moved, wrong), moved)
        moved = (moved - 30 * slope).detach().requires_grad_()
    before, after = ((made.scores(z).argmax(1) == wrong).float().mean() for z in (x, moved))
    assert float(before) < 0.1 and float(after) > 0.9


def test_everything_it_knows_is_in_a_checkpoint_and_finite():
    made, other = fitted(seen=(True, False, True)), Discriminant(MAP, 3)
    assert all(bool(tensor.isfinite().all()) for tensor in made.state_dict().values())
    other.load_state_dict(made.state_dict())
    x, _ = images()
    assert torch.equal(made.scores(x), other.scores(x))


def test_guidance_without_second_moments_is_refused_with_what_to_add():
    plain = FeatureMap(Features(parts=(Fourier(count=20),)), (1, 28, 28))
    with pytest.raises(ConfigError, match="kind 'frequencies'"):
        MomentObjective(plain, 3, guidance=0.1)
    MomentObjective(plain, 3, guidance=0.0)


def test_the_objective_is_the_moments_and_the_weighted_cross_entropy():
    x, labels = images()
    sums = torch.zeros(3, MAP.length + 1, dtype=torch.float64)
    sums[:, :-1], sums[:, -1] = means_of(x, labels) * 1000, 1000 * MAP.count_weight
    parts = [MomentObjective(MAP, 3, guidance=guidance) for guidance in (0.0, 0.25)]
    for part in parts:
        part.aim(sums, 1e-9)
    y, _ = images(seed=2)
    without, with_it = (float(part(y, labels)) for part in parts)
    assert with_it - without == pytest.approx(0.25 * float(parts[1].discriminant(y, labels)), rel=1e-4)
    assert float(parts[1].discriminant(y, labels)) == pytest.approx(float(fitted()(y, labels)), rel=1e-3)
