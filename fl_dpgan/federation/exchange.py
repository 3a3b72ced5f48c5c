"""What the server asks the sites in a round, and how they answered: outcomes, and what may have been charged."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from fl_dpgan.errors import WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.envelope import pack_parts, unpack_parts
from fl_dpgan.privacy.accountant import Mechanism
from fl_dpgan.privacy.plan import SitePlan


@dataclass
class SiteRecord:
    """What the server knows of a site: all of it public."""

    node: int
    plan: SitePlan
    steps: int = 0  # D steps of requests that may have been charged
    evaluations: int = 0  # evaluation counts likewise
    releases: int = 0  # moment releases likewise
    head: str = ""  # newest hash of the site's ledger that was seen
    withdrawn: str = ""

    @classmethod
    def recalled(cls, node: int, memory: dict[str, Any]) -> "SiteRecord":
        """The site as a checkpoint's `memory` has it, at this node."""
        return cls(node, **{**memory, "plan": SitePlan.model_validate(memory["plan"])})

    @property
    def epsilon(self) -> float:
        """The run's epsilon at this site, recomputed from the plan and from what was asked for."""
        return self.plan.epsilon_after(self.steps, self.evaluations, releases=self.releases)

    def count(self, mechanism: Mechanism) -> None:
        """Take one more request of this kind for charged."""
        if mechanism == "evaluation_count":
            self.evaluations += 1
        elif mechanism == "moment_release":
            self.releases += 1
        else:
            self.steps += self.plan.steps_a_round

    @property
    def memory(self) -> dict[str, Any]:
        """What a checkpoint keeps of the site: all but what a new start of the run finds out anew."""
        kept = {
            "steps": self.steps,
            "evaluations": self.evaluations,
            "releases": self.releases,
            "head": self.head,
        }
        return {"plan": self.plan.model_dump(mode="json"), **kept}


class Exchange:
    """Questions to the sites and their answers, one round of one mechanism at a time.

    Args:
        run: the run's name at the sites. sites: who has joined, by name. ttl: seconds after which Flower drops a
            request: one that nobody waits for any more is not to be charged.

    Attributes:
        sites: as given. outcomes: how each site that was asked last has answered.
    """

    def __init__(self, run: str, sites: dict[str, SiteRecord], *, ttl: float) -> None:
        self._run, self.sites, self._ttl = run, sites, ttl
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._absent: list[str] = []
        self._asked: list[tuple[Message, list[str]]] = []  # Flower gives a message its id when it sends it

    def requests(self, number: int, tensors: bytes, mechanism: Mechanism, online: Iterable[int]) -> Iterator[Message]:
        """A request to each site that has not withdrawn, with its plan; one message a node, the tensors once in it.

        Sites whose node is not among those `online` are not asked: the round need not wait for them.
        """
        self._asked, self._absent, online = [], [], set(online)
        nodes: dict[int, list[str]] = {}
        for name in sorted(self.sites):
            if self.sites[name].withdrawn:
                continue
            if self.sites[name].node in online:
                nodes.setdefault(self.sites[name].node, []).append(name)
            else:
                self._absent.append(name)
        for node, names in nodes.items():
            requests = [
                wire.Request(
                    run=self._run, round=number, site=name, plan=self.sites[name].plan, mechanism=mechanism,
                    anchor=self.sites[name].head,
                )
                for name in names
            ]  # fmt: skip
            content = pack_parts([(request.model_dump_json(), tensors) for request in requests])
            message = Message(content, dst_node_id=node, message_type=wire.CARRIER[mechanism], ttl=self._ttl)
            self._asked.append((message, names))
            yield message

    @property
    def asked(self) -> list[str]:
        """The sites that the requests are for."""
        return [name for _, names in self._asked for name in names]

    def maybe_charged(self) -> list[str]:
        """The sites that may have charged this round's request; one that says `repeated` has done so before."""
        return [
            name
            for name, outcome in self.outcomes.items()
            if outcome["status"] not in ("withdrawn", "refused", "absent") or outcome.get("rule") == "repeated"
        ]

    def answers(self, server_round: int, replies: Iterable[Message]) -> Iterator[tuple[str, wire.Answer, bytes]]:
        """The well-formed answers to what this round asked; notes each site's outcome and its ledger's head."""
        silent = {"status": "silent", "reason": "no answer in time"}
        absent = {"status": "absent", "reason": "its node is not connected"}
        self.outcomes = dict.fromkeys(self._absent, absent)
        self.outcomes |= {name: silent for _, names in self._asked for name in names}
        asked = {message.metadata.message_id: names for message, names in self._asked}
        for reply in replies:
            names = asked.pop(reply.metadata.reply_to_message_id, None)
            if names is not None:  # else an answer to something this round did not ask
                yield from self._parts(server_round, reply, set(names))

    def _parts(self, server_round: int, reply: Message, waiting: set[str]) -> Iterator[tuple[str, wire.Answer, bytes]]:
        """A node's answers for the sites that are waited for; those without a well-formed one are left out."""
        problem = "the node did not answer for this site"
        try:
            parts = unpack_parts(reply)
        except WireError as error:
            parts, problem = [], str(error)
        for header, tensors in parts:
            try:
                answer = wire.parse(header, wire.Answer)
                if answer.site not in waiting or answer.round != server_round:
                    raise WireError(f"an answer for site {answer.site}, round {answer.round}")
            except WireError as error:
                problem = str(error)
                continue
            waiting.remove(answer.site)
            self.outcomes[answer.site] = {"status": answer.status, "rule": answer.rule, "reason": answer.reason}
            if answer.status in ("trained", "released", "counted"):  # what was charged; a refusal has no head
                self.sites[answer.site].head = answer.head or self.sites[answer.site].head
            yield answer.site, answer, tensors
        for name in waiting:
            self.outcomes[name] = {"status": "left out", "reason": problem}
