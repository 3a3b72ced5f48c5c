"""A site: it holds the data and the ledger, and answers a training request by charging, training and releasing D."""

import copy
import logging
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Message
from safetensors.torch import load, save
from torch import Tensor, nn

from fl_dpgan.errors import BudgetError, DataError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.privacy.gradients import check_separable
from fl_dpgan.privacy.ledger import Account, Ledger, LedgerRow, StoredAnswer
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.state import load_optimizer, optimizer_tensors

_log = logging.getLogger(__name__)


class Site:
    """Answers a federation's messages on behalf of one party.

    Args:
        name: the site's own name, stable over runs; it keys the ledger and the server's order of averaging.
        data: images (N, channels, size, size) in [-1, 1] and labels (N,), never read outside the charged mechanism.
        declared_size: N^, which becomes public.
        generator, discriminator: the federation's networks, of which only the shapes matter.
        ledger: path of the site's SQLite file; created with the first request.
        eps_max, delta: the site's budget.
        learning_rate: of D's Adam optimiser.
        seed: for simulations only; left out, sampling and noise come from the operating system's entropy.

    Raises:
        DataError: the data do not fit the declared size, are not finite, or do not match their labels.
        ConfigError: the discriminator mixes samples, or cannot be trained privately.
    """

    def __init__(
        self,
        name: str,
        data: tuple[Tensor, Tensor],
        *,
        declared_size: int,
        generator: nn.Module,
        discriminator: nn.Module,
        ledger: Path,
        eps_max: float,
        delta: float,
        learning_rate: float,
        seed: int | None = None,
    ) -> None:
        images, labels = data
        if len(images) != len(labels) or not bool(torch.isfinite(images).all()):
            raise DataError(
                f"site {name}: {len(images)} images with {len(labels)} labels, or pixels that are not finite"
            )
        if len(labels) < 0.9 * declared_size:
            raise DataError(
                f"site {name} has {len(labels)} records, too few for its declared size {declared_size}; "
                f"declare at most {len(labels)}"
            )
        num_classes = int(generator.num_classes)  # type: ignore[arg-type]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise DataError(
                f"site {name} has a label outside 0 to {num_classes - 1}; map its labels to the federation's"
            )
        self.name, self._data, self._declared_size = name, data, declared_size
        self._generator = copy.deepcopy(generator).to(images.device)
        self._discriminator = copy.deepcopy(discriminator).to(images.device)
        probe = torch.linspace(-1, 1, 2 * images[0].numel(), device=images.device).view(2, *images.shape[1:])
        check_separable(self._discriminator, probe, torch.zeros(2, dtype=torch.int64, device=images.device))
        self._ledger_path, self._eps_max, self._delta = ledger, eps_max, delta
        self._learning_rate, self._seed = learning_rate, seed

    def hello(self, message: Message) -> Message:
        """Introduce the site: its name and declared size."""
        return Message(wire.pack(wire.Hello(site=self.name, declared_size=self._declared_size)), reply_to=message)

    def train(self, message: Message) -> Message:
        """Answer a training request. Whatever goes wrong, the answer speaks of public numbers alone."""
        round_number = 0
        try:
            request, tensors = wire.unpack(message, wire.Request)
            round_number = request.round
            body = self._train(request, tensors)
        except BudgetError as error:
            return self._answer(message, round_number, "withdrawn", str(error))
        except WireError as error:
            return self._answer(message, round_number, "refused", str(error))
        except Exception:
            # the boundary: Flower would send the exception's text to the server, and a text may quote a record
            _log.exception("site %s failed in round %d", self.name, round_number)
            return self._answer(message, round_number, "failed", "an error at the site, written to its own log")
        return self._answer(message, round_number, "trained", tensors=body)

    def _answer(self, message: Message, number: int, status: str, reason: str = "", tensors: bytes = b"") -> Message:
        header = wire.Answer.model_validate({"site": self.name, "round": number, "status": status, "reason": reason})
        return Message(wire.pack(header, tensors), reply_to=message)

    def _train(self, request: wire.Request, tensors: bytes) -> bytes:
        plan = request.plan
        if request.site != self.name or plan.declared_size != self._declared_size or plan.delta != self._delta:
            raise WireError(
                f"the plan is for site {request.site} with N^ = {plan.declared_size}, delta = {plan.delta:g}; this is "
                f"{self.name} with {self._declared_size} and {self._delta:g}"
            )
        ledger = self._open_ledger(plan.order)
        try:
            digest = wire.digest(request, tensors)
            stored = ledger.last_answer(request.run)
            if stored and stored.request == request.id:
                if stored.digest != digest:
                    raise WireError(f"request {request.id} was answered before with other content; ask for a new round")
                return stored.body
            wire.restore(tensors, discriminator=self._discriminator, generator=self._generator)
            first_step = ledger.steps(request.run)
            last_norm = plan.clipping_norm(first_step + plan.d_steps - 1)
            ledger.charge(
                LedgerRow(plan.event(plan.d_steps), last_norm, request.run, request.round, request.id, plan.digest)
            )
            optimizer = torch.optim.Adam(self._discriminator.parameters(), lr=self._learning_rate, betas=(0.5, 0.99))
            if stored:
                load_optimizer(optimizer, load(stored.state))
            random = (
                KeyedGenerator.from_os()
                if self._seed is None
                else KeyedGenerator.from_seed(self._seed, self.name, request.round, first_step)
            )
            local_update(
                self._discriminator, self._generator, optimizer, self._data, plan, first_step=first_step, random=random
            )
            body = wire.dump(discriminator=self._discriminator)
            state = save({key: value.cpu() for key, value in optimizer_tensors(optimizer).items()})
            ledger.store_answer(request.run, StoredAnswer(request.id, digest, body, state))
            return body
        finally:
            ledger.close()

    def _open_ledger(self, order: float) -> Ledger:
        account = Account(self.name, self._declared_size, self._eps_max, self._delta, order)
        if self._ledger_path.is_file():  # the order was fixed when the ledger was created
            existing = Ledger(self._ledger_path)
            if replace(account, order=existing.account.order) == existing.account:
                return existing
            existing.close()
        return Ledger(self._ledger_path, account)
