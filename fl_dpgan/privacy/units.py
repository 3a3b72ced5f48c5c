"""The privacy unit: how a site's records group into units, and which record a sampled unit contributes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.errors import DataError
from fl_dpgan.privacy.noise import KeyedGenerator

Indices = NDArray[np.int64]


class Units:
    """The privacy units of a site's records: each image is one, or all images of a patient together are.

    Args:
        records: how many records there are.
        patients: the patient id of each record, where the unit is the patient.

    Raises:
        DataError: not one id per record, or an id is missing.
    """

    def __init__(self, records: int, patients: Sequence[str] | None = None) -> None:
        self.name = "image" if patients is None else "patient"
        self._count, self._members = records, None
        if patients is None:
            return
        if len(patients) != records:
            raise DataError(f"{len(patients)} patient ids for {records} records; give one per record")
        # a gap in a table often reads as blanks, None or NaN; as an id it would join all who have none into one patient
        missing = sum(not isinstance(patient, str) or not patient.strip() for patient in patients)
        if missing:
            # neither an id nor a row number: this may end up in a log
            raise DataError(f"{missing} records have no patient id; add the ids, or protect images (unit = 'image')")
        _, codes = np.unique(np.asarray(patients, dtype=str), return_inverse=True)
        order = np.argsort(codes, kind="stable").astype(np.int64)
        sizes = np.bincount(codes)
        self._count = len(sizes)
        self._members = (order, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64), sizes.astype(np.int64))

    def __len__(self) -> int:
        """How many units there are."""
        return self._count

    def records(self, units: Indices, random: KeyedGenerator) -> Indices:
        """One record of each unit: the image itself, or one of the patient's images, drawn uniformly.

        So a patient contributes one clipped gradient to a step, however many images there are of them.
        """
        if self._members is None:
            return units
        order, starts, sizes = self._members
        chosen = starts[units] + np.floor(random.uniform(len(units)) * sizes[units]).astype(np.int64)
        return order[chosen]
