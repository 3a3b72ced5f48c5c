"""FedDPGAN: the Flower strategy that averages the sites' discriminators and trains the shared generator."""

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fl_dpgan.config import Plan
from fl_dpgan.errors import ConfigError, FederationError, RunFolderError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.generator import GeneratorTrainer
from fl_dpgan.training.state import load_optimizer, optimizer_tensors


@dataclass
class SiteRecord:
    """What the server knows of a site: all of it public."""

    node: int
    plan: SitePlan
    steps: int = 0  # D steps of requests that may have been charged
    withdrawn: str = ""

    @property
    def epsilon(self) -> float:
        """The run's epsilon at this site, recomputed from the plan and the steps asked for."""
        return self.plan.epsilon_after(self.steps)


class FedDPGAN(Strategy):
    """Federated DP-GAN: sites train D privately, the server averages D and trains G on fakes alone.

    Args:
        plan: the run's constants.
        generator: has `latent_dim` and `num_classes`; called as `generator(z, labels)`.
        discriminator: called as `discriminator(images, labels)`, gives logits (n,).
        folder: where checkpoints and the round log go; a checkpoint in it is continued.
        run: the run's name at the sites; the same for a resumed run.
        on_round: called with each round's log record.
    """

    def __init__(
        self,
        plan: Plan,
        generator: nn.Module,
        discriminator: nn.Module,
        *,
        folder: RunFolder,
        run: str,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.plan, self._folder, self._run = plan, folder, run
        self._on_round = on_round or (lambda record: None)
        self.discriminator = discriminator
        training = plan.training
        self._trainer = GeneratorTrainer(
            generator,
            learning_rate=training.g_learning_rate,
            batch_size=training.g_batch_size,
            ema_decay=training.ema_decay,
        )
        self.sites: dict[str, SiteRecord] = {}
        self._asked: list[tuple[Message, str]] = []  # Flower gives a message its id when it sends it
        self._steps: dict[str, int] = {}
        self._done = 0
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._resume()

    @property
    def average_generator(self) -> nn.Module:
        """The EMA of G, which is what a run delivers."""
        return self._trainer.average

    @property
    def _modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds, by the prefix of its tensors' names."""
        trainer = self._trainer
        return {"discriminator": self.discriminator, "generator": trainer.generator, "ema": trainer.average}

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
        for number in range(self._done + 1, self.plan.training.rounds + 1):
            began = time.monotonic()
            requests = list(self.configure_train(number, arrays, ConfigRecord(), grid))
            replies = grid.send_and_receive(requests, timeout=self.plan.federation.round_timeout)
            new_arrays, metrics = self.aggregate_train(number, replies)
            if new_arrays is None or metrics is None:
                self._stop_or_raise(number)
                break
            arrays = new_arrays
            result.train_metrics_clientapp[number] = metrics
            record = self._record(number, time.monotonic() - began, metrics)
            self._folder.log_round(record)
            self._checkpoint(number)
            self._on_round(record)
        result.arrays = ArrayRecord(_state(self.average_generator))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One request per site that has not withdrawn, with D, G and the site's plan."""
        tensors = wire.dump(discriminator=self.discriminator, generator=self._trainer.generator)
        self._asked = []
        for name in sorted(self.sites):
            site = self.sites[name]
            if site.withdrawn:
                continue
            request = wire.Request(run=self._run, round=server_round, site=name, plan=site.plan)
            message = Message(wire.pack(request, tensors), dst_node_id=site.node, message_type=MessageType.TRAIN)
            self._asked.append((message, name))
            yield message

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average D over the sites that answered, in the order of their names, and train G; None below the quorum."""
        states = self._read(server_round, replies)
        if len(states) < self.plan.federation.quorum:
            return None, None
        weights = {name: float(self.sites[name].plan.declared_size) for name in states}
        self.discriminator.load_state_dict(weighted_average(states, weights))
        loss = self._trainer.update(
            self.discriminator, self.plan.training.g_steps, seed=self.plan.seed * 1_000_003 + server_round
        )
        spent = [site.epsilon for site in self.sites.values()]
        metrics: dict[str, int | float | list[int] | list[float]] = {
            "sites": len(states),
            "g_loss": loss,
            "epsilon_min": min(spent),
            "epsilon_max": max(spent),
        }
        return ArrayRecord(_state(self.discriminator)), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No question is asked of real data: an evaluation at a site would have to be charged."""
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing was asked."""
        return None

    def _join(self, grid: Grid) -> None:
        federation = self.plan.federation
        deadline = time.monotonic() + federation.round_timeout
        while len(nodes := sorted(grid.get_node_ids())) < federation.sites and time.monotonic() < deadline:
            time.sleep(0.1)
        questions = [Message(RecordDict(), dst_node_id=n, message_type=MessageType.QUERY) for n in nodes]
        refusals = []
        for reply in grid.send_and_receive(questions, timeout=federation.round_timeout):
            try:
                hello, _ = wire.unpack(reply, wire.Hello)
            except WireError as error:
                refusals.append(str(error))
                continue
            if hello.site in self.sites:
                raise FederationError(f"two nodes call themselves {hello.site!r}; give each site a name of its own")
            plan = self.plan.site_plan(hello.declared_size)
            self.sites[hello.site] = SiteRecord(reply.metadata.src_node_id, plan, self._steps.get(hello.site, 0))
        if refusals:
            self._folder.log_round({"round": self._done, "not_joined": refusals})
        if len(self.sites) < federation.quorum:
            why = f" ({refusals[0]})" if refusals else ""
            raise FederationError(f"{len(self.sites)} sites joined, the quorum is {federation.quorum}{why}")

    def _read(self, server_round: int, replies: Iterable[Message]) -> dict[str, dict[str, Tensor]]:
        states: dict[str, dict[str, Tensor]] = {}
        self._outcomes = {name: {"status": "silent", "reason": "no answer in time"} for _, name in self._asked}
        asked = {message.metadata.message_id: name for message, name in self._asked}
        scratch = copy.deepcopy(self.discriminator)
        for reply in replies:
            name = asked.get(reply.metadata.reply_to_message_id)
            if name is None:
                continue  # an answer to something this round did not ask
            try:
                answer, tensors = wire.unpack(reply, wire.Answer)
                if answer.site != name or answer.round != server_round:
                    raise WireError(f"an answer for site {answer.site}, round {answer.round}")
                self._outcomes[name] = {"status": answer.status, "reason": answer.reason}
                if answer.status == "trained":
                    wire.restore(tensors, discriminator=scratch)
                    states[name] = {key: value.clone() for key, value in scratch.state_dict().items()}
                elif answer.status == "withdrawn":
                    self.sites[name].withdrawn = answer.reason
            except WireError as error:
                self._outcomes[name] = {"status": "left out", "reason": str(error)}
        for name, outcome in self._outcomes.items():
            if outcome["status"] not in ("withdrawn", "refused"):  # anything else may have been charged
                self.sites[name].steps += self.sites[name].plan.d_steps
        return {name: states[name] for name in sorted(states)}

    def _stop_or_raise(self, number: int) -> None:
        left = [name for name, site in self.sites.items() if not site.withdrawn]
        if len(left) < self.plan.federation.quorum:
            reason = f"{len(left)} sites have budget left, fewer than the quorum"
            stopped = {"round": number, "stopped": reason, "sites": self._site_records()}
            self._folder.log_round(stopped)
            self._on_round(stopped)
            return
        problems = "; ".join(f"{n}: {o['reason'] or o['status']}" for n, o in self._outcomes.items() if o["reason"])
        raise FederationError(
            f"round {number}: fewer answers than the quorum of {self.plan.federation.quorum} ({problems}); "
            "mend the sites and continue with --resume"
        )

    def _site_records(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"epsilon": site.epsilon, "d_steps": site.steps, **self._outcomes.get(name, {"status": "withdrawn"})}
            for name, site in sorted(self.sites.items())
        }

    def _record(self, number: int, seconds: float, metrics: MetricRecord) -> dict[str, Any]:
        return {
            "round": number, "seconds": round(seconds, 3), "g_loss": metrics["g_loss"],
            "epsilon_min": metrics["epsilon_min"], "epsilon_max": metrics["epsilon_max"], "sites": self._site_records(),
        }  # fmt: skip

    def _checkpoint(self, number: int) -> None:
        tensors = {
            f"{key}.{name}": t for key, module in self._modules.items() for name, t in module.state_dict().items()
        }
        tensors |= {f"optimizer.{name}": t for name, t in optimizer_tensors(self._trainer.optimizer).items()}
        plans = {
            name: {"plan": site.plan.model_dump(mode="json"), "steps": site.steps} for name, site in self.sites.items()
        }
        self._folder.save_checkpoint(tensors, {"run": self._run, "round": number, "sites": plans})
        self._done = number

    def _resume(self) -> None:
        found = self._folder.load_checkpoint()
        if found is None:
            self._folder.cut_log(0)
            return
        tensors, meta = found
        if meta["run"] != self._run:
            raise RunFolderError(f"the checkpoint in {self._folder.path} is of run {meta['run']}, not {self._run}")
        for key, module in self._modules.items():
            state = {name: tensors[f"{key}.{name}"] for name in module.state_dict()}
            module.load_state_dict(state)
        prefix = "optimizer."
        load_optimizer(
            self._trainer.optimizer, {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        )
        self._done = int(meta["round"])
        self._steps = {name: int(site["steps"]) for name, site in meta["sites"].items()}
        self._folder.cut_log(self._done)


def weighted_average(states: dict[str, dict[str, Tensor]], weights: dict[str, float]) -> dict[str, Tensor]:
    """Weighted mean of named tensors, summed in double precision in the order of `states`, so that it is repeatable."""
    total = sum(weights[name] for name in states)
    first = next(iter(states.values()))
    mean = {}
    for key, like in first.items():
        summed = torch.zeros_like(like, dtype=torch.float64)
        for name, state in states.items():
            summed += state[key].double() * (weights[name] / total)
        mean[key] = summed.to(like.dtype)
    return mean


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
