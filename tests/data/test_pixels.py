"""PNG and JPEG files of every kind against pixels worked out here, and what is no such file."""

import contextlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fl_dpgan.data import pixels as rules
from fl_dpgan.data.pictures import read_picture
from fl_dpgan.data.pixels import fit, fitting, scale
from fl_dpgan.errors import DataError

RNG = np.random.default_rng(3)
GREY = RNG.integers(0, 256, (4, 6), np.uint8)
COLOUR = RNG.integers(0, 256, (4, 6, 3), np.uint8)
ALPHA = RNG.integers(0, 256, (4, 6), np.uint8)
files = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path, image, **options):
    image.save(path / "image.png", **options)
    return read_picture(path / "image.png")


def png(samples, kind, *chunks):
    """A PNG file of 16-bit samples (H, W, n), written from the specification; `kind` is its colour type."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    parts = [chunk(b"IHDR", head), *(chunk(*one) for one in chunks), chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def over_black(values, alpha):
    return np.rint(values * (alpha.astype(float) / 255))


def refusal(path):
    with pytest.raises(DataError) as caught:
        read_picture(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value) and "; " in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("top", [255, 1023, 4095, 65535])
def test_scaling_rounds_to_nearest_and_keeps_both_ends(top):
    values = np.arange(top + 1)
    assert np.abs(scale(values, top) - values * 255 / top).max() <= 0.5
    assert scale(values, top)[[0, -1]].tolist() == [0, 255]


def test_16_bit_grey_is_scaled_by_its_type_and_never_by_its_values(tmp_path):
    values = np.array([[0, 128, 129, 385, 386, 4000, 32768, 65535]], np.uint16)
    pixels, notes = read(tmp_path, Image.fromarray(values))
    assert pixels.tolist() == [[0, 0, 1, 1, 2, 16, 128, 255]]
    assert notes == ("16-bit grey scaled by its type",)


def test_16_bit_grey_with_a_transparent_value_shows_black_there(tmp_path):
    (tmp_path / "a.png").write_bytes(png(np.array([[[500], [60000]]]), 0, (b"tRNS", struct.pack(">H", 60000))))
    pixels, notes = read_picture(tmp_path / "a.png")
    assert pixels.tolist() == [[2, 0]] and "alpha composited on black" in notes


def test_16_bit_colour_is_its_high_byte_with_alpha_or_without(tmp_path):
    (tmp_path / "a.png").write_bytes(png(np.array([[[0x1234, 0xFFFF, 0x00FF]]]), 2))
    assert read_picture(tmp_path / "a.png")[0].tolist() == [[[0x12, 0xFF, 0]]]
    (tmp_path / "a.png").write_bytes(png(np.array([[[0x8000, 0xFFFF, 0, 0x8000]]]), 6))
    pixels, notes = read_picture(tmp_path / "a.png")
    assert pixels.tolist() == [[[64, 128, 0]]]
    assert notes == ("16-bit colour by its high byte", "alpha composited on black")


def test_grey_and_colour_come_as_they_are(tmp_path):
    for stored in (GREY, COLOUR):
        pixels, notes = read(tmp_path, Image.fromarray(stored))
        assert np.array_equal(pixels, stored) and notes == ()
    pixels, notes = read(tmp_path, Image.fromarray(GREY > 99))
    assert np.array_equal(pixels, (GREY > 99) * 255) and notes == ()


def test_alpha_is_composited_on_black_and_grey_stays_grey(tmp_path):
    pixels, notes = read(tmp_path, Image.fromarray(np.dstack([COLOUR, ALPHA]), "RGBA"))
    assert np.array_equal(pixels, over_black(COLOUR, ALPHA[..., None])) and notes == ("alpha composited on black",)
    pixels, notes = read(tmp_path, Image.fromarray(np.dstack([GREY, ALPHA]), "LA"))
    assert np.array_equal(pixels, over_black(GREY, ALPHA)) and notes == ("alpha composited on black",)


def test_a_palette_becomes_its_colours_and_its_transparent_entry_black(tmp_path):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    assert read(tmp_path, image)[0].tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    pixels, notes = read(tmp_path, image, transparency=1)
    assert pixels.tolist() == [[[10, 20, 30], [0, 0, 0], [70, 80, 90]]]
    assert notes == ("palette to RGB", "alpha composited on black")


def test_a_cmyk_jpeg_becomes_rgb_and_is_counted(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    pixels, notes = read_picture(tmp_path / "a.jpg")
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() < 4 and notes == ("CMYK to RGB",)


@pytest.mark.parametrize("orientation", range(9))
@pytest.mark.parametrize("kind", ["png", "jpg", "deep"])
def test_exif_turns_an_image_upright(tmp_path, orientation, kind):
    stored = GREY.astype(np.uint16) * 257 if kind == "deep" else GREY
    image, exif = Image.fromarray(stored), Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{'jpg' if kind == 'jpg' else 'png'}"
    image.save(path, exif=exif)
    pixels, notes = read_picture(path)
    with Image.open(path) as reference:
        expected = np.asarray(ImageOps.exif_transpose(reference))
    assert np.array_equal(pixels, expected if kind != "deep" else expected // 257)
    assert ("turned upright by EXIF" in notes) == (orientation > 1)


def test_a_camera_on_its_side_is_turned_clockwise(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # "the 0th row is the right-hand side": what is at the left of the file belongs to the top
    Image.fromarray(np.array([[1, 2], [3, 4]], np.uint8)).save(tmp_path / "a.png", exif=exif)
    assert read_picture(tmp_path / "a.png")[0].tolist() == [[3, 1], [4, 2]]


def test_a_file_that_claims_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    head = png(np.zeros((1, 1, 1), int), 0)
    for width, height in ((60_000, 60_000), (9_000, 9_000)):
        body = b"IHDR" + struct.pack(">II", width, height) + head[24:29]
        (tmp_path / "a.png").write_bytes(head[:12] + body + struct.pack(">I", zlib.crc32(body)) + head[33:])
        assert refusal(tmp_path / "a.png").startswith(("claims 9000 x 9000 pixels", "is not a readable image"))
    monkeypatch.setattr(rules, "MAX_PIXELS", 23)
    Image.fromarray(GREY).save(tmp_path / "a.png")
    assert refusal(tmp_path / "a.png").startswith("claims 6 x 4 pixels")


def test_other_formats_animations_and_deeper_pixels_are_refused(tmp_path):
    for name in ("bmp", "tiff", "gif"):
        Image.fromarray(GREY).save(tmp_path / f"a.{name}")
        (tmp_path / f"a.{name}").rename(tmp_path / "a.png")
        assert refusal(tmp_path / "a.png").startswith("is not a readable image")
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    assert refusal(tmp_path / "a.png").startswith("is an animation")


def test_a_frame_of_a_png_is_refused(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    assert np.array_equal(read_picture(tmp_path / "a.png", 1)[0], GREY)
    with pytest.raises(DataError, match="has no frame 2"):
        read_picture(tmp_path / "a.png", 2)


@files
@given(st.sampled_from(["png", "jpg"]), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1))
def test_a_damaged_file_gives_an_image_or_a_data_error(tmp_path, kind, places):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    path = tmp_path / f"a.{kind}"
    Image.fromarray(COLOUR).save(path, exif=exif)
    content = bytearray(path.read_bytes())
    for place, value in places:
        content[place % len(content)] = value
    path.write_bytes(content)
    with contextlib.suppress(DataError):  # any other error fails the test
        pixels, _ = read_picture(path)
        assert pixels.dtype == np.uint8 and pixels.ndim in (2, 3)


@pytest.mark.parametrize("stored", [GREY, COLOUR])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [4, 7])
def test_what_fitting_changes_is_named(stored, channels, size):
    image = stored[:4, :4]
    assert fit(image, size, channels).shape == (channels, size, size)
    named = {"colour to grey (BT.601)"} if (image.ndim, channels) == (3, 1) else set()
    named |= {"grey to colour (replicated)"} if (image.ndim, channels) == (2, 3) else set()
    named |= {"resized"} if size != 4 else set()
    assert set(fitting(image, size, channels)) == named
