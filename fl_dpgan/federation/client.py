"""The Flower side of a site: its handlers, and the boundary that keeps a fault's text at the site."""

import logging
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, MessageType
from flwr.clientapp import ClientApp

from fl_dpgan.errors import FlDpganError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.envelope import pack_parts, unpack_parts
from fl_dpgan.federation.site import Site

_log = logging.getLogger(__name__)


class Pack:
    """The sites behind one Flower node. A real node has one; in a simulation many may share a node's messages."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = {site.name: site for site in sites}

    def hello(self, message: Message) -> Message:
        """Introduce each site."""
        parts = [(site.introduction().model_dump_json(), b"") for site in self._sites.values()]
        return Message(pack_parts(parts), reply_to=message)

    def train(self, message: Message) -> Message:
        """Answer each site's training request with D's weights, or its request for a release."""
        return self._answer(message, MessageType.TRAIN)

    def evaluate(self, message: Message) -> Message:
        """Answer each site's request with a noised count of the images that a classifier gets right."""
        return self._answer(message, MessageType.EVALUATE)

    def _answer(self, message: Message, carrier: str) -> Message:
        sites = list(self._sites.values())
        try:
            requests = unpack_parts(message)
            if len(requests) > len(sites):
                raise WireError(f"{len(requests)} requests to a node of {len(sites)} sites")
            answers = [self._addressee(header).answer(header, body, carrier) for header, body in requests]
        except WireError as error:
            answers = [site.refusal(0, "refused", "wire", str(error)) for site in sites]
        return Message(pack_parts(answers), reply_to=message)

    def _addressee(self, header: str) -> Site:
        """The site that a request names; any site refuses a request that names none here."""
        first = next(iter(self._sites.values()))
        try:
            return self._sites.get(wire.parse(header, wire.Request).site, first)
        except WireError:
            return first


def respond(message: Message, context: Context, sites_of: Callable[[Context], Site | Iterable[Site]]) -> Message:
    """The answer of the site, or the sites, that `sites_of` builds from the context.

    Whatever fails, building a site included, is written to the site's own log, and the server is told that it failed
    and no more: Flower would send it the exception's text, which may tell the number of records.
    """
    try:
        sites = sites_of(context)
        pack = Pack([sites] if isinstance(sites, Site) else sites)
        kinds = {MessageType.QUERY: pack.hello, MessageType.TRAIN: pack.train, MessageType.EVALUATE: pack.evaluate}
        return kinds[message.metadata.message_type](message)
    except FlDpganError as error:
        _log.error("the site could not answer: %s", error)
    except Exception:
        _log.exception("the site could not answer")
    return Message(Error(code=2, reason="the site cannot take part; its own log says why"), reply_to=message)


def register(app: ClientApp, sites_of: Callable[[Context], Site | Iterable[Site]]) -> None:
    """Let a Flower ClientApp answer as the sites that `sites_of` builds from the context; see `respond`."""

    def handle(message: Message, context: Context) -> Message:
        return respond(message, context, sites_of)

    for kind in (app.query, app.train, app.evaluate):
        kind()(handle)
