"""Who takes part: nodes introduce their sites at the start and whenever a new one comes; a site keeps its place."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError, FederationError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.envelope import unpack_parts
from fl_dpgan.federation.exchange import SiteRecord

#: Seconds between two looks at which nodes are there.
_PAUSE = 0.5


class Roster:
    """The sites of a run and the nodes that they are at.

    Args:
        plan: the run's constants. question: what each node is asked first.
        registered: gives the node at which each site is known, by name; a site that comes from another is turned away.
            None where nodes are not known beforehand.

    Attributes:
        sites: who has joined, by name. memory: what a checkpoint keeps of each site of an earlier start of the run.
    """

    def __init__(
        self, plan: Plan, question: wire.Question, registered: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        self._plan, self._question, self._registered = plan, question, registered
        self.sites: dict[str, SiteRecord] = {}
        self.memory: dict[str, dict[str, Any]] = {}
        self._asked: list[Message] = []  # Flower gives a message its id when it sends it
        self._online: set[int] = set()
        self._refused: dict[int, str] = {}

    def questions(self, nodes: Iterable[int]) -> list[Message]:
        """The first question to each node that is there and has no site in the run."""
        self._online = set(nodes)
        known = {site.node for site in self.sites.values()}
        self._asked = [
            Message(
                wire.pack(self._question),
                dst_node_id=node,
                message_type=MessageType.QUERY,
                ttl=self._plan.federation.round_timeout,
            )
            for node in sorted(self._online - known)
        ]
        return self._asked

    def admit(self, replies: Iterable[Message]) -> list[str]:
        """Admit the sites that the nodes introduce in answer to `questions`.

        Returns:
            Why sites, or nodes, have not joined; what a node has said before is left out.
        """
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in self._asked}
        told = []
        for reply in replies:
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is None:
                continue
            refusals = self._introduced(reply, node)
            if refusals and self._refused.get(node) != str(refusals):
                told += refusals
            self._refused[node] = str(refusals)
        return told

    def join(self, grid: Grid) -> list[str]:
        """Let the nodes that are there introduce their sites: a quorum is waited for, and the rest for a little.

        Returns:
            Why sites, or nodes, have not joined.
        """
        federation, began, told = self._plan.federation, time.monotonic(), list[str]()
        real = self._registered is not None
        while True:
            nodes = list(grid.get_node_ids())
            waited = time.monotonic() - began
            enough = len(nodes) * federation.sites_per_node >= federation.quorum
            if real or len(nodes) >= federation.nodes or waited >= self._patience(enough):
                questions = self.questions(nodes)
                replies = grid.send_and_receive(questions, timeout=federation.round_timeout) if questions else []
                told += self.admit(replies)
                # a real site's guard may still be reading its images; a simulated one says the same again
                enough = len(self.sites) >= federation.quorum
                if not real or len(self.sites) >= federation.sites or waited >= self._patience(enough):
                    return told
            time.sleep(_PAUSE)

    def _patience(self, enough: bool) -> float:
        """Seconds that a start waits for sites, with or without a quorum of them."""
        federation = self._plan.federation
        return min(federation.join_timeout, federation.round_timeout) if enough else federation.round_timeout

    def await_quorum(self, grid: Grid, number: int) -> None:
        """Wait until a quorum is connected: for a round that cannot count, no site is to be asked, and charged.

        Where budgets leave fewer sites than a quorum there is nothing to wait for.

        Args:
            number: the round.

        Raises:
            FederationError: it does not come within the time for a round.
        """
        federation, began = self._plan.federation, time.monotonic()
        left = {site.node for site in self.sites.values() if not site.withdrawn}
        if len(left) * federation.sites_per_node < federation.quorum:
            return
        while (present := len(left & set(grid.get_node_ids()))) * federation.sites_per_node < federation.quorum:
            if time.monotonic() - began >= federation.round_timeout:
                raise FederationError(
                    f"round {number}: {present} sites are connected, the quorum is {federation.quorum}; "
                    "mend the sites, then continue the run from its checkpoint"
                )
            time.sleep(_PAUSE)

    def _introduced(self, reply: Message, node: int) -> list[str]:
        try:
            parts = unpack_parts(reply)
            if len(parts) > (most := self._plan.federation.sites_per_node):
                raise WireError(f"a node introduces {len(parts)} sites; federation.sites_per_node is {most}")
        except WireError as error:
            return [str(error)]
        refusals = []
        for header, _ in parts:
            try:
                self._admit(_hello(header), node)
            except (WireError, ConfigError) as error:
                refusals.append(str(error))
        return refusals

    def _admit(self, hello: wire.Hello, node: int) -> None:
        if self._registered is not None and self._registered().get(hello.site) != node:
            raise ConfigError(f"node {node} calls itself {hello.site}, under which name it is not registered")
        present = self.sites.get(hello.site)
        if present and (present.node in self._online or present.node == node):
            raise ConfigError(f"another node calls itself {hello.site} too; give each site a name of its own")
        if hello.unit != self._plan.privacy.unit:
            raise ConfigError(f"site {hello.site} protects {hello.unit}s, the run {self._plan.privacy.unit}s")
        if present:  # back at another node: its plan and what it may have spent stay as they are
            present.node = node
            return
        # a resumed run goes on with the plan that the site has accepted
        memory = self.memory.get(hello.site)
        self.sites[hello.site] = (
            SiteRecord.recalled(node, memory)
            if memory
            else SiteRecord(node, self._plan.site_plan(hello.declared_size, hello.order))
        )


def _hello(header: str) -> wire.Hello:
    """A site's introduction, or its refusal as an error."""
    try:
        return wire.parse(header, wire.Hello)
    except WireError:
        try:
            refusal = wire.parse(header, wire.Answer)
        except WireError:
            pass
        else:
            raise WireError(f"site {refusal.site} did not join: {refusal.reason}") from None
        raise
