"""Our own training with noise and clipping off: an upper end to compare with. For simulations alone, never a site."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.baselines import kept
from fl_dpgan.errors import PolicyError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.federation.site import Site, check_data
from fl_dpgan.privacy.ledger import StoredAnswer
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.training.discriminator import draw_fakes
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records
from fl_dpgan.training.state import load_optimizer, optimizer_tensors


class UnprotectedSite(Site):
    """Answers like a `Site`, but with what its records have made of D, as they are: NOTHING PROTECTS THEM.

    For simulations alone: it has no ledger and charges nothing, and takes part only in runs whose plan says that they
    are not private, which every `Site` refuses.

    Args:
        name, data, models, learning_rate: as for `Site`.
        policy: the terms that it introduces itself with: declared size, unit, order.
        state: the file that the optimiser and the last answer are kept in, for a site that moves between processes.
        seed: of the sampling; there is no other source, so that nobody takes this for a deployed site.

    Raises:
        DataError: as for `Site`.
    """

    def __init__(
        self,
        name: str,
        data: Records,
        *,
        policy: Policy,
        models: Models,
        state: Path,
        learning_rate: float,
        seed: int,
    ) -> None:
        # not Site's own: that opens a ledger
        check_data(name, data, policy, models)
        self.name, self._data, self._policy, self._models = name, data, policy, models
        self._state, self._learning_rate, self._seed = state, learning_rate, seed
        self._order = policy.ledger_order

    def _serve(self, request: wire.Request, tensors: bytes) -> StoredAnswer:
        if request.site != self.name:
            raise WireError(f"a request for site {request.site}; this is {self.name}")
        if not request.plan.non_private:
            raise PolicyError("non_private", "the plan is of a private run, for which this site has no ledger")
        if request.mechanism != "discriminator_update":
            raise PolicyError("mechanisms", f"a request for {request.mechanism}; this site trains D and no more")
        digest = wire.digest(request, tensors)
        optimizer: dict[str, torch.Tensor] = {}
        if found := kept.read(self._state):
            optimizer, last = found
            body = optimizer.pop("answer").numpy().tobytes()
            if last["run"] != request.run:
                raise PolicyError("non_private", f"{self._state.name} is of another run")
            if last["request"] == request.id:
                if last["digest"] != digest:
                    raise PolicyError("repeated", f"request {request.id} was answered before, with other content")
                return StoredAnswer(request.id, digest, last["header"], body, b"")
        return self._train(request, tensors, digest, optimizer)

    def _train(
        self, request: wire.Request, tensors: bytes, digest: str, before: dict[str, torch.Tensor]
    ) -> StoredAnswer:
        models = self._models
        wire.restore(tensors, discriminator=models.discriminator, generator=models.generator)
        optimizer = torch.optim.Adam(models.discriminator.parameters(), lr=self._learning_rate, betas=(0.5, 0.99))
        if before:
            load_optimizer(optimizer, before)
        random = self._random("non_private", request.round)
        plain_update(models.discriminator, models.generator, optimizer, self._data, request.plan, random)
        answer = wire.Answer(site=self.name, round=request.round, status="trained")
        stored = StoredAnswer(
            request.id, digest, answer.model_dump_json(), wire.dump_parameters(models.discriminator), b""
        )
        body = torch.frombuffer(bytearray(stored.body), dtype=torch.uint8)
        notes = {"run": request.run, "request": stored.request, "digest": digest, "header": stored.header}
        kept.write(self._state, {**optimizer_tensors(optimizer), "answer": body}, notes)
        return stored


def plain_update(
    discriminator: nn.Module,
    generator: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Records,
    plan: SitePlan,
    random: KeyedGenerator,
) -> None:
    """The D steps of `local_update` without clipping and noise: a Poisson sample, B fakes, divisor 2B."""
    discriminator.train()
    for _ in range(plan.d_steps):
        fakes, fake_labels = draw_fakes(generator, plan.batch_size, random)
        reals, real_labels = data.batch(plan.sample(data.units, random))
        logits = discriminator(torch.cat([reals, fakes]), torch.cat([real_labels, fake_labels]))
        targets = torch.cat([torch.ones(len(reals)), torch.zeros(len(fakes))]).to(logits)
        optimizer.zero_grad(set_to_none=True)
        loss = binary_cross_entropy_with_logits(logits, targets, reduction="sum") / (2 * plan.batch_size)
        loss.backward()
        optimizer.step()
