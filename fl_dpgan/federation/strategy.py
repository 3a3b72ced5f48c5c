"""FedDPGAN: the Flower strategy that averages the sites' discriminators and trains the shared generator."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError, FederationError, RunFolderError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.averaging import RunningMean
from fl_dpgan.federation.exchange import Exchange, SiteRecord
from fl_dpgan.federation.roster import Roster
from fl_dpgan.federation.sums import added_up
from fl_dpgan.moments.matching import matching_of
from fl_dpgan.privacy.accountant import Mechanism
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import GeneratorTrainer, Loss, adversarial, cosine
from fl_dpgan.training.state import load_module, load_optimizer, optimizer_tensors


class FedDPGAN(Strategy):
    """Federated DP-GAN: sites train D privately, the server averages D and trains G on fakes alone.

    Args:
        plan: the run's constants.
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.
        discriminator: called as `discriminator(images, labels)`, gives logits (n,).
        folder: where checkpoints and the round log go; a checkpoint in it is continued.
        run: the run's name at the sites; the same for a resumed run.
        on_round: called with each round's log record.
        train_classifier: trains a classifier on images of the generator that it is given; for the evaluation counts
            that the plan may ask for. Called with that generator and the round.
        question: what a node is asked first; real sites compare it with what they were told of the federation.
        registered: gives the node at which each real site is known, by name; sites come and go while a run lasts.
    """

    #: The status of a site's answer to a round.
    _answered: ClassVar[str] = "trained"

    def __init__(
        self,
        plan: Plan,
        generator: nn.Module,
        discriminator: nn.Module,
        *,
        folder: RunFolder,
        run: str,
        on_round: Callable[[dict[str, Any]], None] | None = None,
        train_classifier: Callable[[nn.Module, int], nn.Module] | None = None,
        question: wire.Question | None = None,
        registered: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        if plan.privacy.evaluation_noise is not None and train_classifier is None:
            raise ConfigError("privacy.evaluation_noise asks for evaluation counts; give FedDPGAN a train_classifier")
        self._train_classifier = train_classifier
        self.plan, self._folder, self._run = plan, folder, run
        self._roster = Roster(plan, question or wire.Question(), registered)
        self._exchange = Exchange(run, self._roster.sites, ttl=plan.federation.round_timeout)
        self._on_round = on_round or (lambda record: None)
        self.discriminator = discriminator
        training = plan.training
        self._trainer = GeneratorTrainer(generator, ema_decay=training.ema_decay)
        self._matching = matching_of(plan, generator)
        self._done, self._released = 0, False
        self._resume()

    @property
    def sites(self) -> dict[str, SiteRecord]:
        """The sites that have joined, by name."""
        return self._roster.sites

    @property
    def average_generator(self) -> nn.Module:
        """The EMA of G, which is what a run delivers."""
        return self._trainer.average

    @property
    def _modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds, by the prefix of its tensors' names."""
        trainer = self._trainer
        found = {"discriminator": self.discriminator, "generator": trainer.generator, "ema": trainer.average}
        return found | ({"moments": self._matching} if self._matching else {})

    def summary(self) -> None:
        """Flower's hook for a description in the log; the run's folder holds it instead."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the plan's rounds, from the checkpoint on where there is one.

        Raises:
            FederationError: fewer sites than the quorum joined, or answered in a round.
            ConfigError: an argument other than `grid` is given; the plan says how many rounds and how long.
        """
        if any(
            x is not None for x in (initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        ):
            raise ConfigError("FedDPGAN.start takes the grid alone; rounds, time limits and networks stand in its plan")
        self._join(grid)
        result, arrays = Result(), ArrayRecord(_state(self.discriminator))
        if self._matching and not self._released and not self._ask_moments(grid):
            return result
        for number in range(self._done + 1, self.plan.all_rounds + 1):
            if number > self.plan.matching.rounds:
                self._roster.await_quorum(grid, number)
            began = time.monotonic()
            requests = list(self.configure_train(number, arrays, ConfigRecord(), grid))
            replies = self._send(grid, requests, self.plan.privacy.update) if requests else []
            new_arrays, metrics = self.aggregate_train(number, replies)
            if new_arrays is None or metrics is None:
                self._stop_or_raise(number)
                break
            self._check_finite(number)
            arrays = new_arrays
            result.train_metrics_clientapp[number] = metrics
            counted = self._evaluate(number, arrays, grid)
            record = self._record(number, time.monotonic() - began, metrics, counted)
            self._folder.log_round(_plain(record))
            self._checkpoint(number)
            self._on_round(record)
        result.arrays = ArrayRecord(_state(self.average_generator))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A request to each site that has not withdrawn, with D and G; none in the rounds that match moments alone."""
        if server_round <= self.plan.matching.rounds:
            return ()
        tensors = wire.dump(discriminator=self.discriminator, generator=self._trainer.generator)
        return self._exchange.requests(server_round, tensors, "discriminator_update", grid.get_node_ids())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average D over the sites that answered, in the order of their names, and train G; None below the quorum."""
        if server_round <= self.plan.matching.rounds:
            self._exchange.outcomes = {}
            loss = self._match(server_round)
            return ArrayRecord(_state(self.discriminator)), MetricRecord({"sites": 0, "g_loss": loss})
        mean = self._average(server_round, replies)
        if mean.count < self.plan.federation.quorum:
            return None, None
        loss = self._learn(server_round, mean.result())
        return ArrayRecord(_state(self.discriminator)), MetricRecord({"sites": mean.count, "g_loss": loss})

    def _learn(self, number: int, mean: dict[str, Tensor]) -> float:
        """Take over the sites' mean answer, and train G with it; gives its loss."""
        training = self.plan.training
        self.discriminator.load_state_dict(mean, strict=False)  # buffers stay as they are
        critic = adversarial(self.discriminator)
        return self._train_generator(number, critic, steps=training.g_steps, batch_size=training.g_batch_size)

    def _train_generator(self, number: int, critic: Loss, *, steps: int, batch_size: int) -> float:
        """G steps on the critic's loss, and on the moments where they have a weight in it."""
        training, weight = self.plan.training, self.plan.matching.weight
        loss = critic
        if (matching := self._matching) and weight:

            def loss(images: Tensor, labels: Tensor) -> Tensor:
                both: Tensor = critic(images, labels) + weight * matching(images, labels)
                return both

        if number == self.plan.matching.rounds + 1:
            self._trainer.restart()
        rates = [training.g_learning_rate] * steps
        return self._trainer.update(loss, rates, batch_size=batch_size, seed=self.plan.round_seed(number))

    def _match(self, number: int) -> float:
        """G steps on the moments alone, at a learning rate that falls over all such rounds."""
        settings = self.plan.matching
        if self._matching is None:
            raise ConfigError("matching.rounds asks for moments; set privacy.moments")
        first, whole = (number - 1) * settings.g_steps, settings.rounds * settings.g_steps
        rates = [cosine(first + step, whole, settings.learning_rate) for step in range(settings.g_steps)]
        return self._trainer.update(
            self._matching, rates, batch_size=settings.batch_size, seed=self.plan.round_seed(number)
        )

    def _ask_moments(self, grid: Grid) -> bool:
        """Have every site release its noised sums, and take the classes' means from their total.

        Returns:
            False where too few sites have budget left for it.

        Raises:
            FederationError: fewer sites than the quorum released, for another reason.
        """
        assert self._matching is not None
        began = time.monotonic()
        requests = self._exchange.requests(1, b"", "moment_release", grid.get_node_ids())
        replies = self._send(grid, list(requests), "moment_release")
        released = self._collected(1, replies, "released")
        plans = {name: self.sites[name].plan for name in released}
        total, noise_sd, left_out = added_up(released, plans, self._matching.shape)
        for name, reason in left_out.items():
            self._exchange.outcomes[name] = {"status": "left out", "reason": reason}
        for name in self._exchange.maybe_charged():
            self.sites[name].count("moment_release")
        record = self._record(0, time.monotonic() - began, MetricRecord({"g_loss": 0.0}), None)
        self._folder.log_round(_plain(record))
        self._on_round(record)
        self._released = len(released) - len(left_out) >= self.plan.federation.quorum
        if self._released:
            self._matching.aim(total, noise_sd)
        self._checkpoint(0)  # what was charged is remembered either way
        if not self._released:
            self._stop_or_raise(0)
        return self._released

    def _collected(self, number: int, replies: Iterable[Message], status: str) -> dict[str, bytes]:
        """The tensors of the answers with this status, by site; a site that has withdrawn is not asked again."""
        found: dict[str, bytes] = {}
        for name, answer, tensors in self._exchange.answers(number, replies):
            if answer.status == "withdrawn":
                self.sites[name].withdrawn = answer.reason
            if answer.status == status:
                found[name] = tensors
        return found

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """In the rounds that the plan names, of those with the sites: a classifier, for a count at each site."""
        privacy = self.plan.privacy
        if self._train_classifier is None or privacy.evaluation_noise is None:
            return ()
        since = server_round - self.plan.matching.rounds
        if since <= 0 or since % privacy.evaluation_every:
            return ()
        classifier = self._train_classifier(self.average_generator, server_round)
        tensors = wire.dump(classifier=classifier)
        return self._exchange.requests(server_round, tensors, "evaluation_count", grid.get_node_ids())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The classifier's accuracy over all sites that counted, and the standard deviation of the noise in it."""
        counts: dict[str, float] = {}
        for name, answer, _ in self._exchange.answers(server_round, replies):
            if answer.status != "counted" or answer.count is None:
                continue
            most = 0.6 * self.sites[name].plan.declared_size + 10 * (self.plan.privacy.evaluation_noise or 0.0)
            if abs(answer.count) <= most:
                counts[name] = answer.count
            else:
                reason = f"a count of {answer.count:.3g}, beyond {most:.3g}, which no honest site has"
                self._exchange.outcomes[name] = {"status": "left out", "reason": reason}
        for name in self._exchange.maybe_charged():
            self.sites[name].count("evaluation_count")
        if not counts:
            return None
        declared = sum(self.sites[name].plan.declared_size for name in counts)
        noise = (self.plan.privacy.evaluation_noise or 0.0) / 2 * len(counts) ** 0.5
        # counts are shifted by half of the site's units, of which the declared size is the public estimate
        accuracy = math.fsum(counts[name] for name in sorted(counts)) / declared + 0.5
        return MetricRecord({"accuracy": accuracy, "noise_sd": noise / declared, "sites": len(counts)})

    def _check_finite(self, number: int) -> None:
        """Keep the last good checkpoint where training has broken down."""
        states = (t for module in self._modules.values() for t in module.state_dict().values())
        if not all(bool(torch.isfinite(t).all()) for t in states):
            raise FederationError(
                f"round {number}: the networks are no longer finite; the checkpoint of round {self._done} is kept: "
                "lower the learning rates and start a new run"
            )

    def _evaluate(self, number: int, arrays: ArrayRecord, grid: Grid) -> dict[str, Any] | None:
        requests = list(self.configure_evaluate(number, arrays, ConfigRecord(), grid))
        if not requests:
            return None
        trained = self._exchange.outcomes
        replies = self._send(grid, requests, "evaluation_count")
        metrics = self.aggregate_evaluate(number, replies)
        counted, self._exchange.outcomes = self._exchange.outcomes, trained
        return {**(metrics or {}), "outcomes": counted}

    def _join(self, grid: Grid) -> None:
        refusals = self._note(self._roster.join(grid))
        if len(self.sites) < (quorum := self.plan.federation.quorum):
            why = f" ({refusals[0]})" if refusals else ""
            raise FederationError(f"{len(self.sites)} sites joined, the quorum is {quorum}{why}")

    def _send(self, grid: Grid, requests: list[Message], mechanism: Mechanism) -> list[Message]:
        """Send a round's requests, and with them the first question to nodes that have come since; give the replies."""
        self._folder.note_asked(mechanism, {name: self.sites[name].memory for name in self._exchange.asked})
        questions = self._roster.questions(grid.get_node_ids())
        replies = list(grid.send_and_receive([*requests, *questions], timeout=self.plan.federation.round_timeout))
        self._note(self._roster.admit(replies))
        return replies

    def _note(self, refusals: list[str]) -> list[str]:
        if refusals:
            self._folder.log_round({"round": self._done, "not_joined": refusals})
        return refusals

    def _average(self, server_round: int, replies: Iterable[Message]) -> RunningMean:
        trained = self._collected(server_round, replies, self._answered)
        mean = RunningMean()
        for name in sorted(trained):  # one site's weights at a time are read, always in this order
            try:
                state = self._read(trained[name], self.sites[name].plan)
            except WireError as error:
                self._exchange.outcomes[name] = {"status": "left out", "reason": str(error)}
                continue
            mean.add(state, self.sites[name].plan.declared_size)
        for name in self._exchange.maybe_charged():
            self.sites[name].count(self.plan.privacy.update)
        return mean

    def _read(self, tensors: bytes, plan: SitePlan) -> dict[str, Tensor]:
        """What a site of this plan has answered with.

        Raises:
            WireError: it does not fit, or no honest site can have it.
        """
        state = wire.read_parameters(tensors, self.discriminator)
        self._check_moved(state)
        return state

    def _check_moved(self, state: dict[str, Tensor]) -> None:
        """Leave out weights that no honest site can have reached: one site must not be able to ruin the run.

        An Adam step moves a weight by at most (1 - beta1) / sqrt(1 - beta2) = 5 learning rates (Kingma and Ba, arXiv
        1412.6980, section 2.1).
        """
        training = self.plan.training
        most = 100 * training.d_steps * training.d_learning_rate
        before = dict(self.discriminator.named_parameters())
        moved = max(float((tensor - before[name].detach().cpu()).abs().max()) for name, tensor in state.items())
        if not moved <= most:
            raise WireError(
                f"a weight moved by {moved:.3g}, more than {most:.3g} = 100 d_steps d_learning_rate; "
                "the site's learning rate is not the plan's"
            )

    def _stop_or_raise(self, number: int) -> None:
        left = [name for name, site in self.sites.items() if not site.withdrawn]
        if len(left) < self.plan.federation.quorum:
            reason = f"{len(left)} sites have budget left, fewer than the quorum"
            stopped = {"round": number, "stopped": reason, "sites": self._site_records()}
            self._folder.log_round(_plain(stopped))
            self._on_round(stopped)
            return
        problems = "; ".join(
            f"{n}: {o['reason'] or o['status']}" for n, o in self._exchange.outcomes.items() if o["reason"]
        )
        raise FederationError(
            f"round {number}: fewer answers than the quorum of {self.plan.federation.quorum} ({problems}); "
            "mend the sites, then continue the run from its checkpoint"
        )

    def _site_records(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "epsilon": site.epsilon,
                "d_steps": site.steps,
                "head": site.head,
                **self._exchange.outcomes.get(name, {"status": "withdrawn" if site.withdrawn else "not asked"}),
            }
            for name, site in sorted(self.sites.items())
        }

    def _record(
        self, number: int, seconds: float, metrics: MetricRecord, counted: dict[str, Any] | None
    ) -> dict[str, Any]:
        spent = [site.epsilon for site in self.sites.values()]
        record = {
            "round": number, "time": _now(), "seconds": round(seconds, 3), "g_loss": metrics["g_loss"],
            "epsilon_min": min(spent), "epsilon_max": max(spent), "sites": self._site_records(),
        }  # fmt: skip
        return record | ({"evaluation": counted} if counted else {})

    def _checkpoint(self, number: int) -> None:
        tensors = {
            f"{key}.{name}": t for key, module in self._modules.items() for name, t in module.state_dict().items()
        }
        tensors |= {f"optimizer.{name}": t for name, t in optimizer_tensors(self._trainer.optimizer).items()}
        # a site that is absent from this start of the run is remembered all the same
        sites = self._roster.memory | {name: site.memory for name, site in self.sites.items()}
        self._folder.save_checkpoint(
            tensors, {"run": self._run, "round": number, "released": self._released, "sites": sites}
        )
        self._done = number

    def _resume(self) -> None:
        found = self._folder.load_checkpoint()
        if found is None:
            self._folder.cut_log(0)
            self._count_asked()
            return
        tensors, meta = found
        if meta["run"] != self._run:
            raise RunFolderError(f"the checkpoint in {self._folder.path} is of run {meta['run']}, not {self._run}")
        for key, module in self._modules.items():
            load_module(module, tensors, key)
        prefix = "optimizer."
        self._trainer.restart()
        moments = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        try:
            load_optimizer(self._trainer.optimizer, moments)
        except ValueError as error:
            raise RunFolderError(
                f"the checkpoint in {self._folder.path} is damaged ({error}); put back a copy of it"
            ) from error
        self._done, self._released = int(meta["round"]), bool(meta.get("released"))
        self._roster.memory = dict(meta["sites"])
        self._count_asked()
        self._folder.cut_log(self._done)

    def _count_asked(self) -> None:
        """Take what was asked after the checkpoint for charged: the start that asked has ended before it could tell."""
        for mechanism, sites in self._folder.asked():
            for name, memory in sites.items():
                record = SiteRecord.recalled(0, self._roster.memory.get(name, memory))
                record.count(mechanism)
                self._roster.memory[name] = record.memory


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON can have it: null for an epsilon that is infinite."""
    found: dict[str, Any] = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return found


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
