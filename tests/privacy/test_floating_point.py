"""What single precision adds to a record's influence: measured, since the proof is about real numbers."""

import pytest
import torch

from fl_dpgan.networks import Discriminator, ScatteringDiscriminator
from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.layers import LayerEngine

torch.set_num_threads(1)


def summed(engine, samples, c):
    total, _ = engine.clipped_sum(*samples, c, Fixed(c=c))
    return torch.cat([part.flatten() for part in total]).double()


@pytest.mark.parametrize("kind", [Discriminator, ScatteringDiscriminator])
@pytest.mark.parametrize("c", [1e-3, 1.0, 10.0])
def test_a_record_moves_the_sum_by_at_most_c_and_rounding_moves_the_others_by_a_hundred_thousandth(kind, c):
    torch.manual_seed(1)
    discriminator = kind(size=28, channels=1, num_classes=3)
    with torch.no_grad():
        for parameter in discriminator.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine = LayerEngine(discriminator)
    for count in (9, 128, 257, 515):  # with and without a pass that is filled up, and two passes
        samples = torch.rand(count, 1, 28, 28) * 2 - 1, torch.randint(3, (count,)), (torch.rand(count) < 0.5).float()
        place = int(torch.randint(count, ()))
        others = [torch.cat([part[:place], part[place + 1 :]]) for part in samples]
        moved = summed(engine, samples, c) - summed(engine, others, c)
        alone = summed(engine, [part[place : place + 1] for part in samples], c)
        assert float(alone.norm()) > 0.1 * c
        assert float(moved.norm()) <= c
        assert float((moved - alone).norm()) < 1e-5 * c
