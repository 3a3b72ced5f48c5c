"""A Flower message's content: headers' JSON texts, each with its serialised tensors. Needs Flower, and not PyTorch."""

from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from fl_dpgan.errors import WireError
from fl_dpgan.text import printable

_RECORD = "fl_dpgan"


def pack_parts(parts: Sequence[tuple[str, bytes]]) -> RecordDict:
    """A message's content from several headers' JSON texts, each with its tensors; tensors of all alike travel once."""
    headers, tensors = [header for header, _ in parts], [body for _, body in parts]
    if all(body is tensors[0] for body in tensors):
        tensors = tensors[:1]
    return RecordDict({_RECORD: ConfigRecord({"headers": headers, "tensors": tensors})})


def unpack_parts(message: Message) -> list[tuple[str, bytes]]:
    """Each header's JSON text and the tensors that go with it.

    Raises:
        WireError: the message has another form.
    """
    if message.has_error():
        raise WireError(f"no answer: {printable(message.error.reason or 'the node is unreachable')}")
    record = message.content.config_records.get(_RECORD)
    headers, tensors = (record.get("headers"), record.get("tensors")) if record else (None, None)
    if (
        not isinstance(headers, list)
        or not isinstance(tensors, list)
        or not all(isinstance(header, str) for header in headers)
        or not all(isinstance(body, bytes) for body in tensors)
        or not headers
        or len(tensors) not in (1, len(headers))
    ):
        raise WireError(f"a message without the record {_RECORD!r} of headers, with tensors for each or for all")
    return list(zip(headers, tensors * len(headers) if len(tensors) == 1 else tensors, strict=True))  # type: ignore[arg-type]
