import torch

from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.matching import MomentMatching, class_means
from fl_dpgan.privacy.moments import Features, Fourier, Wavelets

MAP = FeatureMap(Features(parts=(Fourier(count=30), Wavelets(count=30, side=2))), (1, 28, 28))


def matching(target=None, seen=(True, True), decay=0.9):
    made = MomentMatching(MAP, 2, decay=decay)
    if target is None:
        target = torch.randn(2, MAP.length, generator=torch.Generator().manual_seed(3))
    made.aim(sums_of(target, seen), 1e-3)
    return made


def sums_of(means, seen):
    """What sites with ten units of each class release, without noise; of a class that is not seen, with no unit."""
    counts = 10.0 * torch.tensor(seen)[:, None]
    return torch.cat([means * counts, MAP.count_weight * counts], dim=1).double()


def images(seed=0, count=8):
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed)) * 2 - 1


LABELS = torch.arange(8) % 2


def test_means_are_sums_over_counts_and_classes_lost_in_the_noise_are_left_out():
    sums = torch.tensor([[10.0, 20.0, 5.0], [1.0, 1.0, 0.4], [3.0, 3.0, -2.0]], dtype=torch.float64)
    means, seen = class_means(sums, count_weight=0.5, noise_sd=0.1)
    assert seen.tolist() == [True, False, False]
    assert torch.allclose(means, torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))


def test_the_first_gradient_is_half_that_of_the_squared_distance():
    made, x = matching(), images().requires_grad_()
    made(x, LABELS).backward()
    y = x.detach().clone().requires_grad_()
    means = torch.stack([MAP(y[c == LABELS]).mean(0) for c in range(2)])
    ((made.target - means).square().sum() / 2).backward()
    torch.testing.assert_close(x.grad, y.grad / 2, rtol=1e-4, atol=1e-7)


def test_the_running_mean_weighs_each_batch_by_how_many_images_of_the_class_came_with_it_and_after_it():
    made = matching(decay=0.5)
    labels = [torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])]
    batches = [images(seed, 3) for seed in range(3)]
    for batch, its in zip(batches, labels, strict=True):
        made(batch, its)
    mean = [[MAP(b[its == c]).mean(0) for b, its in zip(batches, labels, strict=True)] for c in range(2)]
    first = (mean[0][0] * 0.75 / 4 + mean[0][1] * 0.5 / 2 + mean[0][2] * 0.5) / 0.9375
    second = (mean[1][0] * 0.5 / 16 + mean[1][1] * 0.75 / 4 + mean[1][2] * 0.75) / 0.96875
    torch.testing.assert_close(made.mean / made.weight[:, None], torch.stack([first, second]), rtol=1e-5, atol=1e-7)


def test_the_loss_vanishes_where_earlier_batches_match_and_a_class_that_is_not_seen_takes_no_part():
    means = torch.stack([MAP(images()[c == LABELS]).mean(0) for c in range(2)])
    assert float(matching(means)(images(), LABELS).abs()) < 1e-6
    made, x = matching(seen=(True, False)), images().requires_grad_()
    made(x, LABELS).backward()
    assert float(x.grad[LABELS == 1].abs().max()) == 0 < float(x.grad[LABELS == 0].abs().max())


def test_a_class_that_is_absent_from_a_batch_keeps_its_running_mean():
    made = matching()
    made(images(), LABELS)
    before = made.mean.clone()
    made(images(1), torch.zeros(8, dtype=torch.int64))
    assert torch.equal(made.mean[1], before[1]) and not torch.equal(made.mean[0], before[0])


def test_matching_does_not_reward_images_that_differ_less():
    """With the target at the true mean, the expected gradient is zero; that of the batch's own square is not."""
    random = torch.Generator().manual_seed(0)
    pool = torch.rand(4000, 1, 28, 28, generator=random) * 2 - 1
    made = MomentMatching(MAP, 1, decay=0.99)
    made.aim(sums_of(MAP(pool).mean(0, keepdim=True), (True,)), 1e-3)
    scale = torch.ones(1, requires_grad=True)  # of the images' deviation from their mean: below 1, they differ less
    centre = pool.mean(0)

    def shrunk(batch):
        return centre + scale * (batch - centre)

    own, running = [], []
    for start in range(0, 4000, 8):
        batch = pool[start : start + 8]
        loss = made(shrunk(batch), torch.zeros(8, dtype=torch.int64))
        running.append(float(torch.autograd.grad(loss, scale)[0]))
        square = (made.target[0] - MAP(shrunk(batch)).mean(0)).square().sum() / 2
        own.append(float(torch.autograd.grad(square, scale)[0]))
    ours, theirs = torch.tensor(running[50:]), torch.tensor(own)
    assert abs(float(ours.mean())) < 4 * float(ours.std()) / len(ours) ** 0.5
    assert float(theirs.mean()) > 4 * float(theirs.std()) / len(theirs) ** 0.5
