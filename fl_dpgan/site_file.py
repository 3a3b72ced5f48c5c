"""A site's file, `site.toml`: its name, its data, its guard, and its policy. `site init` writes a commented one."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fl_dpgan.config import one_line, read_toml, validated
from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.entries import MAIN, NAME
from fl_dpgan.privacy.policy import Policy

Source = Literal["folder", "manifest", "npz", "idx"]


def _usable(path: Path) -> Path:
    if not str(path).isprintable():
        raise ValueError("characters that no path should have; write another one")
    return path


_Path = Annotated[Path, AfterValidator(_usable)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SiteData(_Table):
    """Where a site's images are. Every record in them counts against the site's one budget."""

    source: Source = Field(
        "folder",
        description='"folder": PATH/LABEL/*.png, .jpg or .dcm. "manifest": PATH is a CSV file with the columns path, '
        'label and, if wanted, patient, frame and split; rows of split "test" are left out. "npz": PATH is an NPZ file '
        'with the arrays images and labels. "idx": PATH is a folder with one file of images and one of labels.',
    )
    path: _Path = Field(Path("images"), description="The folder or file; a relative path starts at this file.")
    cache: _Path = Field(
        Path("cache"),
        description="A folder for the images once read, so that a restart takes seconds; only the guard's user may "
        "read it.",
    )
    allow_missing_classes: bool = Field(
        False, description="Whether the site may join without an image of each of the federation's labels."
    )


class GuardSettings(_Table):
    """The process that holds the data and the ledger."""

    socket: _Path = Field(
        Path("/run/fl-dpgan/guard.sock"),
        description="Where Flower's ClientApp reaches the guard, on this machine alone.",
    )
    flower_user: str = Field(
        "fl-flower",
        pattern=r"^[a-z_][a-z0-9_-]{0,31}$",
        description="The user that runs Flower's SuperNode. It may use the socket, and read neither images nor ledger.",
    )


class SiteFile(_Table):
    """What a site's own people decide. Unknown keys are refused."""

    name: str = Field(
        pattern=NAME,
        description="The site's name, the same in every run. It becomes public.",
    )
    ledger: _Path = Field(
        Path("ledger.sqlite"), description="The ledger, one file for ever; a relative path starts at this file."
    )
    budget: str = Field(
        MAIN,
        pattern=NAME,
        description='Which of the ledger\'s budgets pays: "main", or one opened with `budget declare-disjoint`.',
    )
    federation: _Path = Field(
        Path("federation.toml"), description="The coordinator's description of the federation; read it before you join."
    )
    policy: Policy
    data: SiteData = SiteData()
    labels: dict[str, str] = Field(
        {},
        description='Your labels, each with the federation\'s name for it, as in "NORM" = "normal". One that is called '
        "the same needs no line.",
    )
    guard: GuardSettings = GuardSettings()


def load_site(path: Path) -> SiteFile:
    """Read a site's file. Paths in it start from its folder.

    Raises:
        ConfigError: there is none, it is not TOML, or a key is unknown, missing or out of its range.
    """
    site = validated(SiteFile, read_toml(path, "write one with `fl-dpgan site init`"), path)
    home = path.absolute().parent
    data = site.data.model_copy(update={"path": home / site.data.path, "cache": home / site.data.cache})
    guard = site.guard.model_copy(update={"socket": home / site.guard.socket})
    return site.model_copy(
        update={"ledger": home / site.ledger, "federation": home / site.federation, "data": data, "guard": guard}
    )


def template(name: str, declared_size: int, *, source: str = "folder", path: Path = Path("images")) -> str:
    """A commented site file with every key, at its default but for what is given.

    Raises:
        ConfigError: the name, the size or the source is out of its range.
    """
    try:
        policy = Policy(declared_size=declared_size, delta=min(1e-5, 1 / (10 * max(declared_size, 1))))
        policy = policy.model_copy(update={"order": policy.ledger_order})
        site = SiteFile(name=name, policy=policy, data=SiteData.model_validate({"source": source, "path": path}))
    except ValidationError as error:
        raise ConfigError(one_line(error)) from error
    head = "# What this site accepts and what it may ever spend. No message from a server can change it.\n"
    tables = [
        f"\n\n[{key}]\n{_keys(value)}" if isinstance(value, BaseModel) else f"\n\n# {field.description}\n[{key}]"
        for key, field in SiteFile.model_fields.items()
        if isinstance(value := getattr(site, key), BaseModel | dict)
    ]
    return f"{head}{_keys(site)}{''.join(tables)}\n"


def _keys(model: BaseModel) -> str:
    lines = []
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        if not isinstance(value, BaseModel | dict):
            lines.append(f"\n# {field.description}\n{key} = {_value(value)}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else f'"{value}"'
