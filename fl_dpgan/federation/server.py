"""The server's part of a run, of simulated or of real sites: its networks and strategy, from the run's folder."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fl_dpgan.evaluation.utility import classifier_of
from fl_dpgan.federation import wire
from fl_dpgan.federation.gs_wgan import GSWGAN
from fl_dpgan.federation.strategy import FedDPGAN
from fl_dpgan.networks import from_config
from fl_dpgan.report.synthetic import sample_grid
from fl_dpgan.runs import RunFolder

OnRound = Callable[[dict[str, Any]], None]

#: How many sample grids a run keeps.
_GRIDS = 8


def run_strategy(
    folder: RunFolder,
    grid: Grid,
    on_round: OnRound,
    question: wire.Question | None = None,
    registered: Callable[[], Mapping[str, int]] | None = None,
) -> None:
    """Run the folder's strategy to its end, from its checkpoint on where there is one.

    Args:
        on_round: called with each round's log record. question: what a node is asked first.
        registered: gives the node at which each real site is known, by name.

    Raises:
        FederationError: fewer sites than the quorum joined, or answered in a round.
    """
    settings = folder.settings
    generator, discriminator = from_config(settings.model, settings.seed)

    def train_on_synthetic(generator: nn.Module, number: int) -> nn.Module:
        return classifier_of(generator, settings.evaluation, seed=settings.seed + number)

    def after_round(record: dict[str, Any]) -> None:
        number, rounds = record["round"], settings.all_rounds
        shown = number in (1, rounds) or number % max(1, rounds // _GRIDS) == 0
        if number and shown and "stopped" not in record:
            folder.save_grid(sample_grid(strategy.average_generator, settings), number)
        on_round(record)

    kind = GSWGAN if settings.privacy.update == "image_gradient" else FedDPGAN
    strategy = kind(
        settings, generator, discriminator, folder=folder, run=folder.run, on_round=after_round,
        train_classifier=train_on_synthetic, question=question,
        registered=registered,
    )  # fmt: skip
    strategy.start(grid)
