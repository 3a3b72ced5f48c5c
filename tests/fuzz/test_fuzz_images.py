"""Whatever lies in a site's folder is read or is a typed error that tells nothing of a patient."""

import csv
import gzip
import io
import json
import struct
import warnings
import zipfile
import zlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mangle import SECRET, accepted, changed_json, hypotheses, mangled, survey
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from fl_dpgan.data import cache
from fl_dpgan.data.formats import read_idx_pair, read_npz, read_site_npz
from fl_dpgan.data.manifest import image_of, read_rows
from fl_dpgan.data.pictures import read_picture
from fl_dpgan.data.pixels import fit
from fl_dpgan.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 9), np.uint8)
LABELS = np.arange(6) % 2
WORDS = {"read", "DataError"}


def write(path, content: bytes):
    path.write_bytes(content)
    return path


# --- IDX


def idx(array) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_malformed_idx_file_is_read_or_refused(tmp_path, suffix, thorough):
    images, labels = idx(PIXELS), idx(LABELS)
    pack = gzip.compress if suffix else bytes

    def make(random):
        both = [images, labels]
        which = random.randrange(2)
        both[which] = mangled(random, [both[which]], head=16)
        packed = [pack(one) for one in both]
        if suffix and random.random() < 0.5:  # the stream, beneath the format
            packed[which] = mangled(random, [pack([images, labels][which])], head=12)
        return packed

    def parse(both):
        one, other = (write(tmp_path / f"{n}{suffix}", content) for n, content in enumerate(both))
        raw = read_idx_pair(one, other, ("0", "1"))
        assert len(list(raw.images)) == len(raw.labels)

    parse([pack(images), pack(labels)])
    tally = survey(parse, make, thorough)
    assert set(tally) == WORDS


# --- NPZ


def npy(array, version=None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version, allow_pickle=True)
    return stream.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


_SHAPES = (
    "()", "(6,)", "(0, 9, 9)", "(10**9, 28, 28)", "(1000000000, 28, 28)", "(0, 10000000000000000000000)",
    "(-6, 9, 9)", "(True, 6)", "(6, 9, 9, 3)", "(" + "1, " * 70 + "486)", "(486, 1, 1, 1, 1)", "(2**64,)",
    "(99999999999999999999,)", "(" * 300, "(6, 9", "6", "(6L, 9L, 9L)", "(1.5,)", "(6, 9, 9)\x00", "'a'",
    "[6, 9, 9]", "(6, 9, 9), 'x': 1",
)  # fmt: skip
_TYPES = (
    "'|O'", "'<f4'", "'>f8'", "'<f2'", "'<i8'", "'<u8'", "'|S3'", "'<U3'", "'<M8[s]'", "'|V1'", "'<c16'", "'|b1'",
    "[('a', '|O')]", "'" + "x" * 3000 + "'", "[]", "()", "{}", "None", "'|u1', 'u1'", "('|u1', (3,))", "'<f16'",
    "'|u0'", "'|u9'",
)  # fmt: skip


def test_a_malformed_npz_file_is_read_or_refused(tmp_path, thorough):
    whole = {
        "images.npy": npy(PIXELS),
        "labels.npy": npy(LABELS),
        "train_images.npy": npy(PIXELS[..., None].astype(float)),
        "train_labels.npy": npy(LABELS[:, None], (2, 0)),
        "test_labels.npy": npy(LABELS.astype(np.uint8)),
    }
    strange = [
        *(np.array(SECRET), np.array(2), np.array([None, "a"], object), np.full((6, 1), 2**63, np.uint64)),
        *(np.full((6, 9, 9), np.nan), np.arange(486.0).reshape(6, 9, 9) - 1e300),
    ]

    def make(random):
        members = dict(whole)
        name = random.choice(["images.npy", "images.npy", "labels.npy", "train_images.npy", "train_labels.npy"])
        content, what = members[name], random.random()
        if what < 0.3:
            members[name] = mangled(random, [content], head=128)
        elif what < 0.6:
            header = content[10:128].decode("latin-1")
            start, end = header.index("(", 40), header.index(")") + 1
            text = header[:start] + random.choice(_SHAPES) + header[end:]
            if random.random() < 0.5:
                text = "{'descr': " + random.choice(_TYPES) + ", 'fortran_order': False, 'shape': (6, 9, 9), }\n"
            raw = text.encode("latin-1")
            data = content[128:] if random.random() < 0.6 else b""
            members[name] = content[:8] + struct.pack("<H", len(raw)) + raw + data
        elif what < 0.7:
            members[name] = npy(random.choice(strange))
        elif what < 0.75:
            del members[name]
        data = zipped(members, random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED,
                                              zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))  # fmt: skip
        if what >= 0.75:
            central = data.index(b"PK\x01\x02")
            data = mangled(random, [data], head=60) if random.random() < 0.4 else data[:central] + mangled(
                random, [data[central:]], head=1000)  # fmt: skip
        return data

    path = tmp_path / "site.npz"

    def parse(content):
        write(path, content)
        try:
            assert len(list(read_npz(path, "train", None).images)) > 0
        except DataError as error:
            accepted(error)
        raw = read_site_npz(path)
        assert len(list(raw.images)) == len(raw.labels)

    parse(zipped(whole))
    tally = survey(parse, make, thorough)
    assert set(tally) == WORDS


# --- PNG and JPEG


def picture(form: str, mode: str, **options) -> bytes:
    stream = io.BytesIO()
    source = Image.fromarray(np.random.default_rng(1).integers(0, 256, (12, 10, 3), np.uint8))
    image = Image.fromarray(np.arange(120, dtype=np.uint16).reshape(12, 10)) if mode == "I;16" else source.convert(mode)
    image.save(stream, form, **options)
    return stream.getvalue()


def exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112], tags[0x013B] = 6, SECRET
    return tags


def pngs() -> list[bytes]:
    frames = [Image.new("L", (8, 8), n) for n in (1, 2)]
    stream = io.BytesIO()
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:])
    plain = [picture("PNG", mode) for mode in ("L", "RGBA", "1", "I;16")]
    marked = [picture("PNG", "RGB", exif=exif()), picture("PNG", "P", transparency=3)]
    return [*plain, *marked, picture("PNG", "LA", icc_profile=b"x" * 200), stream.getvalue()]


def jpegs() -> list[bytes]:
    return [picture("JPEG", "L"), picture("JPEG", "RGB", exif=exif(), comment=SECRET.encode()),
            picture("JPEG", "CMYK"), picture("JPEG", "RGB", progressive=True, icc_profile=b"x" * 200)]  # fmt: skip


def changed_png(random: Random, samples: list[bytes]) -> bytes:
    """A PNG of which a chunk is another, with a right checksum, so that what is in it is looked at."""
    data = random.choice(samples)
    chunks, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    place = random.randrange(len(chunks))
    kind, content = chunks[place]
    what = random.random()
    if what < 0.1:
        del chunks[place]
    elif what < 0.2:
        chunks.insert(random.randrange(len(chunks) + 1), chunks[place])
    elif what < 0.3:
        name = random.choice(
            [b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tRNS", b"PLTE", b"gAMA", b"pHYs", b"acTL", b"fcTL", b"IHDR"]
        )
        inner = random.choice(
            [b"", b"a\0\0" + zlib.compress(bytes(10**6)), b"Exif\0\0MM\0*\0\0\0\x08\0\x01", random.randbytes(13)]
        )
        chunks.insert(1, (name, inner))
    elif what < 0.45 and kind == b"IDAT":
        chunks[place] = (kind, zlib.compress(mangled(random, [zlib.decompress(content)])))
    else:
        chunks[place] = (kind, mangled(random, [content], head=40) if content else random.randbytes(9))
    whole = b"".join(
        struct.pack(">I", len(inside)) + name + inside + struct.pack(">I", zlib.crc32(name + inside))
        for name, inside in chunks
    )
    return data[:8] + whole


@pytest.mark.parametrize("form", ["png", "jpg"])
def test_a_malformed_picture_is_read_or_refused(tmp_path, form, thorough):
    samples = pngs() if form == "png" else jpegs()
    path = tmp_path / f"image.{form}"

    def make(random):
        if form == "png" and random.random() < 0.6:
            return changed_png(random, samples)
        return mangled(random, samples, head=200)

    def parse(content):
        image, _ = read_picture(write(path, content))
        assert image.dtype == np.uint8 and fit(image, 8, 1).shape == (1, 8, 8)

    for sample in samples[:-1]:
        parse(sample)
    tally = survey(parse, make, thorough)
    assert set(tally) == WORDS


# --- DICOM


def dicom(syntax=ExplicitVRLittleEndian, pixels=None, **tags) -> bytes:
    """A DICOM file with a patient's name in it."""
    dataset = Dataset()
    dataset.PatientName = dataset.PatientID = SECRET
    stored = np.arange(80, dtype=np.uint16).reshape(8, 10) * 50
    allocated = 16 if pixels is None else 8
    dataset.Rows, dataset.Columns, dataset.SamplesPerPixel = 8, 10, 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = (
        allocated,
        12 if allocated == 16 else 8,
        11 if allocated == 16 else 7,
    )
    dataset.PixelRepresentation = 0
    for keyword, value in tags.items():
        setattr(dataset, keyword, value)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    dataset.PixelData = stored.tobytes() if pixels is None else pixels
    if syntax.is_compressed and syntax != DeflatedExplicitVRLittleEndian:
        dataset["PixelData"].is_undefined_length = True
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def lut(keyword: str, group: str | None = None) -> dict:
    """A sequence with a table of 16 entries, in a functional group of its own where one is named."""
    item = Dataset()
    item.LUTDescriptor, item.LUTData = [16, 0, 16], np.arange(0, 64000, 4000, np.uint16).tobytes()
    if group is None:
        return {keyword: [item]}
    inner, outer = Dataset(), Dataset()
    setattr(inner, keyword, [item])
    setattr(outer, group, [inner])
    return {"SharedFunctionalGroupsSequence": [outer]}


def dicoms() -> list[bytes]:
    grey, colour = np.arange(80, dtype=np.uint8).reshape(8, 10), np.zeros((8, 10, 3), np.uint8)
    streams = {}
    for form in ("JPEG", "JPEG2000"):
        stream = io.BytesIO()
        Image.fromarray(grey).save(stream, form, **({"irreversible": False} if form == "JPEG2000" else {}))
        streams[form] = encapsulate([stream.getvalue()])
    rle = struct.pack("<16I", 1, 64, *[0] * 14) + b"".join(
        b"\x07" + grey[row, :8].tobytes() + b"\x01" + grey[row, 8:].tobytes() for row in range(8)
    )
    palette = {f"{c}PaletteColorLookupTableDescriptor": [256, 0, 16] for c in ("Red", "Green", "Blue")}
    tables = {
        f"{c}PaletteColorLookupTableData": np.arange(256, dtype=np.uint16).tobytes() for c in ("Red", "Green", "Blue")
    }
    segments = {
        f"Segmented{c}PaletteColorLookupTableData": struct.pack("<8H", 0, 1, 0, 1, 255, 65535, 0, 0)
        for c in ("Red", "Green", "Blue")
    }
    return [
        dicom(WindowCenter=2000, WindowWidth=3000, RescaleSlope=2, RescaleIntercept=-5),
        dicom(ImplicitVRLittleEndian, PixelPaddingValue=0, PixelPaddingRangeLimit=3, BurnedInAnnotation="YES"),
        dicom(DeflatedExplicitVRLittleEndian, WindowCenter=2000, WindowWidth=3000, VOILUTFunction="SIGMOID"),
        dicom(**lut("ModalityLUTSequence"), **lut("VOILUTSequence", "FrameVOILUTSequence")),
        dicom(pixels=colour.tobytes(), SamplesPerPixel=3, PlanarConfiguration=0, PhotometricInterpretation="RGB"),
        dicom(pixels=grey.tobytes(), PhotometricInterpretation="PALETTE COLOR", **palette, **tables),
        dicom(pixels=grey.tobytes(), PhotometricInterpretation="PALETTE COLOR", **palette, **segments),
        dicom(JPEGBaseline8Bit, streams["JPEG"]), dicom(JPEG2000Lossless, streams["JPEG2000"]),
        dicom(RLELossless, encapsulate([rle])),
    ]  # fmt: skip


def test_a_malformed_dicom_file_is_read_or_refused_and_no_error_tells_of_the_patient(tmp_path, thorough):
    samples, path = dicoms(), tmp_path / "image.dcm"

    def make(random):
        sample = random.choice(samples)
        if random.random() < 0.2:  # past the meta group, where the image's tags are
            return sample[:300] + mangled(random, [sample[300:]], head=2000)
        return mangled(random, [sample], head=900)

    def parse(content):
        image, _ = read_picture(write(path, content))
        assert image.dtype == np.uint8 and fit(image, 8, 1).shape == (1, 8, 8)

    for sample in samples:
        parse(sample)
    tally = survey(parse, make, thorough)
    assert set(tally) == WORDS


@pytest.mark.timeout(20)
def test_a_jpeg_2000_box_that_leads_nowhere_is_refused_and_not_looked_at_for_ever(tmp_path):
    whole = next(sample for sample in dicoms() if b"ftypjp2 " in sample)
    at = whole.index(b"ftypjp2 ") - 4
    for length in (0, 1, 7):
        path = write(tmp_path / "image.dcm", whole[:at] + length.to_bytes(4, "big") + whole[at + 4 :])
        with pytest.raises(DataError, match="damaged or cut short"):
            read_picture(path)


# --- manifests


def manifest(rows, mark=",") -> bytes:
    stream = io.StringIO()
    csv.writer(stream, delimiter=mark).writerows(rows)
    return stream.getvalue().encode("utf-8", "surrogatepass")


ROWS = [["path", "label", "patient", "frame", "split"], ["a.png", "ill", SECRET, "", "train"],
        ["b/c.dcm", "healthy", SECRET, "3", "test"], ["b/d.png", "ill", "p2", "1", "train"]]  # fmt: skip
CELLS = (
    "", " ", "../x.png", "/etc/passwd", "a/../../x", "b/../a.png", "x\x00y", "x" * 5000, "\ud800", "\u202e",
    "\x1b[2J", '"', "=1+1", "-1", "0", "1e9", "999999999", "9" * 5000, "٣", "²", "NaN", "a\nb", "path", "label",
    "./a.png", "//a", "~", ".", "..",
)  # fmt: skip


def read_manifest_rows(path):
    for row in read_rows(path):
        file, frame = image_of(path, row)
        assert frame is None or frame >= 1
        assert row["path"].startswith("/") or file.is_relative_to(path.parent)


def test_a_malformed_manifest_is_read_or_refused_and_no_error_tells_a_patient(tmp_path, thorough):
    path = tmp_path / "manifest.csv"

    def make(random):
        rows = [list(row) for row in ROWS]
        for _ in range(random.choice([0, 1, 1, 2])):
            row = random.randrange(len(rows))
            rows[row][random.randrange(5)] = random.choice(CELLS)
        if random.random() < 0.1:
            rows[random.randrange(4)] = random.choice([[], ["a"], rows[1] * 2, rows[1]])
        data = manifest(rows, random.choice([",", ";", "\t"]))
        return mangled(random, [data], head=40) if random.random() < 0.4 else data

    for sample in (manifest(ROWS), manifest(ROWS, ";")):
        read_manifest_rows(write(path, sample))
    tally = survey(lambda content: read_manifest_rows(write(path, content)), make, thorough)
    assert set(tally) == WORDS


def test_a_manifest_of_any_cells_is_read_or_refused(tmp_path, thorough):
    path = tmp_path / "manifest.csv"
    cell = st.sampled_from(CELLS) | st.text(
        st.sampled_from("a.,;\t\r\n\"'/\\ ~\x00\x1b\xa0\u202e\ud800é1"), max_size=12
    )

    @hypotheses(thorough)
    @given(st.lists(st.tuples(cell, cell, st.just(SECRET), cell), max_size=4))
    def check(rows):
        write(path, manifest([["path", "label", "patient", "frame"], *rows]))
        try:
            read_manifest_rows(path)
        except DataError as error:
            accepted(error)

    check()


# --- the cache


def test_a_malformed_cache_is_read_or_filled_anew(tmp_path, monkeypatch, thorough):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # thousands of them would take minutes
    folder, name = tmp_path / "cache", "0" * 64
    images, labels = PIXELS[:, None], LABELS.astype(np.int64)
    filled: list[bool] = []

    def read():
        filled.append(True)
        return cache.Unread(iter(images), (1, 9, 9), labels, ("p1",) * 6, {"resized": 2})

    cache.cached(folder, name, read)
    records, pixels = folder / name / "records.json", folder / name / "images.npy"
    described, raw = records.read_bytes(), pixels.read_bytes()
    about = json.loads(described.partition(b"\n")[2])

    def make(random):
        what = random.random()
        if what < 0.3:  # as if it were meant: with a right checksum
            content = changed_json(random, about)
            return b"%08x\n" % zlib.crc32(content) + content, raw
        if what < 0.6:
            return mangled(random, [described]), raw
        return described, mangled(random, [raw], head=128)

    def parse(content):
        records.write_bytes(content[0])
        pixels.write_bytes(content[1])
        filled.clear()
        found = cache.cached(folder, name, read)
        described_right = content[0][:9] == b"%08x\n" % zlib.crc32(content[0][9:])
        assert described_right or filled
        if content[0][9:] == described[9:] or filled:
            assert np.array_equal(found.images, images) and np.array_equal(found.labels, labels)
            assert found.patients == ("p1",) * 6 and found.conversions == {"resized": 2}
        if filled:
            raise DataError("filled anew")

    tally = survey(parse, make, thorough)
    assert set(tally) == WORDS
