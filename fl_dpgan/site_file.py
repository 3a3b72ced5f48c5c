"""A site's file, `site.toml`: its name, where its ledger is, and its policy. `site init` writes a commented one."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_dpgan.config import one_line
from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.entries import MAIN, NAME
from fl_dpgan.privacy.policy import Policy


class SiteFile(BaseModel):
    """What a site's own people decide. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=NAME,
        description="The site's name, the same in every run. It becomes public.",
    )
    ledger: Path = Field(
        Path("ledger.sqlite"), description="The ledger, one file for ever; a relative path starts at this file."
    )
    budget: str = Field(
        MAIN, description='Which of the ledger\'s budgets pays: "main", or one opened with `budget declare-disjoint`.'
    )
    policy: Policy


def load_site(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        ConfigError: there is none, it is not TOML, or a key is unknown, missing or out of its range.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no site file at {path}; write one with `fl-dpgan site init`") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    try:
        site = SiteFile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error
    return site.model_copy(update={"ledger": path.absolute().parent / site.ledger})


def template(name: str, declared_size: int) -> str:
    """A commented site file with every key at its default.

    Raises:
        ConfigError: the name or the size is out of its range.
    """
    try:
        policy = Policy(declared_size=declared_size, delta=min(1e-5, 1 / (10 * max(declared_size, 1))))
        policy = policy.model_copy(update={"order": policy.ledger_order})
        site = SiteFile(name=name, policy=policy)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from error
    head = "# What this site accepts and what it may ever spend. No message from a server can change it.\n"
    return f"{head}{_table(site)}\n\n[policy]\n{_table(policy)}\n"


def _table(model: BaseModel) -> str:
    lines = []
    for key, field in type(model).model_fields.items():
        if key != "policy":
            lines.append(f"\n# {field.description}\n{key} = {_value(getattr(model, key))}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value) if isinstance(value, int | float) else f'"{value}"'
