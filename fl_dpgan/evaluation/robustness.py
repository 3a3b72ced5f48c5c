"""Robustness: how often a small perturbation of a real image flips what a classifier made of it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_dpgan.data import ImageData
from fl_dpgan.evaluation.utility import outputs

RADIUS = 0.1  # of the perturbation in any pixel, of pixels in [0, 1]
STEPS = 10  # of PGD
STEP = 0.025  # of PGD, in pixels
IMAGES = 2_000  # attacked at most
#: How each attack works, in words.
SETTINGS = {
    "fgsm": f"radius {RADIUS:g} in any pixel (of pixels in [0, 1])",
    "pgd": f"radius {RADIUS:g} in any pixel, {STEPS} steps of {STEP:g} from the image itself",
}

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def fgsm(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """One step of `RADIUS` along the sign of the loss's gradient (Goodfellow et al., arXiv 1412.6572, section 4).

    Args:
        model: takes images in [-1, 1], as all our networks do. pixels: (n, ...) in [0, 1]. labels: (n,).

    Returns:
        Perturbed pixels in [0, 1], of the same shape.
    """
    return (pixels + RADIUS * _ascent(model, pixels, labels)).clamp(0, 1)


def pgd(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """`STEPS` such steps of `STEP`, each projected onto the ball (Madry et al., arXiv 1706.06083, section 2.1).

    It starts at the image itself, so that the figure needs no random draw. Arguments and result are those of `fgsm`.
    """
    lowest, highest = (pixels - RADIUS).clamp(min=0), (pixels + RADIUS).clamp(max=1)
    moved = pixels
    for _ in range(STEPS):
        moved = (moved + STEP * _ascent(model, moved, labels)).clamp(lowest, highest)
    return moved


def success_rate(model: nn.Module, attack: Attack, data: ImageData) -> float | None:
    """ASR: the share of correctly classified images that the attack flips; None where none is classified correctly."""
    pixels, labels = torch.from_numpy(data.images).float() / 255, torch.from_numpy(data.labels)
    right = outputs(model, _to_network(pixels)).argmax(1) == labels
    pixels, labels = pixels[right], labels[right]
    if not len(labels):
        return None
    parts = zip(torch.split(pixels, 500), torch.split(labels, 500), strict=True)
    moved = torch.cat([attack(model, *part) for part in parts])
    return float((outputs(model, _to_network(moved)).argmax(1) != labels).double().mean())


def robustness(model: nn.Module, data: ImageData) -> dict[str, float | None]:
    """The ASR of both attacks on the first `IMAGES` images."""
    data = data.subset(np.arange(min(IMAGES, len(data))))
    return {
        "images": len(data),
        "fgsm_success": success_rate(model, fgsm, data),
        "pgd_success": success_rate(model, pgd, data),
    }


def _to_network(pixels: Tensor) -> Tensor:
    """[0, 1] to the networks' [-1, 1]."""
    return pixels * 2 - 1


def _ascent(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """The sign of the loss's gradient with respect to the pixels."""
    pixels = pixels.detach().requires_grad_(True)
    loss = cross_entropy(model(_to_network(pixels)), labels, reduction="sum")
    return torch.autograd.grad(loss, pixels)[0].sign()
