"""What crosses the network: a JSON header and safetensors, checked on arrival. Nothing is unpickled.

A site sends the fields of `Answer` and `Hello` and nothing else. `site`, `declared_size` and the yes or no of taking
part are public; the weights are the charged mechanism's output; `reason` speaks of public numbers only.
"""

import hashlib
from typing import Literal, TypeVar

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fl_dpgan.errors import WireError
from fl_dpgan.privacy.plan import SitePlan

_RECORD = "fl_dpgan"


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hello(_Header):
    """A site's answer to the server's first question."""

    site: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    declared_size: int = Field(ge=1, le=10**10)


class Request(_Header):
    """One round's request to one site; the tensors are D's and G's weights."""

    run: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    round: int = Field(ge=1, le=10**7)
    site: str
    plan: SitePlan

    @property
    def id(self) -> str:
        """The same for a repetition of the request."""
        return f"{self.run}/{self.round}/{self.site}"


class Answer(_Header):
    """A site's answer: `trained` comes with D's weights, the others with a reason."""

    site: str
    round: int
    status: Literal["trained", "withdrawn", "refused", "failed"]
    reason: str = ""


H = TypeVar("H", bound=_Header)


def pack(header: BaseModel, tensors: bytes = b"") -> RecordDict:
    """A message's content from a header and serialised tensors."""
    return RecordDict({_RECORD: ConfigRecord({"header": header.model_dump_json(), "tensors": tensors})})


def unpack(message: Message, kind: type[H]) -> tuple[H, bytes]:
    """The header, validated, and the serialised tensors.

    Raises:
        WireError: the message has another form.
    """
    if message.has_error():
        raise WireError(f"no answer: {message.error.reason or 'the node is unreachable'}")
    record = message.content.config_records.get(_RECORD)
    header, tensors = (record.get("header"), record.get("tensors")) if record else (None, None)
    if not isinstance(header, str) or not isinstance(tensors, bytes):
        raise WireError(f"a message without the record {_RECORD!r} of a header and tensors")
    try:
        return kind.model_validate_json(header), tensors
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        raise WireError(f"a malformed {kind.__name__}: {problem['loc']}: {problem['msg']}") from error


def digest(header: BaseModel, tensors: bytes) -> str:
    """SHA-256 of a request's content."""
    return hashlib.sha256(header.model_dump_json().encode() + b"\0" + tensors).hexdigest()


def dump(**modules: nn.Module) -> bytes:
    """Serialise the modules' states, each tensor named `MODULE.NAME`."""
    states = {f"{key}.{name}": t for key, module in modules.items() for name, t in module.state_dict().items()}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in states.items()})


def restore(tensors: bytes, **modules: nn.Module) -> None:
    """Load serialised states into the modules, after checking names, shapes, types and that every value is finite.

    Raises:
        WireError: they do not fit; the modules are as before.
    """
    try:
        given = load(tensors)
    except SafetensorError as error:
        raise WireError(f"tensors that are not safetensors: {error}") from error
    check(given, {f"{key}.{name}": t for key, module in modules.items() for name, t in module.state_dict().items()})
    for key, module in modules.items():
        module.load_state_dict({name: given[f"{key}.{name}"] for name in module.state_dict()})


def check(given: dict[str, Tensor], template: dict[str, Tensor]) -> None:
    """Compare tensors with a template of the same names, shapes and types, and refuse values that are not finite.

    Raises:
        WireError: what differs, and where.
    """
    if given.keys() != template.keys():
        odd = sorted(given.keys() ^ template.keys())[0]
        raise WireError(f"tensor {odd!r} is missing or unexpected; the networks differ from the federation's")
    for name, tensor in given.items():
        want = template[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise WireError(
                f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(want.shape)} {want.dtype}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WireError(f"tensor {name!r} holds NaN or infinity")
