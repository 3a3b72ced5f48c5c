"""Nothing is unpickled, whatever it is called, and no name in a file leads out of its folder."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mangle import hypotheses
from test_fuzz_images import PIXELS, npy, zipped

from fl_dpgan.baselines import kept
from fl_dpgan.data import cache
from fl_dpgan.data.formats import read_idx_pair, read_site_npz
from fl_dpgan.data.manifest import read_rows
from fl_dpgan.data.pictures import read_picture
from fl_dpgan.errors import DataError, FlDpganError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.privacy.ledger import LedgerReader
from fl_dpgan.privacy.verify import verify
from fl_dpgan.report.watched import overview
from fl_dpgan.runs import RunFolder
from fl_dpgan.site_file import load_site


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "unpickled"


def forms(mark: Path, folder: Path) -> dict[str, bytes]:
    """A pickle as it could come: by itself, by PyTorch, by NumPy, in a member of an archive."""
    planted = Planted(mark)
    torch.save({"x": planted}, folder / "planted.pt")
    array = npy(np.array([planted], object))
    return {
        "pickle": pickle.dumps(planted),
        "torch": (folder / "planted.pt").read_bytes(),
        "npy": array,
        "npz": zipped({"images.npy": array, "labels.npy": array}),
        "labels": zipped({"images.npy": npy(PIXELS), "labels.npy": array}),
        "member": zipped({"images.npy": pickle.dumps(planted), "labels.npy": pickle.dumps(planted)}),
        "numbers": zipped({"images.npy": array.replace(b"'|O'", b"'|u1'"), "labels.npy": npy(np.arange(1))}),
    }


def readers(folder: Path) -> dict[str, tuple[str, object]]:
    """What reads a file of a name."""
    run = RunFolder(folder)
    return {
        "npz": ("x.npz", read_site_npz),
        "idx": ("x", lambda path: read_idx_pair(path, path, ("0",))),
        "idx.gz": ("x.gz", lambda path: read_idx_pair(path, path, ("0",))),
        "png": ("x.png", read_picture),
        "dicom": ("x.dcm", read_picture),
        "manifest": ("x.csv", read_rows),
        "site.toml": ("site.toml", load_site),
        "checkpoint": ("checkpoint.safetensors", lambda path: run.load_checkpoint()),
        "watch": ("checkpoint.safetensors", lambda path: run.checkpoint_meta()),
        "asked": ("asked.json", lambda path: run.asked()),
        "description": ("scenario.json", lambda path: overview(run)),
        "ledger": ("x.sqlite", LedgerReader),
        "verifier": ("x.sqlite", verify),
        "wire": ("x", lambda path: wire.read_tensors(path.read_bytes())),
        "header": ("x", lambda path: wire.parse(path.read_bytes().decode("latin-1"), wire.Answer)),
    }


@pytest.mark.parametrize("reader", list(readers(Path())))
def test_a_pickle_is_refused_and_not_unpickled(tmp_path, mark, reader):
    made = forms(mark, tmp_path)
    for name, content in made.items():
        if name in ("pickle", "torch"):  # the mark would show
            pickle.loads(content) if name == "pickle" else torch.load(tmp_path / "planted.pt", weights_only=False)
            assert mark.is_dir()
            mark.rmdir()
        file, read = readers(tmp_path)[reader]
        (tmp_path / file).write_bytes(content)
        with pytest.raises(FlDpganError):
            read(tmp_path / file)
        assert not mark.exists()


def test_a_pickle_in_the_cache_or_beside_a_ledger_is_not_unpickled(tmp_path, mark):
    folder, name, filled = tmp_path / "cache", "0" * 64, []

    def read():
        filled.append(True)
        return cache.Unread(iter(PIXELS[:, None]), (1, 9, 9), np.arange(6), None, {})

    cache.cached(folder, name, read)
    for content in forms(mark, tmp_path).values():
        for file in ("images.npy", "records.json"):
            (folder / name / file).write_bytes(content)
            filled.clear()
            assert np.array_equal(cache.cached(folder, name, read).images, PIXELS[:, None]) and filled
        (tmp_path / "critic.safetensors").write_bytes(content)
        with pytest.raises(FlDpganError):
            kept.read(tmp_path / "critic.safetensors")
        assert not mark.exists()


# --- paths


@pytest.mark.parametrize(
    "path", ["../x.png", "a/../../x.png", "..", "./../x.png", "link/x.png", "file.png", "in/link/../../../x.png"]
)
def test_a_manifests_relative_path_does_not_leave_its_folder(tmp_path, path):
    home, outside = tmp_path / "home", tmp_path / "outside"
    (home / "in").mkdir(parents=True)
    outside.mkdir()
    (outside / "x.png").write_bytes(b"")
    (home / "link").symlink_to(outside)
    (home / "in" / "link").symlink_to(outside)
    (home / "file.png").symlink_to(outside / "x.png")
    (home / "manifest.csv").write_text(f"path,label\n{path},ill\n")
    with pytest.raises(DataError, match="leaves the manifest's folder; write it as an absolute path"):
        read_rows(home / "manifest.csv")


def test_a_link_that_stays_inside_is_followed_and_so_is_one_to_the_folder_itself(tmp_path):
    (tmp_path / "home" / "in").mkdir(parents=True)
    (tmp_path / "home" / "other").symlink_to(tmp_path / "home" / "in")
    (tmp_path / "home" / "manifest.csv").write_text("path,label\nother/x.png,ill\n")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    assert len(read_rows(tmp_path / "link" / "manifest.csv")) == 1


@pytest.mark.parametrize("name", ["../images.npy", "/tmp/images.npy", "a/../../images.npy", "C:\\images.npy"])
def test_a_member_of_an_archive_is_never_a_file(tmp_path, name):
    path = tmp_path / "in" / "site.npz"
    path.parent.mkdir()
    path.write_bytes(zipped({name: npy(PIXELS), "images.npy": npy(PIXELS), "labels.npy": npy(np.arange(6) % 2)}))
    assert len(read_site_npz(path).labels) == 6
    assert os.listdir(tmp_path) == ["in"] and os.listdir(path.parent) == ["site.npz"]
    path.write_bytes(zipped({name: npy(PIXELS), "labels.npy": npy(np.arange(6) % 2)}))
    with pytest.raises(DataError, match="has no array 'images'"):
        read_site_npz(path)


def test_no_name_from_the_network_makes_a_path_of_another_folder(thorough, tmp_path):
    plan = {"site": "north", "round": 1, "status": "trained"}
    names = st.text(st.sampled_from("./\\~\x00\n:ab%-_\u2215"), min_size=1, max_size=12)

    @hypotheses(thorough)
    @given(names)
    def check(name):
        try:
            site = wire.parse(json.dumps({**plan, "site": name}), wire.Answer).site
        except WireError:
            site = "north"
        folder = RunFolder(tmp_path / "run")
        assert folder.ledger(site).resolve().parent == (tmp_path / "run" / "ledgers").resolve()
        beside = kept.beside(tmp_path / "ledger.sqlite", name, name)
        assert beside.parent == tmp_path and "\x00" not in beside.name

    check()
