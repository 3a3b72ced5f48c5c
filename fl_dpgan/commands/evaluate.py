"""`fl-dpgan evaluate`: what a run's generator is good for (the CNN alone, or the full suite) and what it gives away."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

console = Console()

DataDir = Annotated[Path | None, typer.Option("--data-dir", envvar="FL_DPGAN_DATA", help="Where the data files are.")]
RunPath = Annotated[Path, typer.Argument(help="A run's folder.")]
Suite = Literal["quick", "full"]


def evaluate(
    run: RunPath,
    data_dir: DataDir = None,
    suite: Annotated[
        Suite, typer.Option("--suite", help="quick: the CNN alone. full: more, and the same of real images.")
    ] = "quick",
) -> None:
    """Train a CNN on synthetic images only, and print its accuracy on real held-out ones.

    The full suite adds an SVM and an MLP, fidelity, diversity, robustness and membership inference, and takes minutes.
    The figures are kept in RUN/evaluation.json.
    """
    from fl_dpgan.data import load, withhold
    from fl_dpgan.files import write_atomically
    from fl_dpgan.report.synthetic import run_generator
    from fl_dpgan.runs import RunFolder

    folder = RunFolder.open(run)
    model = folder.scenario.model
    generator, meta = run_generator(folder)
    read = partial(load, folder.scenario.data.source, size=model.size, channels=model.channels, data_dir=data_dir)
    test = read(split="test")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if suite == "quick":
            found = _quick(folder.scenario, generator, test, progress)
        else:
            train, _ = withhold(read(split="train"), folder.scenario.data.withheld)
            found = _full(folder, generator, (train, test), data_dir, progress)
    settings = folder.scenario.evaluation
    result = {
        "cnn_accuracy": found["cnn_accuracy"],
        "round": meta["round"],
        "synthetic_images": settings.images,
        "real_test_images": len(test),
    } | found
    write_atomically(run / "evaluation.json", (json.dumps(result, indent=2) + "\n").encode())
    console.print(
        f"CNN accuracy on {len(test)} real held-out images: {result['cnn_accuracy']:.4f} "
        f"(round {meta['round']}, trained on {settings.images} synthetic images for {settings.epochs} epochs)"
    )
    if suite == "full":
        _show(result["full"], test.classes)


def _quick(scenario: Any, generator: Any, test: Any, progress: Progress) -> dict[str, Any]:
    import torch

    from fl_dpgan.data import to_tensor
    from fl_dpgan.evaluation.utility import accuracy, classifier_of

    settings = scenario.evaluation
    task = progress.add_task("CNN on synthetic images", total=settings.epochs)
    cnn = classifier_of(generator, settings, seed=scenario.seed, on_epoch=lambda: progress.advance(task))
    return {"cnn_accuracy": accuracy(cnn, to_tensor(test.images), torch.from_numpy(test.labels))}


def _full(
    folder: Any, generator: Any, data: tuple[Any, Any], data_dir: Path | None, progress: Progress
) -> dict[str, Any]:
    """The suite's result, whose CNN is the quick one (but for the 8-bit pixels), and membership inference."""
    from fl_dpgan.evaluation.attacks import attack_run
    from fl_dpgan.evaluation.suite import STEPS, RealReference, evaluate_generator

    scenario = folder.scenario
    settings, seed = scenario.evaluation, scenario.seed
    task = progress.add_task("", total=2 * len(STEPS) + 1)
    begun = iter(range(2 * len(STEPS) + 1))

    def on_step(step: str, images: str) -> None:
        progress.update(task, completed=next(begun), description=f"{step} of {images} images")

    reference = RealReference.build(*data, settings, seed=seed, on_step=lambda step: on_step(step, "real"))
    full = evaluate_generator(
        generator, reference, settings, seed=seed, on_step=lambda step: on_step(step, "synthetic")
    )
    on_step("membership inference", "training")
    full["membership"] = attack_run(folder, generator, data_dir, seed=seed)
    return {"cnn_accuracy": full["utility"]["cnn_accuracy"], "full": full}


def _show(full: dict[str, Any], classes: Iterable[str]) -> None:
    from fl_dpgan.evaluation.suite import MEASURES

    table = Table(title="Synthetic images, and real training images in their place")
    for heading in ("", "synthetic", "real"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it is")
    for section, key, name, meaning in MEASURES:
        if key in full[section]:
            table.add_row(name, _figure(full[section][key]), _figure(full["real"][section][key]), meaning)
    console.print(table)

    keys = ("images", "fid", "kid", "precision", "recall", "diversity")
    table = Table("class", title="By class: synthetic (real training images in their place)")
    for key in keys:
        table.add_column(key, no_wrap=True)
    both = zip(classes, full["fidelity"]["per_class"], full["real"]["fidelity"]["per_class"], strict=True)
    for name, row, real in both:
        figures = [f"{_figure(row[key])}\n({_figure(real[key])})" for key in keys[1:]]
        table.add_row(name, str(row["images"]), *figures)
    console.print(table)

    membership = full["membership"]
    for attack in membership["attacks"]:
        table = Table(title=f"Membership inference: {attack['attack']} against {attack['against']}")
        for heading in (f"{attack['members']} members", "value", "95 % interval", "a coin's value"):
            table.add_column(heading)
        for name, figure in attack["statistics"].items():
            interval = " to ".join(_figure(end) for end in figure["interval"])
            table.add_row(name, _figure(figure["value"]), interval, _figure(figure["coin"]["value"]))
        console.print(table)
    utility, fidelity = full["utility"], full["fidelity"]
    console.print(
        f"Classifiers: {utility['images']} synthetic and {full['real']['utility']['images']} real images. "
        f"Fidelity: {fidelity['images']} images of either side, equally many of a class; features: "
        f"{full['settings']['features']}. "
        f"FID: {full['settings']['fid']}. Robustness: {full['robustness']['images']} real test images."
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
