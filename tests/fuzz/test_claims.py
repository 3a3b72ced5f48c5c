"""What a small file claims costs no memory: a refusal takes less than `BOUND`, whatever a header says.

What is read may take more. IDX and NPZ take a few times the bytes that arrive, of which deflate makes at most 1,032 of
one; a picture takes at most `PER_PIXEL` bytes for each of its at most 2^26 pixels.
"""

import gzip
import io
import json
import socket
import struct
import zipfile
import zlib

import numpy as np
import pytest
from mangle import growth
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import JPEG2000Lossless, JPEGBaseline8Bit
from test_fuzz_images import dicom, idx, npy, zipped

from fl_dpgan.data.formats import read_idx_pair, read_site_npz
from fl_dpgan.data.pictures import read_picture
from fl_dpgan.data.pixels import fit
from fl_dpgan.errors import DataError, WireError
from fl_dpgan.federation import frames, wire
from fl_dpgan.runs import RunFolder

BOUND = 64 << 20
PER_PIXEL = 32
SMALL = 10_000
MANY = 10**9


def refused(work, *, error: str, bound: int = BOUND) -> None:
    grown, ended = growth(work)
    assert ended.startswith(error) and "MemoryError" not in ended, ended
    assert grown < bound, f"{grown >> 20} MiB for: {ended}"


def test_the_measurement_sees_what_is_taken():
    assert growth(lambda: b"\x01" * 2 * BOUND)[0] > BOUND
    assert growth(lambda: None)[0] < BOUND // 8


def file(tmp_path, name: str, content: bytes):
    assert len(content) <= SMALL
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_that_claims_a_billion_images(tmp_path, suffix):
    pack = gzip.compress if suffix else bytes
    claimed = struct.pack(">IIII", 0x803, MANY, 28, 28)
    content = pack(claimed + bytes(5_000_000))[:SMALL] if suffix else claimed + bytes(5000)
    images, labels = file(tmp_path, f"i{suffix}", content), file(tmp_path, f"l{suffix}", pack(idx(np.arange(9))))
    refused(lambda: read_idx_pair(images, labels, ("0",)), error="DataError")
    images, labels = (
        file(tmp_path, f"i{suffix}", pack(idx(np.zeros((9, 2, 2))))),
        file(tmp_path, f"l{suffix}", pack(struct.pack(">II", 0x801, MANY) + bytes(5000))),
    )
    refused(lambda: read_idx_pair(images, labels, ("0",)), error="DataError")


def header(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("kind", ["|u1", "<f8", "|O"])
@pytest.mark.parametrize("shape", [(MANY, 28, 28), (MANY,), (MANY, MANY, MANY), (2**62, 4, 4), (0, 2**62, 2**62)])
def test_an_npz_file_that_claims_a_billion_images(tmp_path, shape, kind):
    data = b"" if 0 in shape else bytes(3_000_000)
    content = zipped({"images.npy": header(shape, kind) + data, "labels.npy": npy(np.arange(9) % 2)})
    refused(lambda: read_site_npz(file(tmp_path, "site.npz", content)), error="DataError")


def test_an_npz_array_of_no_bytes_with_a_length_beyond_all_memory_is_called_that(tmp_path):
    content = zipped({"images.npy": header((0, 2**62, 2**62)), "labels.npy": npy(np.arange(9) % 2)})
    with pytest.raises(DataError, match="which no array has"):
        read_site_npz(file(tmp_path, "site.npz", content))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_npz_file_compressed_by_what_makes_a_million_bytes_of_one_is_refused_unread(tmp_path, method):
    content = zipped({"images.npy": npy(np.zeros((9, 4, 4), np.uint8)), "labels.npy": npy(np.zeros(9, int))}, method)
    with pytest.raises(DataError, match="another method"):
        read_site_npz(file(tmp_path, "site.npz", content))


def png(width: int, height: int, kind: int, data: bytes) -> bytes:
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(inside)) + name + inside + struct.pack(">I", zlib.crc32(name + inside))
        for name, inside in parts
    )


def jpeg(width: int, height: int, form: str = "JPEG") -> bytes:
    """A JPEG or JPEG 2000 of 8 x 8 pixels that claims to be larger."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, form, **({"subsampling": 0} if form == "JPEG" else {}))
    data = stream.getvalue()
    if form == "JPEG":
        at = data.index(b"\xff\xc0") + 5
        return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]
    return data.replace(struct.pack(">II", 8, 8), struct.pack(">II", width, height))


@pytest.mark.parametrize(("width", "height"), [(2**31 - 1, 2**31 - 1), (MANY, 1), (65535, 65535), (8193, 8193)])
def test_a_picture_that_claims_a_billion_pixels(tmp_path, width, height):
    for kind in (0, 2, 6):
        content = png(width, height, kind, zlib.compress(bytes(5_000_000))[:9000])
        refused(lambda content=content: read_picture(file(tmp_path, "x.png", content)), error="DataError")
    if width < 2**16:
        refused(lambda: read_picture(file(tmp_path, "x.jpg", jpeg(width, height))), error="DataError")


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "I;16", "CMYK"])
def test_a_picture_takes_no_more_for_a_pixel_than_is_said(tmp_path, mode):
    side, path = 1500, tmp_path / f"x.{'jpg' if mode == 'CMYK' else 'png'}"
    image = Image.fromarray(np.zeros((side, side), np.uint16)) if mode == "I;16" else Image.new(mode, (side, side))
    image.save(path, **({"transparency": 0} if mode == "P" else {}))
    grown, ended = growth(lambda: fit(read_picture(path)[0], 28, 1))
    assert ended == "read" and grown < PER_PIXEL * side**2, f"{grown / side**2:.1f} bytes a pixel"


def test_a_dicom_file_that_claims_a_billion_pixels_or_frames(tmp_path):
    read = lambda content: lambda: read_picture(file(tmp_path, "x.dcm", content), 1)  # noqa: E731
    refused(read(dicom(Rows=65535, Columns=65535)), error="DataError")
    refused(read(dicom(Rows=8192, Columns=8192)), error="DataError")
    refused(read(dicom(NumberOfFrames=str(MANY), Rows=8192, Columns=8192)), error="DataError")
    whole = dicom()
    at = whole.index(b"\xe0\x7f\x10\x00OW") + 8
    for length in (2**31, 2**32 - 2, 2**32 - 1):
        grown, ended = growth(read(whole[:at] + struct.pack("<I", length) + whole[at + 4 :]))
        assert grown < BOUND and (ended == "read" or ended.startswith("DataError")), (
            ended
        )  # what is there may be enough


@pytest.mark.parametrize("form", ["JPEG", "JPEG2000"])
def test_a_dicom_file_whose_compressed_pixels_claim_more_than_its_header(tmp_path, form):
    syntax = JPEGBaseline8Bit if form == "JPEG" else JPEG2000Lossless
    content = dicom(syntax, encapsulate([jpeg(13_000, 13_000, form)]), SamplesPerPixel=3, PlanarConfiguration=0,
                    PhotometricInterpretation="YBR_FULL" if form == "JPEG" else "YBR_RCT")  # fmt: skip
    refused(lambda: read_picture(file(tmp_path, "x.dcm", content)), error="DataError")


def test_a_dicom_palette_whose_segments_expand_without_end(tmp_path):
    linear = struct.pack("<3H", 0, 1, 0) + struct.pack("<3H", 1, 65535, 9) * 400
    names = ("Red", "Green", "Blue")
    tags = {f"{c}PaletteColorLookupTableDescriptor": [256, 0, 16] for c in names}
    tags |= {f"Segmented{c}PaletteColorLookupTableData": linear for c in names}
    content = dicom(pixels=bytes(80), PhotometricInterpretation="PALETTE COLOR", **tags)
    refused(lambda: read_picture(file(tmp_path, "x.dcm", content)), error="DataError")


def test_tensors_that_claim_a_billion_numbers():
    for shape, end in (([MANY], 4 * MANY), ([MANY], 4), ([0, MANY], 0), ([MANY] * 3, 2**63)):
        text = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        body = len(text).to_bytes(8, "little") + text + bytes(1000)
        refused(lambda body=body: wire.read_tensors(body), error="WireError")
    refused(lambda: wire.read_tensors(struct.pack("<Q", 2**40) + bytes(1000)), error="WireError")


def test_a_checkpoint_that_claims_a_billion_numbers(tmp_path):
    text = json.dumps({"x": {"dtype": "F32", "shape": [MANY], "data_offsets": [0, 4 * MANY]}}).encode()
    for content in (len(text).to_bytes(8, "little") + text + bytes(1000), struct.pack("<Q", 2**40) + bytes(1000)):
        file(tmp_path, "checkpoint.safetensors", content)
        refused(RunFolder(tmp_path).load_checkpoint, error="RunFolderError")


def test_a_frame_that_claims_a_billion_bytes_and_a_header_of_as_many_errors():
    def receive():
        left, right = socket.socketpair()
        with left, right:
            left.sendall(struct.pack(">IQ", 2, MANY) + b"{}" + bytes(1000))
            left.close()
            frames.receive(right, largest=2 * MANY, seconds=5.0)

    refused(receive, error="WireError")
    most = "{" + ", ".join(f'"{n:x}": 1' for n in range(frames.HEADER_LIMIT // 12)) + "}"
    assert len(most) <= frames.HEADER_LIMIT
    refused(lambda: wire.parse(most, wire.Answer), error="WireError")
    with pytest.raises(WireError, match="the most are"):
        wire.parse(most * 2, wire.Answer)
