"""A site's records in memory, and the privacy units that they form."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_dpgan.data import to_unit
from fl_dpgan.errors import DataError
from fl_dpgan.privacy.units import Indices, Units


class Records:
    """Labelled images of one site.

    Args:
        images: (N, channels, size, size), uint8, which takes a quarter of the memory, or floats in [-1, 1].
        labels: (N,).
        patients: each record's patient id (N,), where the privacy unit is the patient.

    Raises:
        DataError: the numbers of images, labels and ids differ, an id is missing, or a pixel is not finite.
    """

    def __init__(self, images: Tensor, labels: Tensor, patients: Sequence[str] | None = None) -> None:
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images with {len(labels)} labels; give one label per image")
        if images.is_floating_point() and not bool(torch.isfinite(images).all()):
            raise DataError("pixels that are not finite; read the images again")
        self.images, self.labels = images, labels
        self.units = Units(len(labels), patients)

    def check(self, declared_size: int, num_classes: int) -> None:
        """Compare with what the site declares; what this says stays at the site.

        Raises:
            DataError: as for `check_units`, or a label that the federation does not have.
        """
        check_units(self.units, declared_size)
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < num_classes:
            raise DataError(f"a label is outside 0 to {num_classes - 1}; map the site's labels to the federation's")

    def batch(self, records: Indices) -> tuple[Tensor, Tensor]:
        """Images in [-1, 1] and labels of the records at these indices."""
        chosen = torch.from_numpy(records).to(self.labels.device)
        images = self.images[chosen]
        return images if images.is_floating_point() else to_unit(images), self.labels[chosen]


def check_units(units: Units, declared_size: int) -> None:
    """Compare the number of units with the declared one.

    Raises:
        DataError: fewer than nine tenths of the declared size.
    """
    if len(units) < 0.9 * declared_size:
        raise DataError(
            f"{len(units)} {units.name}s, too few for the declared size {declared_size}; declare at most {len(units)}"
        )
