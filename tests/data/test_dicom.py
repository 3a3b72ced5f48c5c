"""DICOM files against the standard's arithmetic, done here from the raw values, and against what must never be told."""

import contextlib
import io
import logging
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import pydicom
import pydicom.data
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import generate_frames
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian

from fl_dpgan.data.pictures import read_picture
from fl_dpgan.errors import ConfigError, DataError

FOLDER = Path(pydicom.data.__file__).parent
files = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shipped(name):
    path = pydicom.data.get_testdata_file(f"{name}.dcm", download=False)
    if path is None:
        pytest.skip(f"{name}.dcm does not come with this pydicom")
    return Path(path)


def header(pixels, *, stored=16, signed=False, form="MONOCHROME2", **tags):
    """An image's data set; whole numbers of pixels (H, W) or (H, W, 3)."""
    dataset = Dataset()
    allocated = 8 if stored == 8 else 16
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.PhotometricInterpretation = form
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = allocated, stored, stored - 1
    dataset.PixelRepresentation = int(signed)
    for keyword, value in tags.items():
        setattr(dataset, keyword, value)
    dataset.PixelData = pixels.astype(f"<{'i' if signed else 'u'}{allocated // 8}").tobytes()
    return dataset


def save(path, dataset, syntax=ExplicitVRLittleEndian):
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong in a test's file is meant
        dataset.save_as(path, enforce_file_format=True)
    return path


def shown(path, pixels, syntax=ExplicitVRLittleEndian, **options):
    """What is read of an image with these pixels and tags."""
    return read_picture(save(path / "image.dcm", header(np.asarray(pixels), **options), syntax))[0]


def refusal(path, frame=None):
    with pytest.raises(DataError) as caught:
        read_picture(path, frame)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and "; " in said and "\n" not in said
    return said.removeprefix(f"{path}: ")


def raw(path, kind):
    """The stored values of an uncompressed file."""
    dataset = pydicom.dcmread(path)
    return np.frombuffer(dataset.PixelData, kind)[: dataset.Rows * dataset.Columns].reshape(
        dataset.Rows, dataset.Columns
    )


def linear(x, c, w):
    """PS3.3 C.11.2.1.2.1, for an output of 0 to 255."""
    if x <= c - 0.5 - (w - 1) / 2:
        return 0
    if x > c - 0.5 + (w - 1) / 2:
        return 255
    return round(((x - (c - 0.5)) / (w - 1) + 0.5) * 255)


def test_without_a_window_a_ct_shows_the_full_range_of_its_bits_whatever_its_values():
    path = shipped("CT_small")
    pixels, notes = read_picture(path)
    assert np.array_equal(pixels, np.rint((raw(path, "<i2").astype(float) + 32768) / 65535 * 255))
    assert notes == ("DICOM without a window: full range of its bits",)


@pytest.mark.parametrize("name", ["MR_small", "MR_small_RLE", "MR_small_implicit", "MR_small_jp2klossless"])
def test_an_mr_is_shown_through_its_window_however_it_is_packed(name):
    expected = [[linear(x, 600, 1600) for x in row] for row in raw(shipped("MR_small"), "<i2").tolist()]
    assert read_picture(shipped(name))[0].tolist() == expected


def test_a_ct_in_jpeg_2000_is_rescaled_before_the_window_and_its_padding_is_black():
    path = shipped("693_J2KI")
    stored = pydicom.dcmread(path).pixel_array
    pixels, notes = read_picture(path)
    rows = slice(200, 300)
    assert pixels[rows].tolist() == [[linear(x - 1024, 40, 100) for x in row] for row in stored[rows].tolist()]
    assert not pixels[stored == -2000].any() and "padding to black" in notes


@pytest.mark.parametrize("frame", [1, 30])
def test_a_named_frame_of_a_colour_sequence_is_that_frame_in_rgb(frame):
    path = shipped("examples_ybr_color")
    stream = list(generate_frames(pydicom.dcmread(path).PixelData, number_of_frames=30))[frame - 1]
    pixels, notes = read_picture(path, frame)
    expected = np.asarray(Image.open(io.BytesIO(stream)).convert("RGB"), int)
    assert pixels.shape == (240, 320, 3) and np.abs(pixels - expected).max() <= 2
    assert notes == ("YBR to RGB",)


def test_several_frames_without_a_name_or_a_frame_that_is_not_there_are_refused():
    path = shipped("examples_ybr_color")
    assert refusal(path) == "holds several frames; name one in the column frame of a manifest"
    assert refusal(path, 31).startswith("has no frame 31")
    assert refusal(shipped("MR_small"), 2).startswith("has no frame 2")
    assert np.array_equal(read_picture(shipped("MR_small"), 1)[0], read_picture(shipped("MR_small"))[0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MR_truncated", "(7FE0,0010) Pixel Data is damaged or cut short; copy or export it again"),
        ("badVR", "(0028,0008) Number of Frames is not a number"),
        ("no_meta", "does not begin as a DICOM file"),
        ("rtstruct", "does not begin as a DICOM file"),
        ("reportsi", "is a DICOM file without pixel data"),
        ("liver_1frame", "(0028,0100) Bits Allocated is neither 8 nor 16"),
        ("rtdose_1frame", "(0028,0100) Bits Allocated is neither 8 nor 16"),
        ("JPEG2000-embedded-sequence-delimiter", "(7FE0,0010) Pixel Data is damaged"),
    ],
)
def test_what_is_no_readable_image_is_one_line_with_its_reason(name, reason):
    assert refusal(shipped(name)).startswith(reason)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("JPEG-lossy", "pylibjpeg-libjpeg (GPL)"), ("MR_small_jpeg_ls_lossless", "pyjpegls")],
)
def test_a_codec_that_is_not_here_is_named(name, codec):
    try:
        said = refusal(shipped(name))
    except pytest.fail.Exception:
        pytest.skip("this machine has the codec")
    assert codec in said and "no codec is here" in said


@files
@given(data=st.data())
def test_every_depth_and_sign_covers_black_to_white(tmp_path, data):
    stored = data.draw(st.integers(8, 16))
    signed = data.draw(st.booleans())
    low = -(2 ** (stored - 1)) if signed else 0
    high = low + 2**stored - 1
    values = [low, high, *data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2))]
    expected = np.rint((np.array(values, float) - low) / (high - low) * 255)
    assert shown(tmp_path, [values], stored=stored, signed=signed).tolist() == [expected.tolist()]


@files
@given(
    values=st.lists(st.integers(0, 4095), min_size=4, max_size=4),
    center=st.integers(-500, 5000),
    width=st.integers(1, 5000),
    slope=st.sampled_from([1.0, 0.5, -2.0]),
    form=st.sampled_from(["MONOCHROME1", "MONOCHROME2"]),
)
def test_rescale_then_window_then_inversion(tmp_path, values, center, width, slope, form):
    tags = {"RescaleSlope": slope, "RescaleIntercept": -1000, "WindowCenter": center, "WindowWidth": width}
    pixels = shown(tmp_path, [values], stored=12, form=form, **tags)
    expected = [linear(x * slope - 1000, center, width) for x in values]
    assert pixels.tolist() == [expected if form == "MONOCHROME2" else [255 - x for x in expected]]


def test_monochrome1_is_inverted_once_after_the_window_and_that_is_counted(tmp_path):
    dataset = header(np.array([[0, 1000, 1125, 1250, 4095]]), stored=12, form="MONOCHROME1")
    dataset.WindowCenter, dataset.WindowWidth = 1125.5, 251
    pixels, notes = read_picture(save(tmp_path / "m1.dcm", dataset))
    assert pixels.tolist() == [[255, 255, 255 - 128, 0, 0]] and notes == ("MONOCHROME1 inverted",)


def test_the_first_of_several_windows_counts(tmp_path):
    tags = {"WindowCenter": [100, 3000], "WindowWidth": [50, 10]}
    assert shown(tmp_path, [[0, 200, 2999]], stored=12, **tags).tolist() == [[0, 255, 255]]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("LINEAR_EXACT", [0, 64, 128, 191, 255]),  # (x - 100) / 200 + 1/2
        ("SIGMOID", [30, 69, 128, 186, 225]),  # 1 / (1 + exp(-4 (x - 100) / 200))
    ],
)
def test_other_window_functions(tmp_path, function, expected):
    tags = {"WindowCenter": 100, "WindowWidth": 200, "VOILUTFunction": function}
    assert shown(tmp_path, [[0, 50, 100, 150, 200]], stored=12, **tags).tolist() == [expected]


def table(first, entries, bits, data):
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [entries, first % 65536, bits])
    item.add_new("LUTData", "OW" if isinstance(data, bytes) else "US", data)
    return item


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_tables_of_modality_and_of_interest_clamp_at_their_ends(tmp_path, syntax):
    modality = table(10, 3, 12, [0, 2000, 4095])
    pixels = shown(tmp_path, [[0, 10, 11, 12, 99]], syntax, stored=12, ModalityLUTSequence=[modality])
    assert pixels.tolist() == [[0, 0, round(2000 / 4095 * 255), 255, 255]]
    interest = table(-2, 4, 8, bytes([0, 10, 200, 255]))  # 8-bit entries, packed
    tags = {"VOILUTSequence": [interest], "WindowCenter": 0, "WindowWidth": 2}
    pixels = shown(tmp_path, [[-9, -1, 0, 1, 9]], syntax, stored=12, signed=True, **tags)
    assert pixels.tolist() == [[0, 10, 200, 255, 255]]


@pytest.mark.parametrize("form", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_padding_is_black_on_both_sides_of_an_inversion_and_may_lie_outside_the_bits(tmp_path, form, syntax):
    tags = {"form": form, "PixelPaddingValue": -5000, "PixelPaddingRangeLimit": -4000}
    pixels = shown(tmp_path, [[-5000, -4500, -4000, -2048, 2047]], syntax, stored=12, signed=True, **tags)
    assert pixels[0, :3].tolist() == [0, 0, 0]
    assert pixels[0, 3:].tolist() == ([255, 0] if form == "MONOCHROME1" else [0, 255])


def test_padding_under_the_other_sign_is_the_same_pattern(tmp_path):
    dataset = header(np.array([[-2000, 0, 100]]), signed=True, WindowCenter=-3000, WindowWidth=10)
    dataset.add_new("PixelPaddingValue", "US", 65536 - 2000)
    assert read_picture(save(tmp_path / "p.dcm", dataset))[0].tolist() == [[0, 255, 255]]


@pytest.mark.parametrize(
    ("pixels", "options", "reason"),
    [
        ([[4096]], {"stored": 12}, "(7FE0,0010) Pixel Data has values outside"),
        ([[-513]], {"stored": 10, "signed": True}, "(7FE0,0010) Pixel Data has values outside"),
        ([[[4096, 0, 0]]], {"stored": 12, "form": "RGB"}, "(7FE0,0010) Pixel Data has values outside"),
        ([[1]], {"HighBit": 11}, "(0028,0102) High Bit is not one less"),
        ([[1]], {"BitsStored": 17}, "(0028,0101) Bits Stored is not between"),
        ([[1]], {"BitsStored": 7}, "(0028,0101) Bits Stored is not between"),
        ([[1]], {"Rows": 0}, "(0028,0010) Rows is not positive"),
        ([[1]], {"Rows": 65000, "Columns": 65000}, "claims more pixels"),
        ([[1]], {"Rows": 2}, "(7FE0,0010) Pixel Data is damaged or cut short"),
        ([[1]], {"SamplesPerPixel": 3}, "(0028,0002) Samples per Pixel does not fit"),
        ([[1]], {"RescaleSlope": 0, "RescaleIntercept": 1}, "(0028,1053) Rescale Slope is zero"),
        ([[1]], {"RescaleSlope": 1}, "(0028,1052) Rescale Intercept is missing"),
        ([[1]], {"WindowWidth": 1}, "(0028,1050) Window Center is missing"),
        ([[1]], {"WindowCenter": 1, "WindowWidth": 0}, "(0028,1051) Window Width is too small"),
        ([[1]], {"WindowCenter": 1, "WindowWidth": 9, "VOILUTFunction": "LOG"}, "(0028,1056) VOI LUT Function is none"),
        ([[1]], {"form": "HSV"}, "(0028,0004) Photometric Interpretation is none of"),
        ([[[1, 2, 3]]], {"form": "YBR_RCT"}, "(0028,0004) Photometric Interpretation is one that only JPEG 2000"),
        ([[[1, 2, 3]]], {"form": "RGB", "signed": True}, "(0028,0103) Pixel Representation"),
        ([[1]], {"form": "PALETTE COLOR"}, "(0028,1101) Red Palette Color Lookup Table Descriptor"),
        ([[1]], {"VOILUTSequence": [table(0, 2, 8, [1, 2, 3])]}, "(0028,3006) LUT Data does not hold"),
        ([[1]], {"VOILUTSequence": [table(0, 2, 8, [1, 256])]}, "(0028,3006) LUT Data does not hold"),
        ([[1]], {"VOILUTSequence": [table(0, 2, 7, [1, 2])]}, "(0028,3002) LUT Descriptor does not have"),
        ([[1]], {"VOILUTSequence": [Dataset()]}, "(0028,3002) LUT Descriptor"),
        ([[1]], {"FloatPixelData": b"\0" * 4}, "holds pixels that are not whole numbers"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_by_the_tag(tmp_path, pixels, options, reason):
    path = save(tmp_path / "x.dcm", header(np.array(pixels), **options))
    assert refusal(path).startswith(reason)


@pytest.mark.parametrize("keyword", ["Rows", "BitsStored", "PixelRepresentation", "PhotometricInterpretation"])
def test_a_missing_tag_is_named(tmp_path, keyword):
    dataset = header(np.array([[1]]))
    delattr(dataset, keyword)
    assert "is missing" in refusal(save(tmp_path / "x.dcm", dataset))


def test_a_palette_gives_its_colours(tmp_path):
    tags = {f"{colour}PaletteColorLookupTableDescriptor": [3, 5, 16] for colour in ("Red", "Green", "Blue")}
    colours = np.array([[0, 65535, 0x8000], [257, 0, 0], [65535, 0, 1]], "<u2")
    for colour, entries in zip(("Red", "Green", "Blue"), colours, strict=True):
        tags[f"{colour}PaletteColorLookupTableData"] = entries.tobytes()
    pixels = shown(tmp_path, [[0, 5, 6, 7, 9]], stored=8, form="PALETTE COLOR", **tags)
    assert pixels.tolist() == [[[0, 1, 255], [0, 1, 255], [255, 0, 0], [128, 0, 0], [128, 0, 0]]]


def test_deep_colour_is_scaled_by_its_bits(tmp_path):
    pixels = shown(tmp_path, [[[0, 2048, 4095]]], stored=12, form="RGB")
    assert pixels.tolist() == [[[0, round(2048 / 4095 * 255), 255]]]


def test_an_enhanced_objects_frame_has_its_own_window_and_the_shared_rescaling(tmp_path):
    def group(keyword, **tags):
        inner, outer = Dataset(), Dataset()
        for name, value in tags.items():
            setattr(inner, name, value)
        setattr(outer, keyword, [inner])
        return outer

    dataset = header(np.array([[0, 100], [0, 100]]), NumberOfFrames=2)
    dataset.Rows = 1
    dataset.SharedFunctionalGroupsSequence = [
        group("PixelValueTransformationSequence", RescaleSlope=2, RescaleIntercept=-100)
    ]
    dataset.PerFrameFunctionalGroupsSequence = [
        group("FrameVOILUTSequence", WindowCenter=0.5, WindowWidth=201),
        group("FrameVOILUTSequence", WindowCenter=100.5, WindowWidth=201),
    ]
    path = save(tmp_path / "enhanced.dcm", dataset)
    assert read_picture(path, 1)[0].tolist() == [[0, 255]]
    assert read_picture(path, 2)[0].tolist() == [[0, 128]]


def test_without_pydicom_the_remedy_is_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ConfigError, match=r"pip install 'fl-dpgan\[dicom\]'"):
        read_picture(FOLDER / "test_files" / "MR_small.dcm")


@files
@given(places=st.lists(st.tuples(st.integers(0, 9830), st.integers(0, 255)), min_size=1, max_size=8), cut=st.booleans())
def test_a_damaged_file_gives_an_image_or_a_data_error(tmp_path, places, cut):
    content = bytearray(shipped("MR_small_RLE").read_bytes())
    for place, value in places:
        content[place % len(content)] = value
    path = tmp_path / "x.dcm"
    path.write_bytes(content[: places[0][0]] if cut else content)
    with contextlib.suppress(DataError):  # any other error fails the test
        pixels, _ = read_picture(path)
        assert pixels.dtype == np.uint8 and pixels.ndim in (2, 3)


TEXT = {"PN", "LO", "SH", "UI", "DA", "TM", "DT", "ST", "LT", "UT", "AE"}


def told(path, caplog, recwarn):
    """All that reading a file says: error, traceback, logs at every level, warnings; without the file's path."""
    caplog.clear()
    recwarn.clear()
    said = ""
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "pydicom"), caplog.at_level(1, "PIL"):
        try:
            read_picture(path)
        except DataError as error:
            said = str(error) + "".join(traceback.format_exception(error))
    return (said + caplog.text + "".join(str(one.message) for one in recwarn)).replace(str(path), "")


def test_nothing_in_a_shipped_files_header_is_told(caplog, recwarn):
    checked = 0
    for path in sorted((FOLDER / "test_files").glob("*.dcm")) + sorted((FOLDER / "charset_files").glob("*.dcm")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                elements = list(pydicom.dcmread(path, force=True).iterall())
            except Exception:
                continue
            values = {str(element.value).strip() for element in elements if element.VR in TEXT and element.VM == 1}
        said = told(path, caplog, recwarn)
        values = {value for value in values if len(value) > 5}
        checked += len(values)
        assert not [value for value in values if value in said], path
    assert checked > 500


@pytest.mark.parametrize(
    "broken",
    [
        *("nothing", "cut", "pixels", "WindowCenter", "RescaleSlope", "NumberOfFrames", "PhotometricInterpretation"),
        *("TransferSyntaxUID", "PixelPaddingValue", "Rows", "VOILUTFunction", "BurnedInAnnotation"),
    ],
)
def test_no_planted_value_is_told_of_a_corrupt_file(tmp_path, caplog, recwarn, broken):
    dataset = pydicom.dcmread(shipped("MR_small"))
    dataset.WindowCenter, dataset.RescaleSlope, dataset.RescaleIntercept = "7777777777", "7777777777", "0"
    dataset.NumberOfFrames, dataset.VOILUTFunction, dataset.BurnedInAnnotation = (
        "1234567890",
        "LINEAR    ",
        "NO        ",
    )
    planted = b"CANARY-77^"
    for element in dataset:
        if element.VR in TEXT - {"UI", "DA", "TM", "DT"}:
            element.value = planted.decode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(tmp_path / "x.dcm")
    content = (tmp_path / "x.dcm").read_bytes()
    assert content.count(planted) > 5
    change = {
        "cut": lambda: content[: content.index(planted) + 300],
        "pixels": lambda: content[:-200],
        "WindowCenter": lambda: content.replace(b"(\0P\x10DS\x0a\x007777777777", b"(\0P\x10DS\x0a\0" + planted),
        "RescaleSlope": lambda: content.replace(b"(\0S\x10DS\x0a\x007777777777", b"(\0S\x10DS\x0a\0" + planted),
        "NumberOfFrames": lambda: content.replace(b"IS\x0a\x001234567890", b"IS\x0a\0" + planted),
        "PhotometricInterpretation": lambda: content.replace(b"MONOCHROME2 ", planted + b"  "),
        "TransferSyntaxUID": lambda: content.replace(b"1.2.840.10008.1.2.1\0", planted + b"\0" * 10),
        "PixelPaddingValue": lambda: content.replace(b"(\0\x20\x01", b"(\0\x21\x01"),
        "Rows": lambda: content.replace(b"(\0\x10\0US\x02\0\x40\0", b"(\0\x10\0LO\x02\0C!"),
        "VOILUTFunction": lambda: content.replace(b"LINEAR    ", planted),
        "BurnedInAnnotation": lambda: content.replace(b"NO        ", planted),
        "nothing": lambda: content,
    }[broken]()
    assert broken in ("nothing", "PixelPaddingValue") or change != content
    (tmp_path / "x.dcm").write_bytes(change)
    said = told(tmp_path / "x.dcm", caplog, recwarn)
    assert "CANARY" not in said and "C!" not in said
    if broken not in ("nothing", "PixelPaddingValue", "BurnedInAnnotation"):
        assert "DataError" in said
