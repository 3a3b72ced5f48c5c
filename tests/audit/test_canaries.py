"""Canaries: half of them in, each with a gradient of its own that the rule clips like any other."""

import numpy as np
import pytest
import torch
from scipy import stats

from fl_dpgan.audit.canaries import Coordinates, draw_canaries, planted
from fl_dpgan.errors import ConfigError
from fl_dpgan.networks import Discriminator
from fl_dpgan.privacy.clipping import Automatic, Fixed
from fl_dpgan.privacy.layers import LayerEngine

torch.set_num_threads(1)
SHAPE = (1, 28, 28)


def discriminator():
    torch.manual_seed(0)
    return Discriminator(size=28, channels=1, num_classes=2, width=2)


def flat(parts):
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_half_of_the_canaries_join_the_records(kind):
    drawn = draw_canaries(kind, 1000, SHAPE, 2, seed=1)
    assert stats.binomtest(int(drawn.included.sum()), 1000).pvalue > 1e-4
    images, labels = drawn.join(torch.zeros(7, *SHAPE), torch.zeros(7, dtype=torch.int64))
    assert len(images) == len(labels) == 7 + drawn.included.sum()
    assert torch.equal(images[7:], drawn.images[torch.from_numpy(drawn.included)])
    assert len(drawn.images.flatten(1).unique(dim=0)) == 1000
    assert set(drawn.labels.tolist()) == {0, 1}


def test_the_same_seed_draws_the_same_canaries_and_another_seed_others():
    first, again, other = (draw_canaries("input", 50, SHAPE, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images) and np.array_equal(first.included, again.included)
    assert not torch.equal(first.images, other.images) and not np.array_equal(first.included, other.included)


@pytest.mark.parametrize("rule", [Fixed(c=0.7), Automatic(c=0.7)])
def test_planted_gradients_join_the_sum_clipped_and_leave_the_others_as_they_are(rule):
    d, drawn = discriminator(), draw_canaries("gradient", 3, SHAPE, 2, seed=3)
    coordinates = Coordinates.draw(3, sum(p.numel() for p in d.parameters()), seed=3)
    others, labels = torch.rand(4, *SHAPE) * 2 - 1, torch.tensor([0, 1, 0, 1])
    plain, norms = LayerEngine(discriminator()).clipped_sum(others, labels, torch.ones(4), 0.7, rule)
    # canaries 2 and 0 among the others
    images = torch.cat([others[:1], drawn.images[2:], others[1:], drawn.images[:1]])
    mixed = torch.cat([labels[:1], drawn.labels[2:], labels[1:], drawn.labels[:1]])
    found, found_norms = planted(LayerEngine, coordinates)(d).clipped_sum(images, mixed, torch.ones(6), 0.7, rule)
    added = flat(found) - flat(plain)
    length = 0.7 if rule.rule == "fixed" else 0.7 * 7 / 7.01  # C g / (|g| + 0.01), |g| = 10 C
    expected = torch.zeros_like(added)
    for number in (2, 0):
        expected[coordinates.places[number]] = coordinates.signs[number] * length / 16**0.5
    assert float(expected.norm()) == pytest.approx(length * 2**0.5)
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_norms[[0, 2, 3, 4]], norms)
    assert (found_norms[[1, 5]] > 0.7).all()
    assert [part.shape for part in found] == [p.shape for p in d.parameters()]


def test_each_canary_has_places_of_its_own_and_scores_what_moves_against_its_gradient():
    coordinates = Coordinates.draw(20, 70, seed=4)
    assert coordinates.places.shape == (20, 3) and len(coordinates.places.unique()) == 60
    moved = torch.zeros(70)
    moved[coordinates.places[5]] = -2 * coordinates.signs[5]
    assert coordinates.scores(moved).tolist() == [0.0] * 5 + [6.0] + [0.0] * 14


def test_more_canaries_than_parameters_are_refused():
    with pytest.raises(ConfigError, match="21 gradient canaries"):
        Coordinates.draw(21, 20, seed=0)
