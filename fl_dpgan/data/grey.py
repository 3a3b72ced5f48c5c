"""From a DICOM file's stored values to what a screen shows: PS3.3 C.11.1 (modality) and C.11.2 (values of interest).

Where a file has neither window nor table, the whole range that its bits allow is shown: a rule that the header decides,
never the smallest and largest value of the record.
"""

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.header import Header
from fl_dpgan.data.pixels import Picture

Values = NDArray[np.float64]


def to_grey(header: Header, stored: NDArray[np.int32], frame: int) -> Picture:
    """Show the stored values (H, W) of one frame (from 0) as uint8 (H, W).

    In this order: rescaling or the modality's table; the VOI table, else the first window, else the full range;
    MONOCHROME1 inverted; padding black.

    Raises:
        DataError: a value is outside what the header allows, or a transformation is incomplete or unknown.
    """
    low: float
    high: float
    low, high = bounds(header)
    notes: list[str] = []
    padding = _padding(header, stored)
    if ((stored < low) | (stored > high))[~padding].any():
        raise header.wrong("PixelData", "has values outside of what (0028,0101) Bits Stored allows")
    values, low, high = _modality(header.group("PixelValueTransformationSequence", frame), stored, low, high)
    interest = header.group("FrameVOILUTSequence", frame)
    if tables := interest.items("VOILUTSequence"):
        looked_up, top = _look_up(tables[0], values, low)
        shown = looked_up / top
    elif interest.value("WindowCenter") is not None or interest.value("WindowWidth") is not None:
        shown = _window(interest, values)
    else:
        shown = (values - low) / (high - low)
        notes.append("DICOM without a window: full range of its bits")
    pixels = np.rint(np.clip(shown, 0, 1) * 255).astype(np.uint8)
    if header.word("PhotometricInterpretation", ("MONOCHROME1", "MONOCHROME2")) == "MONOCHROME1":
        pixels = 255 - pixels
        notes.append("MONOCHROME1 inverted")
    if padding.any():
        pixels[padding] = 0
        notes.append("padding to black")
    return pixels, tuple(notes)


def bounds(header: Header) -> tuple[int, int]:
    """The least and the greatest value that Bits Stored and Pixel Representation allow."""
    bits = header.whole("BitsStored")
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if header.whole("PixelRepresentation") else (0, (1 << bits) - 1)


def _padding(header: Header, stored: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which pixels stand for no measurement (PS3.3 C.7.5.1.1.2): one value, or those up to a limit."""
    if header.value("PixelPaddingValue") is None:
        return np.zeros(stored.shape, bool)
    ends = [header.whole("PixelPaddingValue")]
    ends.append(header.whole("PixelPaddingRangeLimit", ends[0]))
    # files are about that store the pattern under the other sign
    signed = header.whole("PixelRepresentation")
    ends = [(end + 0x8000) % 0x10000 - 0x8000 if signed else end % 0x10000 for end in ends]
    return (stored >= min(ends)) & (stored <= max(ends))


def _modality(header: Header, stored: NDArray[np.int32], low: float, high: float) -> tuple[Values, float, float]:
    """The modality's units (Hounsfield's, say), and the range that the bits allow in them."""
    if tables := header.items("ModalityLUTSequence"):
        values, top = _look_up(tables[0], stored.astype(np.float64), low)
        return values, 0.0, top
    slope, intercept = header.number("RescaleSlope"), header.number("RescaleIntercept")
    if (slope is None) != (intercept is None):
        raise header.wrong("RescaleIntercept" if intercept is None else "RescaleSlope", "is missing beside the other")
    if slope is None or intercept is None:
        return stored.astype(np.float64), low, high
    if slope == 0:
        raise header.wrong("RescaleSlope", "is zero")
    ends = (low * slope + intercept, high * slope + intercept)
    return stored.astype(np.float64) * slope + intercept, min(ends), max(ends)


def _look_up(item: Header, values: Values, low: float) -> tuple[Values, float]:
    """Values through a table of PS3.3 C.11.1.1, and the greatest value that it may hold."""
    descriptor = item.numbers("LUTDescriptor")
    if len(descriptor) != 3 or not all(number.is_integer() for number in descriptor):
        raise item.wrong("LUTDescriptor", "is not three whole numbers")
    entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
    if not 8 <= bits <= 16:
        raise item.wrong("LUTDescriptor", "does not have 8 to 16 bits")
    if low < 0 and first > 0x7FFF:
        first -= 0x10000  # the first value is signed where the values are, whatever type the file gives it
    table = _entries(item, entries)
    top = (1 << bits) - 1
    if len(table) != entries or table.max() > top:
        raise item.wrong("LUTData", "does not hold what (0028,3002) LUT Descriptor says")
    return table[np.clip(np.rint(values) - first, 0, entries - 1).astype(np.int64)], float(top)


def _entries(item: Header, entries: int) -> Values:
    data = item.value("LUTData")
    try:
        if not isinstance(data, bytes):
            return np.atleast_1d(np.asarray(data, np.int64) & 0xFFFF).astype(np.float64)
        if len(data) < 2 * entries:  # 8-bit entries, packed two to a word
            return np.frombuffer(data, np.uint8)[:entries].astype(np.float64)
        return np.frombuffer(data, "<u2" if item.little_endian else ">u2").astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise item.wrong("LUTData", "is not a table of numbers") from None


def _window(header: Header, values: Values) -> Values:
    """Values through the first window, 0 to 1: PS3.3 C.11.2.1.2.1 (LINEAR), C.11.2.1.3.1 and .2 (the other two)."""
    center, width = header.number("WindowCenter"), header.number("WindowWidth")
    if center is None or width is None:
        raise header.wrong("WindowCenter" if center is None else "WindowWidth", "is missing beside the other")
    function = header.word("VOILUTFunction", ("LINEAR", "LINEAR_EXACT", "SIGMOID"), "LINEAR")
    if width < 1 if function == "LINEAR" else width <= 0:
        raise header.wrong("WindowWidth", "is too small")
    if function == "SIGMOID":
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-4 * (values - center) / width))
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width == 0:
        return (values > center).astype(np.float64)
    return (values - center) / width + 0.5
