"""A run's plan, and the scenario or the federation around it: typed, read from TOML, refusing unknown keys."""

import hashlib
import json
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan
from fl_dpgan.text import printable


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainingConfig(_Section):
    """Rounds and optimisers. `d_steps` at each site and `g_steps` at the server make one round."""

    rounds: int = Field(30, ge=0, le=10**6)
    d_steps: int = Field(5, ge=1, le=100_000)
    g_steps: int = Field(30, ge=1, le=100_000)
    d_learning_rate: float = Field(5e-4, gt=0, le=1)
    g_learning_rate: float = Field(5e-4, gt=0, le=1)
    g_batch_size: int = Field(64, ge=2, le=100_000)
    ema_decay: float = Field(0.99, ge=0, lt=1)


class MatchingConfig(_Section):
    """What G does with a moment release: `rounds` of `g_steps` on the moments alone before the discriminators' rounds.

    The learning rate falls along a cosine over these rounds. `weight` is that of the moments in G's later loss.
    """

    rounds: int = Field(0, ge=0, le=10**6)
    g_steps: int = Field(50, ge=1, le=100_000)
    batch_size: int = Field(50, ge=2, le=100_000)
    learning_rate: float = Field(3e-3, gt=0, le=1)
    weight: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)


class FederationConfig(_Section):
    """Who must take part, and how long the server waits, in seconds.

    `round_timeout` is for a round's answers, and for the quorum at the start; `join_timeout` is for the other sites at
    the start, who may also join later. `sites_per_node` is for simulations of many sites: so many share a Flower node,
    and its messages.
    """

    sites: int = Field(3, ge=1, le=100_000)
    sites_per_node: int = Field(1, ge=1, le=100_000)
    quorum: int = Field(2, ge=1)
    round_timeout: float = Field(600.0, gt=0)
    join_timeout: float = Field(60.0, ge=0)

    @model_validator(mode="after")
    def _reachable(self) -> "FederationConfig":
        if self.quorum > self.sites:
            raise ValueError(f"quorum = {self.quorum} is more than sites = {self.sites}; lower federation.quorum")
        return self

    @property
    def nodes(self) -> int:
        """How many Flower nodes the sites are spread over."""
        return -(-self.sites // self.sites_per_node)


class Plan(_Section):
    """What a strategy needs to know of a run."""

    seed: int = Field(0, ge=0, lt=2**31)
    privacy: PrivacyConfig = PrivacyConfig()
    training: TrainingConfig = TrainingConfig()
    matching: MatchingConfig = MatchingConfig()
    federation: FederationConfig = FederationConfig()

    @model_validator(mode="after")
    def _moments_are_used(self) -> "Plan":
        used = self.matching.rounds > 0 or (self.matching.weight > 0 and self.training.rounds > 0)
        if used != (self.privacy.moments is not None):
            raise ValueError(
                "a moment release and its use go together: set privacy.moments, and matching.rounds or matching.weight"
            )
        return self

    @property
    def all_rounds(self) -> int:
        """Rounds on the moments alone, then rounds with the sites."""
        return self.matching.rounds + self.training.rounds

    def round_seed(self, number: int) -> int:
        """What G's draws of a round at the server are seeded with."""
        return self.seed * 1_000_003 + number

    def site_plan(self, declared_size: int, order: float | None = None) -> SitePlan:
        """The constants of a site of this declared size, whose ledger is kept at `order` where it has one already.

        Raises:
            ConfigError: the batch is larger than the site, delta is too large for it, or no noise fits.
        """
        steps = {"d_steps": self.training.d_steps, "rounds": self.training.rounds}
        try:
            return SitePlan.derive(self.privacy, declared_size=declared_size, order=order, **steps)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from error


class DataConfig(_Section):
    """Which images, and how they are split over the sites (flwr-datasets' partitioners).

    `withheld` training images go to no site: settings may be chosen on them.
    """

    source: str = "digits"
    partition: Literal["iid", "dirichlet", "size", "pathological"] = "iid"
    alpha: float | None = Field(None, gt=0)
    sizes: tuple[int, ...] | None = None
    classes_per_site: int | None = Field(None, ge=1)
    declared_size: int | tuple[int, ...] = 479
    withheld: int = Field(0, ge=0)
    allow_missing_classes: bool = False


class ModelConfig(_Section):
    """The networks' sizes, whether D learns its features, and where the label enters a D that does.

    `d_width` counts the channels of the first convolution of a D that learns its features.
    """

    size: Literal[28, 32, 64] = 28
    channels: Literal[1, 3] = 1
    num_classes: int = Field(10, ge=1, le=100_000)
    latent_dim: int = Field(64, ge=1, le=4096)
    g_width: int = Field(32, ge=1, le=1024)
    d_width: int = Field(16, ge=1, le=1024)
    d_features: Literal["learned", "scattering"] = "learned"
    d_labels: Literal["output", "input"] = "output"


class SimulationConfig(_Section):
    """A process's share of a GPU, where it is not to be estimated, and per-site budgets that differ from the run's."""

    gpu_fraction: float | None = Field(None, gt=0, le=1)
    eps_max: tuple[float, ...] | None = None


class EvaluationConfig(_Section):
    """The CNN that is trained on synthetic images only and tested on real ones."""

    images: int = Field(10_000, ge=100, le=1_000_000)
    epochs: int = Field(5, ge=1, le=1000)


class Settings(Plan):
    """What a run's folder needs to know: a plan, its networks and how its generator is evaluated."""

    name: str = Field("custom", pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")
    model: ModelConfig = ModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class Scenario(Settings):
    """A simulation: how many sites share which data."""

    method: str = Field("custom", pattern=r"^[a-z0-9][a-z0-9-]*$")
    data: DataConfig = DataConfig()
    simulation: SimulationConfig = SimulationConfig()

    @model_validator(mode="after")
    def _one_value_per_site(self) -> "Scenario":
        for key, value in (
            ("data.declared_size", self.data.declared_size),
            ("simulation.eps_max", self.simulation.eps_max),
        ):
            if isinstance(value, tuple) and len(value) != self.federation.sites:
                raise ValueError(
                    f"{key} lists {len(value)} values for {self.federation.sites} sites; give one per site"
                )
        return self

    def declared_size(self, site: int) -> int:
        """N^ of the site with this index."""
        size = self.data.declared_size
        return size[site] if isinstance(size, tuple) else size

    def budget(self, site: int) -> float:
        """eps_max of the site's ledger: what the whole run is planned to cost, unless the scenario says otherwise."""
        return self.simulation.eps_max[site] if self.simulation.eps_max else self.privacy.eps_max


class Federation(Settings):
    """A federation of real sites, as its coordinator publishes it to them in `federation.toml`.

    `classes` are the labels' names, in the order of their numbers. `address` is where the sites reach the server, as
    HOST:PORT.
    """

    classes: tuple[Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")], ...] = Field(min_length=1)
    address: str = Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$")

    @model_validator(mode="after")
    def _one_name_per_class(self) -> "Federation":
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes: two have the same name; give each its own")
        if self.model.num_classes != len(self.classes):
            raise ValueError(
                f"model.num_classes = {self.model.num_classes}, but classes has {len(self.classes)}; make them agree"
            )
        if self.federation.sites_per_node != 1:
            raise ValueError("federation.sites_per_node is for simulations; a real node has one site")
        if self.privacy.non_private:
            raise ValueError("privacy.non_private is for simulations; no real site accepts it")
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what a site must have in common with the server: the labels, the networks, D's learning rate."""
        shared = [self.classes, self.model.model_dump(mode="json"), self.training.d_learning_rate]
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


def load_federation(path: Path) -> Federation:
    """Read a federation's file.

    Raises:
        ConfigError: there is none, it is not TOML, or a key is unknown, missing or out of its range.
    """
    return validated(Federation, read_toml(path, "ask the coordinator for it"), path)


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: there is none (then with the remedy), or it is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no file at {path}; {remedy}") from error
    except (ValueError, RecursionError, OSError) as error:  # ValueError: not TOML, not UTF-8, or a number without end
        raise ConfigError(f"{path} cannot be read as TOML: {printable(str(error), 300)}; mend the file") from error
    if _deep(tables):
        raise ConfigError(f"{path} has tables within tables without end; mend the file")
    return tables


def _deep(tables: dict[str, Any]) -> bool:
    """Whether values lie deeper in each other than in any file of ours: what walks through them calls itself."""
    level: list[Any] = [tables]
    for _ in range(32):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _held(one)]
    return bool(level)


def _held(one: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return one.values() if isinstance(one, dict) else one


M = TypeVar("M", bound=BaseModel)


def validated(kind: type[M], raw: dict[str, Any], path: Path) -> M:
    """A file's tables as what they describe.

    Raises:
        ConfigError: names the file, and its first key that is unknown, missing or out of its range.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error


def scenario_folder() -> Path:
    """Where the shipped scenarios are: in the wheel beside this module, in a checkout under `simulations/`."""
    package = Path(str(files("fl_dpgan")))
    inside = package / "scenarios"
    return inside if inside.is_dir() else package.parent / "simulations" / "scenarios"


def load_scenario(name_or_path: str, overrides: Iterable[str] = ()) -> Scenario:
    """Read a shipped scenario by name, or a TOML file, and apply overrides of the form `section.key=value`.

    A file may hold several methods: the tables under `[methods.NAME]` go over the others where `method` is NAME. The
    other overrides come last.

    Raises:
        ConfigError: no such scenario or method, not TOML, an unknown key, or a value out of its range.
    """
    path = Path(name_or_path) if name_or_path.endswith(".toml") else scenario_folder() / f"{name_or_path}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in scenario_folder().glob("*.toml")))
        raise ConfigError(f"no scenario {name_or_path!r}; choose one of {known}, or give a .toml file")
    raw = read_toml(path, "give another one")
    changes = [_parsed(override) for override in overrides]
    for keys, value in changes:
        if keys == ["method"]:
            raw["method"] = value
    _take_method(raw, path)
    for keys, value in changes:
        _set(raw, keys, value)
    return parse_scenario(raw)


def parse_scenario(raw: dict[str, Any]) -> Scenario:
    """Validate a scenario's tables.

    Raises:
        ConfigError: an unknown key or a value out of its range.
    """
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from error


def one_line(error: ValidationError) -> str:
    """A validation error's first problem, as `where: what`."""
    problem = error.errors()[0]
    where = printable(".".join(str(part) for part in problem["loc"]), 200)  # may be keys of a file from elsewhere
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}; remove it or correct its name"
    message = printable(str(problem["msg"]).removeprefix("Value error, "), 500)
    value = problem["input"]
    shown = f" (got {_shown(value)})" if isinstance(value, int | float | str) else ""
    return f"{where}: {message}{shown}" if where else message


def _shown(value: float | str) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:  # Python does not write out a number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.200}"


def _take_method(raw: dict[str, Any], path: Path) -> None:
    methods, name = raw.pop("methods", None), raw.get("method")
    if methods is None and name is None:
        return
    if not isinstance(methods, dict) or not isinstance(name, str) or not isinstance(methods.get(name), dict):
        known = printable(", ".join(methods), 300) if isinstance(methods, dict) else "none"
        asked = f"{name!r:.200}" if isinstance(name, str) else "of such a name"
        raise ConfigError(f"{path.stem} has no method {asked}; choose one of {known}")
    _merge(raw, methods[name])


def _merge(raw: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict) and "rule" not in value:
            _merge(raw[key], value)
        else:
            raw[key] = value  # a clipping rule's table is one value


def _parsed(override: str) -> tuple[list[str], Any]:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    return key.strip().split("."), value


def _set(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    *sections, last = keys
    table = raw
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {'.'.join(keys)}: {section!r} is a value, not a section")
        table = inner
    table[last] = value
