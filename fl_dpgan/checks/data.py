"""The images: whether they can be read, under which labels, how many, and whether that is what was declared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_dpgan.checks.finding import Finding, failed, ok, refused, warning
from fl_dpgan.errors import FlDpganError

if TYPE_CHECKING:
    from fl_dpgan.config import Federation
    from fl_dpgan.data.cache import SiteImages
    from fl_dpgan.privacy.policy import Policy
    from fl_dpgan.site_file import SiteFile

#: How far the data may pass the declared size before it is pointed out.
_MUCH_MORE = 1.5


def read(
    file: SiteFile, federation: Federation, on_progress: Callable[[int, int], None], *, keep: bool = True
) -> SiteImages:
    """The site's images, read as the guard reads them, and into its cache.

    Args:
        keep: if not, the site's cache is left alone and what is read is not kept: a cache belongs to who made it.

    Raises:
        FlDpganError: they cannot be read, or have a label that the federation has not.
    """
    from fl_dpgan.data.site import read_site

    shape = {"size": federation.model.size, "channels": federation.model.channels}
    if keep:
        return read_site(file.data, file.labels, federation.classes, **shape, on_progress=on_progress)
    with tempfile.TemporaryDirectory() as folder:
        data = file.data.model_copy(update={"cache": Path(folder) / "cache"})
        return read_site(data, file.labels, federation.classes, **shape, on_progress=on_progress)


def check_data(
    read: Callable[[], SiteImages], policy: Policy, classes: Sequence[str], *, may_lack: bool
) -> tuple[list[Finding], SiteImages | None]:
    """Read the images and look at them; the images too, where they can be read.

    Args:
        may_lack: whether the site may join without an image of each class.
    """
    try:
        images = read()
    except FlDpganError as error:
        return [refused("data", error)], None
    return [readable(images, classes), complete(images, classes, allowed=may_lack), declared(images, policy)], images


def readable(images: SiteImages, classes: Sequence[str]) -> Finding:
    """How many records, of how many patients, of which class, and what was converted or left out."""
    counts = np.bincount(images.labels, minlength=len(classes)).tolist()
    patients = "" if images.patients is None else f" of {len(set(images.patients))} patients"
    by_class = ", ".join(f"{name} {count}" for name, count in zip(classes, counts, strict=True))
    notes = "".join(f"; {count}: {what}" for what, count in sorted(images.conversions.items()))
    return ok("data", f"{len(images.labels)} images{patients}: {by_class}{notes}")


def complete(images: SiteImages, classes: Sequence[str], *, allowed: bool) -> Finding:
    """Whether every class of the federation has a record here, or may lack one."""
    from fl_dpgan.data.site import missing_classes

    if missing := missing_classes(images, classes):
        kind = warning if allowed else failed
        return kind(
            "classes",
            f"no image of {', '.join(missing)}",
            "name your label for it in [labels] of site.toml, or set data.allow_missing_classes there",
        )
    return ok("classes", f"images of all {len(classes)}")


def declared(images: SiteImages, policy: Policy) -> Finding:
    """The declared size against the real one, by the rule that a site starts by."""
    from fl_dpgan.privacy.units import Units
    from fl_dpgan.training.records import check_units

    if policy.unit == "patient" and images.patients is None:
        return failed(
            "declared size",
            'the policy protects patients, and the data have no patient ids (policy.unit = "patient")',
            'use data.source = "manifest" with the column patient, or protect images (policy.unit = "image")',
        )
    try:
        units = Units(len(images.labels), images.patients if policy.unit == "patient" else None)
        check_units(units, policy.declared_size)
    except FlDpganError as error:
        return refused("declared size", error)
    found = f"{policy.declared_size} {units.name}s declared, {len(units)} there"
    if len(units) > _MUCH_MORE * policy.declared_size:
        return warning(
            "declared size",
            found,
            "all of them are protected; a larger policy.declared_size, set before the ledger is made, takes less noise",
        )
    return ok("declared size", found)
