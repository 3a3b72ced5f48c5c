"""Images from a run's generator: draws, a labelled sample grid, and data sets with a card that states the guarantee."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from fl_dpgan.config import Scenario, Settings
from fl_dpgan.errors import ConfigError, RunFolderError
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.report.budgets import budget_rows, ledgers_of
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import draw
from fl_dpgan.training.state import load_module

#: What is said of a run whose plan is `non_private`, in place of budgets.
NO_GUARANTEE = "no guarantee: noise and clipping were off"
_SIMULATED = "This run was a simulation with a known seed: the figures show what a deployment would spend."
_DEPLOYED = "Each site drew its noise from its own operating system; epsilon is what this run can have cost it at most."


def run_generator(folder: RunFolder) -> tuple[nn.Module, dict[str, Any]]:
    """The EMA generator of the run's last round, and the checkpoint's JSON: that `round` and what is known of `sites`.

    Raises:
        RunFolderError: the run has no checkpoint yet, or a damaged one.
    """
    found = folder.load_checkpoint()
    if found is None:
        raise RunFolderError(f"{folder.path} has no checkpoint yet; let the run finish a round")
    tensors, meta = found
    generator, _ = from_config(folder.settings.model, folder.settings.seed)
    load_module(generator, tensors, "ema")
    return generator.eval(), meta


def to_pixels(images: Tensor) -> NDArray[np.uint8]:
    """Images in [-1, 1] to uint8 (n, size, size, channels)."""
    pixels: NDArray[np.uint8] = ((images + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return pixels


def sample_grid(generator: nn.Module, settings: Settings, *, per_class: int = 10, shown: int = 20) -> Image.Image:
    """A grid with a row per class (the first `shown`), the label before each row."""
    from torchvision.utils import make_grid  # takes seconds, which a site's process need not spend

    classes = min(settings.model.num_classes, shown)
    labels = torch.arange(classes).repeat_interleave(per_class)
    grid = make_grid((draw(generator, labels, seed=settings.seed) + 1) / 2, nrow=per_class, padding=2, pad_value=1.0)
    pixels = (grid.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    margin, cell = 28, settings.model.size + 2
    canvas = Image.new("RGB", (pixels.shape[1] + margin, pixels.shape[0]), "white")
    canvas.paste(Image.fromarray(pixels), (margin, 0))
    pen = ImageDraw.Draw(canvas)
    for row in range(classes):
        pen.text((6, row * cell + cell // 2 - 5), str(row), fill="black")
    return canvas


def card(folder: RunFolder, meta: dict[str, Any]) -> dict[str, Any]:
    """The guarantee in numbers: the unit, and each site's epsilon and delta, recomputed from the ledgers."""
    settings = folder.settings
    run = {"run": settings.name, "round": meta["round"], "seed": settings.seed}
    if settings.privacy.non_private:
        return {"statement": NO_GUARANTEE, **run, "sites": []}
    if (folder.path / "ledgers").is_dir():
        rows = [row for ledger in ledgers_of(folder.path) for row in budget_rows(ledger)]
    else:  # the server of a deployment has no ledgers; it recomputes the run's epsilon from the plans
        rows = [_from_plan(name, site) for name, site in meta["sites"].items()]
    return {
        "statement": (
            "Each site's records are protected by (epsilon, delta)-differential privacy under adding or removing one "
            "privacy unit, at the epsilon of that site; a unit present at several sites is protected at their sum. "
            + (_SIMULATED if isinstance(settings, Scenario) else _DEPLOYED)
        ),
        **run,
        "sites": [{key: row[key] for key in ("site", "unit", "spent", "eps_max", "delta", "order")} for row in rows],
    }


def _from_plan(name: str, site: dict[str, Any]) -> dict[str, Any]:
    plan = SitePlan.model_validate(site["plan"])
    spent = plan.epsilon_after(site["steps"], site["evaluations"], releases=site.get("releases", 0))
    return {"site": name, "spent": spent, **plan.model_dump(include={"unit", "eps_max", "delta", "order"})}


def write_images(folder: RunFolder, count: int, out: Path, *, labels: Sequence[int] | None, as_npz: bool) -> None:
    """Write `count` synthetic images, their labels and the card into `out`, which must be new or empty.

    Args:
        labels: the classes to draw, in turn; all of them when left out.

    Raises:
        ConfigError: a label that the run does not have. RunFolderError: `out` holds something.
    """
    generator, meta = run_generator(folder)
    num_classes = folder.settings.model.num_classes
    wanted = list(range(num_classes)) if labels is None else list(labels)
    for label in wanted:
        if not 0 <= label < num_classes:
            raise ConfigError(f"label {label} is not one of 0 to {num_classes - 1}; correct --labels")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} is not empty; give another --out")
    chosen = torch.tensor([wanted[i % len(wanted)] for i in range(count)])
    pixels = to_pixels(draw(generator, chosen, seed=folder.settings.seed + 1))
    out.mkdir(parents=True, exist_ok=True)
    if as_npz:
        np.savez_compressed(out / "synthetic.npz", images=pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels,
                            labels=chosen.numpy())  # fmt: skip
    else:
        for index, (image, label) in enumerate(zip(pixels, chosen.tolist(), strict=True)):
            target = out / str(label)
            target.mkdir(exist_ok=True)
            Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(target / f"{index:06d}.png")
    (out / "card.json").write_text(json.dumps(card(folder, meta), indent=2) + "\n", encoding="utf-8")
