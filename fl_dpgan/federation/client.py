"""The Flower side of a site: its handlers, and the boundary that keeps a fault's text at the site."""

import logging
from collections.abc import Callable

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fl_dpgan.federation.site import Site

_log = logging.getLogger(__name__)


def register(app: ClientApp, site_of: Callable[[Context], Site]) -> None:
    """Let a Flower ClientApp answer as the site that `site_of` builds from the context.

    Whatever fails, building the site included, is written to the site's own log, and the server is told that it failed
    and no more: Flower would send it the exception's text, which may tell the number of records.
    """

    def guarded(answer: Callable[[Site, Message], Message]) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return answer(site_of(context), message)
            except Exception:
                _log.exception("the site could not answer")
                return Message(
                    Error(code=2, reason="the site cannot take part; its own log says why"), reply_to=message
                )

        return handle

    app.query()(guarded(Site.hello))
    app.train()(guarded(Site.train))
    app.evaluate()(guarded(Site.evaluate))
