"""One image of a DICOM file as 8-bit pixels. Of the header only the tags of the image are read, and none is told."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_dpgan.data.formats import bad
from fl_dpgan.data.grey import bounds, to_grey
from fl_dpgan.data.header import Header
from fl_dpgan.data.pixels import MAX_PIXELS, Picture, scale
from fl_dpgan.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_GREY = ("MONOCHROME1", "MONOCHROME2")
_JPEG_2000_COLOURS = ("YBR_RCT", "YBR_ICT")
_COLOURS = ("PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422", *_JPEG_2000_COLOURS)
_PALETTE = [
    f"{kind}{colour}PaletteColorLookupTable{part}"
    for kind, part in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))
    for colour in ("Red", "Green", "Blue")
]
_TAGS = [
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelPaddingValue", "PixelPaddingRangeLimit"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("VOILUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "BurnedInAnnotation"),
    *("PixelData", "FloatPixelData", "DoubleFloatPixelData", "ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
    *_PALETTE,
]
_GPL = "pip install pylibjpeg pylibjpeg-libjpeg (GPL)"
_BSD = "pip install python-gdcm"
# Transfer syntaxes that Pillow does not decode, or not in full: what to call them, and what does.
_CODECS = {
    "1.2.840.10008.1.2.4.51": ("JPEG Extended with 12 bits", f"{_GPL}, or {_BSD}"),
    "1.2.840.10008.1.2.4.57": ("JPEG Lossless", f"{_GPL}, or {_BSD}"),
    "1.2.840.10008.1.2.4.70": ("JPEG Lossless", f"{_GPL}, or {_BSD}"),
    "1.2.840.10008.1.2.4.80": ("JPEG-LS", "pip install pyjpegls"),
    "1.2.840.10008.1.2.4.81": ("JPEG-LS", "pip install pyjpegls"),
    "1.2.840.10008.1.2.4.201": ("HTJ2K", "pip install pylibjpeg pylibjpeg-openjpeg"),
    "1.2.840.10008.1.2.4.202": ("HTJ2K", "pip install pylibjpeg pylibjpeg-openjpeg"),
    "1.2.840.10008.1.2.4.203": ("HTJ2K", "pip install pylibjpeg pylibjpeg-openjpeg"),
}
_JPEG = "1.2.840.10008.1.2.4."  # how the transfer syntaxes of JPEG's family begin
_JPEG_2000 = ("1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91", *(uid for uid in _CODECS if uid[-4:-2] == ".2"))


def is_dicom(path: Path) -> bool:
    """Whether a file begins as DICOM files do: 128 bytes of any content, then DICM (PS3.10, 7.1)."""
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except (OSError, ValueError):  # a name with a NUL
        return False


def read_dicom(path: Path, frame: int | None = None) -> Picture:
    """Read one image.

    Args:
        path: a DICOM file as PS3.10 defines it, with 8 to 16 bits a pixel.
        frame: which frame, from 1. A file of several needs one.

    Raises:
        ConfigError: pydicom is not installed.
        DataError: the file, the tag or the codec that is at fault. It never holds a header's value.
    """
    dataset = _dataset(path)
    header = Header(path, dataset, little_endian=dataset.original_encoding[1] is not False)
    if "FloatPixelData" in header.dataset or "DoubleFloatPixelData" in header.dataset:
        raise bad(path, "holds pixels that are not whole numbers", "export it with 8 to 16 bits a pixel")
    if "PixelData" not in header.dataset:
        raise bad(path, "is a DICOM file without pixel data: a report, a plan or the like", "leave it out")
    index = _frame(header, frame)
    form = _check(header)
    pixels = _decode(header, index)
    notes: tuple[str, ...]
    if form in _GREY:
        shown, notes = to_grey(header, pixels.astype(np.int32), index)
    else:
        shown, notes = _colour(header, form, pixels)
    if header.value("BurnedInAnnotation") == "YES":
        notes = (*notes, "marked as having text burned into its pixels")
    return shown, notes


def _dataset(path: Path) -> Dataset:
    try:
        import pydicom
    except ImportError as error:
        raise ConfigError(f"{path}: DICOM needs pydicom; pip install 'fl-dpgan[dicom]'") from error
    if path.is_file() and not is_dicom(path):
        raise bad(path, "does not begin as a DICOM file (no DICM after 128 bytes)", "export it again as DICOM Part 10")
    try:
        return pydicom.dcmread(path, specific_tags=list(_TAGS))
    except OSError as error:
        raise bad(path, f"cannot be read ({error.strerror or type(error).__name__})", "check the file") from None
    except Exception as error:  # pydicom raises whatever its parser meets, and quotes it
        raise bad(path, f"is a damaged DICOM file ({type(error).__name__})", "copy or export it again") from None


def _frame(header: Header, frame: int | None) -> int:
    """The number, from 0, of the frame that is meant."""
    frames = header.whole("NumberOfFrames", 1)
    if frames > 1 and frame is None:
        raise bad(header.path, "holds several frames", "name one in the column frame of a manifest")
    if not 1 <= (frame or 1) <= max(frames, 1):
        raise bad(header.path, f"has no frame {frame}", "frames are counted from 1")
    return (frame or 1) - 1


def _check(header: Header) -> str:
    """Check how pixels are stored, before anything is decoded; return the photometric interpretation."""
    form = header.word("PhotometricInterpretation", (*_GREY, *_COLOURS))
    rows, columns = header.whole("Rows"), header.whole("Columns")
    if rows < 1 or columns < 1:
        raise header.wrong("Rows" if rows < 1 else "Columns", "is not positive")
    if rows * columns > MAX_PIXELS:
        raise bad(header.path, "claims more pixels than any radiograph has", "crop or shrink it, or leave it out")
    if header.whole("SamplesPerPixel") != (1 if form in (*_GREY, "PALETTE COLOR") else 3):
        raise header.wrong("SamplesPerPixel", "does not fit (0028,0004) Photometric Interpretation")
    allocated, stored = header.whole("BitsAllocated"), header.whole("BitsStored")
    if allocated not in (8, 16):
        raise header.wrong("BitsAllocated", "is neither 8 nor 16", "export it with 8 to 16 bits a pixel")
    if not 8 <= stored <= allocated:
        raise header.wrong("BitsStored", "is not between 8 and (0028,0100) Bits Allocated")
    if header.whole("HighBit") != stored - 1:
        raise header.wrong("HighBit", "is not one less than (0028,0101) Bits Stored")
    if header.whole("PixelRepresentation") not in ((0, 1) if form in _GREY else (0,)):
        raise header.wrong("PixelRepresentation", "is neither 0 nor, for grey, 1")
    return form


def _decode(header: Header, index: int) -> NDArray[np.integer]:
    """One frame's stored values, (H, W) or (H, W, 3), decompressed, YBR already as RGB."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.pixels.utils import pixel_array

    syntax = Header(header.path, header.dataset.file_meta).value("TransferSyntaxUID")
    if syntax is None:
        raise header.wrong("TransferSyntaxUID", "is missing")
    shape = (header.whole("Rows"), header.whole("Columns"), header.whole("SamplesPerPixel"))
    try:
        if header.value("PhotometricInterpretation") in _JPEG_2000_COLOURS and syntax not in _JPEG_2000:
            raise header.wrong("PhotometricInterpretation", "is one that only JPEG 2000 has")
        missing = syntax in _CODECS and bool(get_decoder(syntax).missing_dependencies)
        if syntax.startswith(_JPEG) and not missing:
            _check_frame(header, index, shape)
        # pydicom would cut stray high bits off, and so turn values that contradict the header into others
        pixels = pixel_array(header.dataset, index=index, correct_unused_bits=False)
    except NotImplementedError:
        raise header.wrong("TransferSyntaxUID", "is not one of still images", "export it uncompressed") from None
    except Exception as error:  # pydicom and its plugins raise anything, and quote it
        if isinstance(error, DataError):
            raise
        if missing:
            name, remedy = _CODECS[syntax]
            raise bad(
                header.path, f"is {name}, for which no codec is here", f"{remedy}, or export it uncompressed"
            ) from None
        raise header.wrong("PixelData", "is damaged or cut short", "copy or export it again") from None
    if pixels.shape != (shape if shape[2] == 3 else shape[:2]):
        raise header.wrong("PixelData", "is of another size than (0028,0010) Rows and (0028,0011) Columns say")
    return pixels


def _check_frame(header: Header, index: int, shape: tuple[int, int, int]) -> None:
    """Refuse a frame that says of itself that it is of another size, before it is decoded into one."""
    from PIL import Image, UnidentifiedImageError
    from pydicom.encaps import get_frame

    dataset = header.dataset
    offsets = None
    if "ExtendedOffsetTable" in dataset and "ExtendedOffsetTableLengths" in dataset:
        offsets = (dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths)
    frames = header.whole("NumberOfFrames", 1) or 1
    frame = get_frame(dataset.PixelData, index, extended_offsets=offsets, number_of_frames=frames)
    if _endless(frame):
        raise header.wrong("PixelData", "is damaged or cut short", "copy or export it again")
    try:
        with Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as image:
            size = (image.height, image.width)
    except UnidentifiedImageError:  # for a codec other than Pillow's to judge
        return
    if size != shape[:2]:
        raise header.wrong("PixelData", "is of another size than (0028,0010) Rows and (0028,0011) Columns say")


def _endless(frame: bytes) -> bool:
    """Whether a JPEG 2000 file's boxes have a length that leads nowhere: pydicom would look at such a box for ever."""
    at = 12 if frame.startswith(b"\0\0\0\x0cjP  ") else len(frame)
    while at < len(frame) and frame[at + 4 : at + 8] != b"jp2c":
        length = int.from_bytes(frame[at : at + 4], "big")
        if length < 8:
            return True
        at += length
    return False


def _check_segments(header: Header) -> None:
    """Refuse a palette's segments that would expand to more than a table holds: few bytes make many entries."""
    descriptor = header.numbers("RedPaletteColorLookupTableDescriptor")
    one, order = (1, "<") if descriptor[2:] == [8] else (2, "<" if header.little_endian else ">")
    for colour in ("Red", "Green", "Blue"):
        keyword = f"Segmented{colour}PaletteColorLookupTableData"
        data = header.value(keyword)
        if not isinstance(data, bytes):
            continue
        words = np.frombuffer(data[: len(data) // one * one], f"{order}u{one}").tolist()
        at = entries = 0
        while at + 1 < len(words):
            kind, length = words[at : at + 2]
            if kind > 1:  # PS3.3 C.7.9.2.3: segments that name others
                raise header.wrong(keyword, "has segments that repeat others", "export it with plain tables")
            entries += length
            at += 2 + (length if kind == 0 else 1)
        if entries > 1 << 16:
            raise header.wrong(keyword, "expands to more entries than a table has")


def _colour(header: Header, form: str, pixels: NDArray[np.integer]) -> Picture:
    """RGB, uint8 (H, W, 3), scaled by the bits that are stored, or by those of the palette's entries."""
    top = bounds(header)[1]
    if int(pixels.max()) > top:
        raise header.wrong("PixelData", "has values outside of what (0028,0101) Bits Stored allows")
    if form != "PALETTE COLOR":
        notes = ("16-bit colour scaled by its bits",) if top > 255 else ()
        return scale(pixels, top), (*notes, "YBR to RGB") if form.startswith("YBR") else notes
    from pydicom.pixels.processing import apply_color_lut

    _check_segments(header)
    try:
        colours = apply_color_lut(pixels, header.dataset)[..., :3]
    except Exception:  # as above
        raise header.wrong("RedPaletteColorLookupTableDescriptor", "and its tables are damaged") from None
    return scale(colours, int(np.iinfo(colours.dtype).max)), ("palette to RGB",)
