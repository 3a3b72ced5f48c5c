"""What crosses the network: a JSON header and safetensors, checked on arrival. Nothing is unpickled.

A site sends the fields of `LEAVES` and nothing else; each says why it may leave.
"""

import hashlib
from typing import Annotated, Literal, TypeVar

import torch
from flwr.app import Message, MessageType, RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from torch import Tensor, nn

from fl_dpgan.errors import WireError
from fl_dpgan.federation.envelope import pack_parts, unpack_parts
from fl_dpgan.federation.frames import HEADER_LIMIT
from fl_dpgan.privacy.accountant import Mechanism
from fl_dpgan.privacy.entries import NAME, Unit
from fl_dpgan.privacy.plan import Order, SitePlan
from fl_dpgan.run_records import RUN_NAME
from fl_dpgan.text import printable

#: What each mechanism's request travels in: Flower's type of message.
CARRIER: dict[Mechanism, str] = {
    "discriminator_update": MessageType.TRAIN,
    "evaluation_count": MessageType.EVALUATE,
    "moment_release": MessageType.TRAIN,
    "image_gradient": MessageType.TRAIN,
}

#: Every field that leaves a site, by message, with the reason why it is safe. What is not listed does not leave.
LEAVES = {
    "Hello": {
        "site": "public: the name that the site gave itself",
        "declared_size": "public: declared in the site's policy, not counted from the data",
        "unit": "public: the site's policy",
        "order": "public: fixed when the ledger was created, from the policy",
    },
    "Answer": {
        "site": "public: as in Hello",
        "round": "public: repeated from the request",
        "status": "public: follows from the request, the policy and the ledger's events, never from a record",
        "rule": "public: a key of the site's policy",
        "reason": "public: speaks of the request, the policy and the ledger's events",
        "head": "public: hash of the newest ledger entry, over events and what they released",
        "count": "charged: the noised count of event `evaluation_count`",
        "tensors": "charged: D's weights after the noised steps of event `discriminator_update`, the noised sums of "
        "event `moment_release`, or the noised gradients of event `image_gradient`",
    },
}


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Question(_Header):
    """The server's first question to a node: who is there? Real sites compare it with their `federation.toml`.

    `classes` and `fingerprint` are the `Federation`'s; a simulation has none.
    """

    classes: tuple[str, ...] = Field((), max_length=100_000)
    fingerprint: str = Field("", pattern=r"^([0-9a-f]{64})?$")


class Hello(_Header):
    """A site's answer to the server's first question; `order` is its ledger's."""

    site: str = Field(pattern=NAME)
    declared_size: int = Field(ge=1, le=10**10)
    unit: Unit
    order: Order


class Request(_Header):
    """One request to one site. Tensors: D's and G's weights, a classifier's for an evaluation count, none for moments.

    `anchor` is the newest hash of the site's ledger that the server has seen: a site whose ledger does not hold it has
    lost entries, and does not train.
    """

    run: str = Field(pattern=RUN_NAME)
    round: int = Field(ge=1, le=10**7)
    site: str = Field(max_length=64)
    plan: SitePlan
    mechanism: Mechanism = "discriminator_update"
    anchor: str = Field("", pattern=r"^([0-9a-f]{64})?$")

    @property
    def id(self) -> str:
        """The same for a repetition of the request."""
        return f"{self.run}/{self.round}/{self.site}/{self.mechanism}"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("characters that cannot be printed")
    return text


class Answer(_Header):
    """A site's answer: `trained` comes with D's weights, `released` with sums or gradients, `counted` with a count.

    The rest come with a rule and a reason.
    """

    site: str = Field(pattern=NAME)
    round: int
    status: Literal["trained", "released", "counted", "withdrawn", "refused", "failed"]
    rule: str = Field("", pattern=r"^[a-z_]{0,64}$")
    reason: Annotated[str, AfterValidator(_printable)] = Field("", max_length=1000)  # it goes to logs and terminals
    head: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    count: float | None = Field(None, allow_inf_nan=False)


H = TypeVar("H", bound=_Header)


def pack(header: BaseModel, tensors: bytes = b"") -> RecordDict:
    """A message's content from one header and its serialised tensors."""
    return pack_parts([(header.model_dump_json(), tensors)])


def parse(header: str, kind: type[H]) -> H:
    """A header from its JSON text.

    Raises:
        WireError: it is not one of this kind.
    """
    if len(header) > HEADER_LIMIT:  # a list of all that is wrong with it could take a thousand times its bytes
        raise WireError(f"a {kind.__name__} of {len(header)} characters; the most are {HEADER_LIMIT}")
    try:
        return kind.model_validate_json(header)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        # the place may be a name of the sender's choice, which goes to logs and back
        raise WireError(
            f"a malformed {kind.__name__}: {printable(str(problem['loc']), 200)}: {printable(problem['msg'], 300)}"
        ) from error


def unpack(message: Message, kind: type[H]) -> tuple[H, bytes]:
    """The only header of a message, validated, and its serialised tensors.

    Raises:
        WireError: the message has another form, or more parts than one.
    """
    (header, tensors), *more = unpack_parts(message)
    if more:
        raise WireError(f"{1 + len(more)} headers where one is expected")
    return parse(header, kind), tensors


def digest(header: Request, tensors: bytes) -> str:
    """SHA-256 of a request's content, but for what the server has seen of the ledger: it may ask again knowing more."""
    return hashlib.sha256(
        header.model_copy(update={"anchor": ""}).model_dump_json().encode() + b"\0" + tensors
    ).hexdigest()


def dump(**modules: nn.Module) -> bytes:
    """Serialise the modules' states, each tensor named `MODULE.NAME`."""
    return _save({f"{key}.{name}": t for key, module in modules.items() for name, t in module.state_dict().items()})


def restore(tensors: bytes, **modules: nn.Module) -> None:
    """Load serialised states into the modules, after checking names, shapes, types and that every value is finite.

    Raises:
        WireError: they do not fit; the modules are as before.
    """
    given = _load(tensors)
    check(given, {f"{key}.{name}": t for key, module in modules.items() for name, t in module.state_dict().items()})
    for key, module in modules.items():
        module.load_state_dict({name: given[f"{key}.{name}"] for name in module.state_dict()})


def dump_parameters(discriminator: nn.Module) -> bytes:
    """What a site answers with: the parameters, which noised sums alone have moved. Buffers stay at the site."""
    return _save(dict(discriminator.named_parameters()))


def read_parameters(tensors: bytes, discriminator: nn.Module) -> dict[str, Tensor]:
    """The parameters that a site answered with, by name.

    Raises:
        WireError: they do not fit the discriminator, or are not finite.
    """
    given = _load(tensors)
    check(given, dict(discriminator.named_parameters()))
    return given


def dump_tensors(**tensors: Tensor) -> bytes:
    """Serialise tensors by name."""
    return _save(tensors)


def read_tensors(tensors: bytes, **template: Tensor) -> dict[str, Tensor]:
    """Serialised tensors by name, after checking names, shapes, types and that every value is finite.

    Raises:
        WireError: they do not fit.
    """
    given = _load(tensors)
    check(given, template)
    return given


def _save(tensors: dict[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _load(tensors: bytes) -> dict[str, Tensor]:
    try:
        return load(tensors)
    except Exception as error:  # safetensors raises whatever a strange type or shape brings about
        raise WireError(f"tensors that are not safetensors ({type(error).__name__})") from error


def check(given: dict[str, Tensor], template: dict[str, Tensor]) -> None:
    """Compare tensors with a template of the same names, shapes and types, and refuse values that are not finite.

    Raises:
        WireError: what differs, and where.
    """
    if given.keys() != template.keys():
        odd = sorted(given.keys() ^ template.keys())[0]
        raise WireError(f"tensor {odd!r:.200} is missing or unexpected; the networks differ from the federation's")
    for name, want in template.items():  # in this order, so that the same fault is named every time
        tensor = given[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise WireError(
                f"tensor {name!r} is {tuple(tensor.shape)!s:.200} {tensor.dtype}, not {tuple(want.shape)} {want.dtype}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WireError(f"tensor {name!r} holds NaN or infinity")
