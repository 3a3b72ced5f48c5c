"""A run's folder on a disk that is full: one typed error, from which the run can be continued."""

import pytest
import torch
from PIL import Image

from fl_dpgan.errors import RunFolderError
from fl_dpgan.runs import RunFolder

META = {"run": "digits", "round": 1, "sites": {}}
WRITES = {
    "checkpoint.safetensors.partial": lambda folder: folder.save_checkpoint({"w": torch.ones(3)}, META | {"round": 2}),
    "asked.json.partial": lambda folder: folder.note_asked("discriminator_update", {}),
    "rounds.jsonl": lambda folder: folder.log_round({"round": 2}),
    "rounds.jsonl.partial": lambda folder: folder.cut_log(1),
    "samples/round-0002.png": lambda folder: folder.save_grid(Image.new("L", (8, 8)), 2),
}


@pytest.mark.parametrize("file", WRITES)
def test_a_full_disk_is_a_typed_error_and_the_last_checkpoint_stays(tmp_path, file):
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"w": torch.zeros(3)}, META)
    if file != "rounds.jsonl":
        folder.log_round({"round": 1})
    (tmp_path / "samples").mkdir()
    (tmp_path / file).symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="cannot be written: No space left on device") as caught:
        WRITES[file](folder)
    assert "\n" not in str(caught.value)
    tensors, meta = folder.load_checkpoint()
    assert meta == META and not tensors["w"].any()
