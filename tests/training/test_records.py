import numpy as np
import pytest
import torch

from fl_dpgan.data import to_tensor
from fl_dpgan.errors import DataError
from fl_dpgan.training.records import Records


def test_bytes_and_floats_give_the_same_batches():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 1, 8, 8), dtype=np.uint8)
    labels = torch.arange(9) % 3
    chosen = np.array([7, 0, 7, 3])
    from_bytes, of_bytes = Records(torch.from_numpy(pixels), labels).batch(chosen)
    from_floats, of_floats = Records(to_tensor(pixels), labels).batch(chosen)
    assert from_bytes.dtype == torch.float32
    assert torch.equal(from_bytes, from_floats) and torch.equal(of_bytes, of_floats)
    assert torch.equal(from_bytes[0], torch.from_numpy(pixels[7] / np.float32(127.5) - np.float32(1)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_pixels_that_are_not_finite_are_refused(bad):
    images = torch.zeros(3, 1, 4, 4)
    images[1, 0, 2, 2] = bad
    with pytest.raises(DataError, match="not finite"):
        Records(images, torch.zeros(3, dtype=torch.int64))


def test_another_number_of_labels_is_refused():
    with pytest.raises(DataError, match="3 images with 2 labels"):
        Records(torch.zeros(3, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
