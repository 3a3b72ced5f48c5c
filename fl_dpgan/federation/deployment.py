"""A federation of real sites: the server's part, and a site with its guard, from `federation.toml` and `site.toml`."""

from collections.abc import Callable, Mapping

import torch
from flwr.serverapp import Grid

from fl_dpgan.config import Federation, load_federation
from fl_dpgan.data.site import SiteImages, missing_classes, read_site
from fl_dpgan.errors import ConfigError, DataError, LedgerError
from fl_dpgan.evaluation.utility import classifier
from fl_dpgan.federation import wire
from fl_dpgan.federation.gs_wgan import check_plan
from fl_dpgan.federation.guard import Guard
from fl_dpgan.federation.server import run_strategy
from fl_dpgan.federation.site import Site
from fl_dpgan.networks import from_config
from fl_dpgan.runs import RunFolder
from fl_dpgan.site_file import SiteFile
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records


def question(federation: Federation) -> wire.Question:
    """What the server asks first; a site joins where it would ask the same."""
    return wire.Question(classes=federation.classes, fingerprint=federation.fingerprint)


def open_site(file: SiteFile, on_progress: Callable[[int, int], None]) -> tuple[Site, SiteImages]:
    """The site that its file describes, and its images.

    Args:
        on_progress: called with the number of images read so far and that of all.

    Raises:
        FlDpganError: the files, the images or the ledger are not in order.
    """
    federation = load_federation(file.federation)
    model = federation.model
    images = read_site(
        file.data, file.labels, federation.classes, size=model.size, channels=model.channels, on_progress=on_progress
    )
    if file.policy.unit == "patient" and images.patients is None:
        raise ConfigError(
            'policy.unit = "patient", but the data have no patient ids; use data.source = "manifest" with the column '
            'patient, or protect images (unit = "image")'
        )
    if (missing := missing_classes(images, federation.classes)) and not file.data.allow_missing_classes:
        raise DataError(
            f"no image of {', '.join(missing)}; name your label for it in [labels], or set data.allow_missing_classes"
        )
    if not file.ledger.exists():
        raise LedgerError(f"there is no ledger at {file.ledger}; make it once, with `fl-dpgan site ledger`")
    patients = images.patients if file.policy.unit == "patient" else None
    site = Site(
        file.name,
        Records(torch.from_numpy(images.images), torch.from_numpy(images.labels), patients),
        policy=file.policy,
        models=site_models(federation),
        ledger=file.ledger,
        learning_rate=federation.training.d_learning_rate,
        budget=file.budget,
    )
    return site, images


def site_models(federation: Federation) -> Models:
    """The federation's networks; a site needs only their shapes."""
    model = federation.model
    counting = classifier(model.channels, model.size, model.num_classes)
    return Models(*from_config(model, federation.seed), counting)


def make_guard(file: SiteFile, site: Site) -> Guard:
    """The site's guard, listening.

    Raises:
        ConfigError: another guard serves this site, or the socket cannot be made.
    """
    federation = load_federation(file.federation)
    models, ledger = site.models, file.ledger.resolve()  # the file itself: a link to it is the same budget
    networks = [models.generator, models.discriminator, *([models.classifier] if models.classifier else [])]
    size = sum(tensor.nbytes for network in networks for tensor in network.state_dict().values())
    channels, height, width = models.image_shape
    fakes = 4 * channels * height * width * federation.privacy.batch_size  # what a request for gradients brings
    return Guard(
        site,
        question(federation),
        path=file.guard.socket,
        lock=ledger.with_name(ledger.name + ".guard"),
        largest=size + fakes + (1 << 20),  # names and shapes
    )


def serve(folder: RunFolder, grid: Grid, registered: Callable[[], Mapping[str, int]]) -> None:
    """The server's part: run the strategy with the sites that come, from the folder's checkpoint where there is one.

    Args:
        registered: gives the node at which each site is known, by name.

    Raises:
        ConfigError: the folder is not of a federation, or the strategy cannot run its plan.
        FederationError: fewer sites than the quorum joined, or answered in a round.
    """
    federation = folder.settings
    if not isinstance(federation, Federation):
        raise ConfigError(f"{folder.path} holds a simulation; give a new folder for a federation of real sites")
    if federation.privacy.update == "image_gradient":
        check_plan(federation)
    run_strategy(folder, grid, lambda record: None, question(federation), registered)
