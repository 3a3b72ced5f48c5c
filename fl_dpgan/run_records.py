"""What may stand in a run's files: a checkpoint's JSON, what was asked since, and a line of the round log."""

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fl_dpgan.privacy.accountant import Mechanism
from fl_dpgan.privacy.plan import SitePlan

#: What a run may be called: the sites are told it.
RUN_NAME = r"^[A-Za-z0-9._-]{1,64}$"


class Memory(BaseModel):
    """What is remembered of a site (`SiteRecord.memory`)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    plan: SitePlan
    steps: int = Field(ge=0, le=10**9)
    evaluations: int = Field(ge=0, le=10**9)
    releases: int = Field(0, ge=0, le=10**9)
    head: str = Field("", pattern=r"^([0-9a-f]{64})?$")


class Meta(BaseModel):
    """The JSON of a checkpoint; what an older version left out has a default."""

    model_config = ConfigDict(strict=True)
    run: str = Field(pattern=RUN_NAME)
    round: int = Field(ge=0, le=10**7)
    released: bool = False
    sites: dict[str, Memory]


class Outcome(BaseModel):
    """What became of a request, as far as something reads it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    status: str
    reason: str = ""
    rule: str = ""
    epsilon: float | None = None


class Evaluation(BaseModel):
    """An evaluation count of a round, as far as something reads it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    accuracy: float = 0.0
    noise_sd: float | None = None
    outcomes: dict[str, Outcome] = {}


class Round(BaseModel):
    """A line of the round log, as far as something reads it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    round: int = Field(ge=0, le=10**7)
    seconds: float = 0.0
    g_loss: float | None = None
    epsilon_min: float | None = None
    epsilon_max: float | None = None
    sites: dict[str, Outcome] = {}
    not_joined: list[str] = []
    stopped: str = ""
    evaluation: Evaluation | None = None


#: What was asked since the last checkpoint: a mechanism, and by name what is remembered of the sites asked.
ASKED = TypeAdapter(list[tuple[Mechanism, dict[str, Memory]]])
