"""What a baseline's site keeps between rounds: tensors that have seen records without noise, in a file of its owner's.

They must not leave the site, so they are not in the ledger, which an officer may copy; the file can be deleted once its
run is over.
"""

import hashlib
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fl_dpgan.errors import DataError
from fl_dpgan.files import write_atomically

#: Tensors by name, and short texts by key.
Kept = tuple[dict[str, Tensor], dict[str, str]]


def write(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """Replace the file, which none but its owner can read (mode 0600); a crash leaves the old or the new."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=notes)
    before = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    finally:
        os.umask(before)


def read(path: Path) -> Kept | None:
    """What `write` was given last; None where there is no file.

    Raises:
        DataError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata() or {}  # noqa: SIM118
    except Exception as error:  # safetensors raises whatever a strange type or shape brings about
        raise DataError(f"{path} is damaged ({type(error).__name__}); put back a copy of it, or delete it") from error


def beside(ledger: Path, run: str, budget: str) -> Path:
    """Where a site keeps the critic of a run: one per budget too, whose data another budget must not pay for."""
    key = hashlib.sha256(repr((run, budget)).encode()).hexdigest()[:16]
    return ledger.with_name(f"{ledger.stem}.critic-{key}.safetensors")
