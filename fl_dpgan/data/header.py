"""The image tags of a DICOM file, checked. No error says a tag's value, for values name patients: only which tag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_dpgan.data.formats import bad
from fl_dpgan.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_MEND = "export it again from the archive, or leave it out"


class Header:
    """A data set of a DICOM file, or an item of one of its sequences.

    Every method raises DataError, naming the file and the tag, where a value is not what the standard demands.
    """

    def __init__(self, path: Path, dataset: Dataset, *, little_endian: bool = True) -> None:
        self.path, self.dataset, self.little_endian = path, dataset, little_endian

    def wrong(self, keyword: str, what: str, remedy: str = _MEND) -> DataError:
        """The error of one tag."""
        from pydicom.datadict import dictionary_description, tag_for_keyword

        tag = tag_for_keyword(keyword) or 0
        return bad(self.path, f"({tag >> 16:04X},{tag & 0xFFFF:04X}) {dictionary_description(tag)} {what}", remedy)

    def value(self, keyword: str) -> Any:
        """A tag's value as pydicom gives it; None where it is absent or empty."""
        try:
            value = self.dataset.get(keyword)
            return None if value is None or (isinstance(value, str | bytes | Sequence) and not len(value)) else value
        except Exception:  # pydicom raises whatever its converters meet, and quotes it
            raise self.wrong(keyword, "has a value that does not fit its type") from None

    def numbers(self, keyword: str) -> list[float]:
        """A tag's numbers; none where it is absent or empty."""
        value = self.value(keyword)
        if value is None:
            return []
        try:
            every = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
            numbers = [float(one) for one in every]
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(keyword, "is not a number") from None
        if not all(map(math.isfinite, numbers)):
            raise self.wrong(keyword, "is not a finite number")
        return numbers

    def number(self, keyword: str) -> float | None:
        """A tag's first number."""
        return next(iter(self.numbers(keyword)), None)

    def whole(self, keyword: str, default: int | None = None) -> int:
        """A tag's one whole number; without a default it must be there."""
        numbers = self.numbers(keyword)
        if not numbers and default is not None:
            return default
        if len(numbers) != 1 or not numbers[0].is_integer():
            raise self.wrong(keyword, "is not one whole number" if numbers else "is missing")
        return int(numbers[0])

    def word(self, keyword: str, known: Sequence[str], default: str | None = None) -> str:
        """A tag's one word, which must be among the known ones; without a default it must be there."""
        value = self.value(keyword)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value.strip().upper() not in known:
            what = "is missing" if value is None else f"is none of {', '.join(known)}"
            raise self.wrong(keyword, what)
        return value.strip().upper()

    def items(self, keyword: str) -> list[Header]:
        """The items of a sequence; none where it is absent."""
        value = self.value(keyword)
        if value is None:
            return []
        from pydicom import Sequence as Items

        if not isinstance(value, Items):
            raise self.wrong(keyword, "is not a sequence")
        return [Header(self.path, item, little_endian=self.little_endian) for item in value]

    def group(self, keyword: str, frame: int) -> Header:
        """Where a frame (from 0) has its own transformation: in a functional group of an enhanced object, or here."""
        own, shared = self.items("PerFrameFunctionalGroupsSequence"), self.items("SharedFunctionalGroupsSequence")
        for groups in (own[frame : frame + 1], shared[:1]):
            for group in groups:
                if found := group.items(keyword):
                    return found[0]
        return self
