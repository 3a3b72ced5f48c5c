"""The benchmarks, by name: `python -m simulations.benchmark speed step`, say. Run them on a machine that rests."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from simulations.benchmarks.common import environment, show

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
speed = typer.Typer(no_args_is_help=True, help="What things take: seconds, and memory.")
utility = typer.Typer(no_args_is_help=True, help="How good the images are, by method: runs, and tables of them.")
app.add_typer(speed, name="speed")
app.add_typer(utility, name="utility")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to keep the raw result.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds, of which medians are taken.")]


@app.callback()
def _group() -> None:
    """Measure; each benchmark prints a table."""


@app.command()
def ledger(
    before: Annotated[int, typer.Option(min=1, help="Rounds that the ledger holds already.")] = 1_000,
    events: Annotated[int, typer.Option(min=1, help="Of the ledger that is read and verified.")] = 100_000,
    rounds: Rounds = 9,
    file: JsonFile = None,
) -> None:
    """What the ledger costs beside training, and how fast a large one is read."""
    from simulations.benchmarks.ledger import measure, render

    started = environment()
    show("ledger", measure(before, events, rounds), render, started, file)


@app.command()
def guard(rounds: Rounds = 9, file: JsonFile = None) -> None:
    """What a site's guard costs beside training, and Flower's process for each message."""
    from simulations.benchmarks.guard import measure, render

    started = environment()
    show("guard", measure(rounds), render, started, file)


@app.command()
def audit(
    seeds: Annotated[int, typer.Option(min=1, help="Audits of each plan.")] = 100,
    runs: Annotated[int, typer.Option(min=40, help="Runs of each audit.")] = 1000,
    file: JsonFile = None,
) -> None:
    """How often an audit in many runs contradicts honest code."""
    from simulations.benchmarks.audit import measure, render

    started = environment()
    show("audit", measure(seeds, runs), render, started, file)


@speed.command()
def step(
    rounds: Rounds = 9,
    width: Annotated[list[int], typer.Option(help="Channels of D's first layer; may be repeated.")] = [32, 64],  # noqa: B006
    threads: Annotated[list[int], typer.Option(help="Torch's threads; may be repeated.")] = [1, 2],  # noqa: B006
    samples: Annotated[int, typer.Option(min=2, help="Reals and fakes together, 2B.")] = 256,
    file: JsonFile = None,
) -> None:
    """A private D step: ours, Opacus' modes, and a plain step."""
    from simulations.benchmarks.step import measure, render

    started = environment()
    show("speed step", measure(width, threads, samples, rounds), render, started, file)


@speed.command()
def sites(
    count: Annotated[int, typer.Option("--sites", min=1, help="Sites, of 600 records each.")] = 100,
    d_steps: Annotated[int, typer.Option(min=1, help="D steps of a round, B = 32.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of a run.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 3,
    width: Annotated[int, typer.Option(help="Channels of D's first layer.")] = 32,
    file: JsonFile = None,
) -> None:
    """A round of many sites: ours against Flower's simulation with Opacus."""
    from simulations.benchmarks.sites import measure, render

    started = environment()
    show("speed sites", measure(count, d_steps, rounds, repeats, width), render, started, file)


@speed.command()
def scale(
    counts: Annotated[list[int], typer.Option("--sites", min=1, help="May be repeated.")] = [10, 30, 100, 300, 1000],  # noqa: B006
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FL_DPGAN_DATA", help="MNIST's folder; random images if left out.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Where to draw the curves.")] = None,
    file: JsonFile = None,
) -> None:
    """Time and memory of a simulation by the number of its sites."""
    from simulations.benchmarks.scale import draw, measure, render

    started = environment()
    result = measure(counts, data_dir)
    show("speed scale", result, render, started, file)
    if png:
        draw(result, png)


@speed.command()
def startup(rounds: Rounds = 15, file: JsonFile = None) -> None:
    """How soon the command line answers."""
    from simulations.benchmarks.startup import measure, render

    started = environment()
    show("speed startup", measure(rounds), render, started, file)


@speed.command()
def fakes(
    rounds: Rounds = 31,
    count: Annotated[int, typer.Option("--fakes", min=2, help="Fakes of one pass.")] = 128,
    batch_size: Annotated[int, typer.Option(min=2, help="Of a G step.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Torch's threads.")] = 1,
    file: JsonFile = None,
) -> None:
    """G's passes, with our last layer and with the library's."""
    from simulations.benchmarks.fakes import measure, render

    started = environment()
    show("speed fakes", measure(count, batch_size, rounds, threads), render, started, file)


@speed.command()
def batching(
    rounds: Rounds = 9,
    width: Annotated[list[int], typer.Option(help="Channels of D's first layer; may be repeated.")] = [16, 32],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Samples of a site; may be repeated.")] = [16, 64],  # noqa: B006
    samples: Annotated[int, typer.Option(min=2, help="Of all sites together.")] = 256,
    file: JsonFile = None,
) -> None:
    """Several sites' clipped sums: one site after another, or batched."""
    from simulations.benchmarks.batching import measure, render

    started = environment()
    show("speed batching", measure(width, batch, samples, rounds), render, started, file)


@utility.command()
def run(
    data_dir: Annotated[Path | None, typer.Option(envvar="FL_DPGAN_DATA", help="Where the data files are.")] = None,
    scenario: Annotated[list[str], typer.Option(help="May be repeated.")] = ["mnist"],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="Of the scenario, or `real`; may be repeated.")] = ["fl-dpgan"],  # noqa: B006
    epsilon: Annotated[list[float], typer.Option(help="eps_max of a run; may be repeated.")] = [10.0],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="May be repeated.")] = [0],  # noqa: B006
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")] = None,
    label: Annotated[str, typer.Option(help="Names what --set changes.")] = "",
    withheld: Annotated[bool, typer.Option(help="Test on withheld training images: to choose settings.")] = False,
) -> None:
    """Simulate every combination and evaluate it in full; a result that is there is kept."""
    from simulations.benchmarks.utility import Bench, trials

    bench = Bench(data_dir, withheld)
    for trial in trials(scenario, method, epsilon, seed, overrides or (), label):
        bench.run(trial)


@utility.command()
def tables(
    withheld: Annotated[bool, typer.Option(help="Those on withheld training images.")] = False,
    attacks: Annotated[bool, typer.Option(help="Membership inference, too.")] = False,
) -> None:
    """Print the results as Markdown."""
    from simulations.benchmarks.utility import attack_tables, results
    from simulations.benchmarks.utility import tables as render

    found = results(withheld=withheld)
    print(render(found))
    if attacks:
        print(attack_tables(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # Opacus says at every step what its hooks make of images without gradients
    app()
