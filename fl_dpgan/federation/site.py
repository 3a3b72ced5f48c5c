"""A site: it holds the data and the ledger, and answers a request by charging, then training, then releasing."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_dpgan.baselines import kept
from fl_dpgan.baselines.critic import Critic
from fl_dpgan.baselines.gs_wgan import sanitised_gradient
from fl_dpgan.errors import BudgetError, DataError, FlDpganError, LedgerError, PolicyError, WireError
from fl_dpgan.federation import wire
from fl_dpgan.moments.features import FeatureMap
from fl_dpgan.moments.release import noised_sums
from fl_dpgan.privacy.accountant import Event
from fl_dpgan.privacy.entries import MAIN, Charge
from fl_dpgan.privacy.ledger import Ledger, StoredAnswer
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.privacy.verify import verify
from fl_dpgan.text import printable
from fl_dpgan.training.discriminator import local_update
from fl_dpgan.training.evaluation import noised_count
from fl_dpgan.training.models import Models
from fl_dpgan.training.records import Records
from fl_dpgan.training.state import load_optimizer, optimizer_tensors

_log = logging.getLogger(__name__)


class Site:
    """Answers a federation's requests on behalf of one party; `client` carries them to it and back.

    Args:
        name: the site's own name, stable over runs; it keys the ledger and the server's order of averaging.
        data: the site's records, never read outside the charged mechanisms.
        policy: what the site accepts; its declared size becomes public.
        models: the federation's networks. Sites of one process may share them, one request at a time.
        ledger: path of the site's SQLite file, made once by `Ledger(path, policy.account(name))` or `fl-dpgan site
            ledger`. A site never makes one itself: a file that is lost must not become a new budget.
        learning_rate: of D's Adam optimiser.
        budget: which of the ledger's budgets these data are charged to.
        seed: for simulations only; left out, sampling and noise come from the operating system's entropy.

    Raises:
        DataError: the data do not fit the policy or the networks, or have labels that the federation has not.
        LedgerError: there is no ledger, it does not verify, or it is kept on other terms than the policy's.
    """

    def __init__(
        self,
        name: str,
        data: Records,
        *,
        policy: Policy,
        models: Models,
        ledger: Path,
        learning_rate: float,
        budget: str = MAIN,
        seed: int | None = None,
    ) -> None:
        check_data(name, data, policy, models)
        self.name, self._data, self._policy, self._models = name, data, policy, models
        self._ledger_path, self._budget = ledger, budget
        self._learning_rate, self._seed = learning_rate, seed
        verify(ledger)
        with closing(self._open_ledger()) as opened:
            self._order = opened.account.order

    @property
    def models(self) -> Models:
        """The federation's networks, as this site has them."""
        return self._models

    def introduction(self) -> wire.Hello:
        """The site's name, declared size and unit, and the order of its ledger."""
        policy = self._policy
        return wire.Hello(site=self.name, declared_size=policy.declared_size, unit=policy.unit, order=self._order)

    def answer(self, header: str, tensors: bytes, carrier: str) -> tuple[str, bytes]:
        """The answer to one request: its header's JSON text, and tensors or nothing.

        Whatever goes wrong, the answer speaks of public numbers.

        Args:
            header: a `wire.Request`'s JSON text. tensors: the networks' weights.
            carrier: the type of the message that brought them.
        """
        number = 0
        try:
            request = wire.parse(header, wire.Request)
            number = request.round
            if wire.CARRIER[request.mechanism] != carrier:
                raise WireError(f"a request for {request.mechanism} in a message for {carrier}")
            answer = self._serve(request, tensors)
        except BudgetError as error:
            return self.refusal(number, "withdrawn", error.rule, str(error))
        except PolicyError as error:
            return self.refusal(number, "refused", error.rule, str(error))
        except WireError as error:
            return self.refusal(number, "refused", "wire", str(error))
        # the boundary: Flower would send the exception's text to the server, and a text may quote a record
        except FlDpganError as error:
            _log.error("site %s failed in round %d: %s", self.name, number, error)
        except Exception:
            _log.exception("site %s failed in round %d", self.name, number)
        else:
            return answer.header, answer.body
        return self.refusal(number, "failed", "", "an error at the site, written to its own log")

    def refusal(self, number: int, status: Any, rule: str, reason: str) -> tuple[str, bytes]:
        """An answer without weights to the request of round `number`."""
        # the reason may quote the request
        answer = wire.Answer(site=self.name, round=number, status=status, rule=rule, reason=printable(reason))
        return answer.model_dump_json(), b""

    def _serve(self, request: wire.Request, tensors: bytes) -> StoredAnswer:
        if request.site != self.name:
            raise WireError(f"a request for site {request.site}; this is {self.name}")
        self._policy.check(request.plan, request.mechanism)
        if request.anchor and not self._ledger_path.exists():
            raise PolicyError("anchor", _LOST)
        with closing(self._open_ledger()) as ledger:
            if request.anchor and not ledger.holds(request.anchor):
                raise PolicyError("anchor", _LOST)
            if request.plan.order != ledger.account.order:
                raise PolicyError(
                    "order", f"the plan has order {request.plan.order:g}, the ledger {ledger.account.order:g}"
                )
            digest = wire.digest(request, tensors)
            stored = ledger.last_answer(request.run, request.mechanism)
            if stored and stored.request == request.id:
                if stored.digest != digest:
                    raise PolicyError(
                        "repeated", f"request {request.id} was answered before, with other content; ask for a new round"
                    )
                return stored
            if ledger.answered(request.id):
                raise PolicyError(
                    "repeated",
                    f"request {request.id} was answered before, and its answer is no longer kept; nothing is drawn "
                    "twice: ask for a new round, or start a new run",
                )
            if request.mechanism == "evaluation_count":
                return self._count(ledger, request, tensors, digest)
            if request.mechanism == "moment_release":
                return self._release(ledger, request, tensors, digest)
            if request.mechanism != request.plan.update:
                raise PolicyError(
                    "update", f"a request for {request.mechanism}; the plan's updates are {request.plan.update}s"
                )
            if request.mechanism == "image_gradient":
                return self._gradient(ledger, request, tensors, digest)
            return self._update(ledger, request, tensors, digest, stored)

    def _update(
        self, ledger: Ledger, request: wire.Request, tensors: bytes, digest: str, before: StoredAnswer | None
    ) -> StoredAnswer:
        plan, models = request.plan, self._models
        wire.restore(tensors, discriminator=models.discriminator, generator=models.generator)
        first_step = ledger.steps(request.run, budget=self._budget)
        state = load(before.state) if before else {}
        followed = float(state.pop("followed")) if "followed" in state else None
        head = self._charge(ledger, request, plan.event, plan.clipping_norm(first_step, followed))
        optimizer = torch.optim.Adam(models.discriminator.parameters(), lr=self._learning_rate, betas=(0.5, 0.99))
        if state:
            load_optimizer(optimizer, state)
        followed = local_update(
            models.discriminator, models.generator, optimizer, self._data, plan,
            first_step=first_step, random=self._random(request.round, first_step), followed=followed,
            engine=models.engine,
        )  # fmt: skip
        kept = {key: value.cpu() for key, value in optimizer_tensors(optimizer).items()}
        if followed is not None:
            kept["followed"] = torch.tensor(followed, dtype=torch.float64)
        answer = wire.Answer(site=self.name, round=request.round, status="trained", head=head)
        body = wire.dump_parameters(models.discriminator)
        return self._store(ledger, request, digest, answer, body, save(kept))

    def _count(self, ledger: Ledger, request: wire.Request, tensors: bytes, digest: str) -> StoredAnswer:
        event, classifier = request.plan.evaluation, self._models.classifier
        if event is None or classifier is None:
            raise PolicyError(
                "mechanisms", "an evaluation count without noise in the plan, or without a classifier here"
            )
        wire.restore(tensors, classifier=classifier)
        head = self._charge(ledger, request, event, 0.0)
        count = noised_count(classifier, self._data, event, self._random("evaluation", request.round))
        answer = wire.Answer(site=self.name, round=request.round, status="counted", head=head, count=count)
        return self._store(ledger, request, digest, answer, b"", b"")

    def _release(self, ledger: Ledger, request: wire.Request, tensors: bytes, digest: str) -> StoredAnswer:
        plan, models = request.plan, self._models
        if plan.moments is None or plan.moment_release is None:
            raise PolicyError("mechanisms", "a moment release, of which the plan says nothing")
        if tensors:
            raise WireError("a request for moments with tensors, which it has no use for")
        head = self._charge(ledger, request, plan.moment_release, 0.0)
        features = FeatureMap(plan.moments, models.image_shape).to(models.device)
        sums = noised_sums(
            features, self._data, models.num_classes, plan.moment_release, self._random("moments", request.round)
        )
        answer = wire.Answer(site=self.name, round=request.round, status="released", head=head)
        return self._store(ledger, request, digest, answer, wire.dump_tensors(sums=sums), b"")

    def _gradient(self, ledger: Ledger, request: wire.Request, tensors: bytes, digest: str) -> StoredAnswer:
        plan, models = request.plan, self._models
        fakes = self._fakes(tensors, plan)
        file = kept.beside(self._ledger_path, request.run, self._budget)
        critic = Critic(file, models.initial_discriminator, learning_rate=self._learning_rate)
        head = self._charge(ledger, request, plan.event, plan.clipping.largest)
        critic.train(self._data, fakes, plan.d_steps, self._random("critic", request.round), request=digest)
        gradient = sanitised_gradient(critic.module, *fakes, plan, self._random("gradient", request.round))
        answer = wire.Answer(site=self.name, round=request.round, status="released", head=head)
        return self._store(ledger, request, digest, answer, wire.dump_tensors(gradient=gradient), b"")

    def _fakes(self, tensors: bytes, plan: SitePlan) -> tuple[Tensor, Tensor]:
        """The server's images (B, channels, size, size) in [-1, 1] and labels (B,)."""
        size, models = plan.batch_size, self._models
        given = wire.read_tensors(
            tensors,
            images=torch.zeros(size, *models.image_shape, device="meta"),
            labels=torch.zeros(size, dtype=torch.int64, device="meta"),
        )
        images, labels = given["images"], given["labels"]
        if not 0 <= int(labels.min()) <= int(labels.max()) < models.num_classes or float(images.abs().max()) > 1:
            raise WireError("images outside [-1, 1], or labels that the federation has not")
        return images.to(models.device), labels.to(models.device)

    def _charge(self, ledger: Ledger, request: wire.Request, event: Event, norm: float) -> str:
        return ledger.charge(
            Charge(event, norm, request.run, request.round, request.id, request.plan.eps_max, request.plan.digest,
                   self._budget)
        )  # fmt: skip

    def _store(
        self, ledger: Ledger, request: wire.Request, digest: str, answer: wire.Answer, body: bytes, state: bytes
    ) -> StoredAnswer:
        stored = StoredAnswer(request.id, digest, answer.model_dump_json(), body, state)
        ledger.store_answer(request.run, stored, answer.head, request.mechanism)
        return stored

    def _random(self, *parts: int | str) -> KeyedGenerator:
        if self._seed is None:  # a new key for each answer: what was drawn before a fork must not come again after it
            return KeyedGenerator.from_os()
        return KeyedGenerator.from_seed(self._seed, self.name, *parts)

    def _open_ledger(self) -> Ledger:
        policy, ledger = self._policy, Ledger(self._ledger_path)
        account = ledger.account
        terms = (account.site, account.eps_max, account.delta, account.unit, ledger.budgets.get(self._budget))
        same_order = policy.order in (None, account.order)
        if terms == (self.name, policy.eps_max, policy.delta, policy.unit, policy.declared_size) and same_order:
            return ledger
        ledger.close()
        raise LedgerError(
            f"the ledger {self._ledger_path} was created for other terms than the policy's (name, eps_max, "
            f"delta, unit, declared size: {terms}; order {account.order:g}); use the ledger's terms, or declare a "
            "disjoint budget"
        )


def check_data(name: str, data: Records, policy: Policy, models: Models) -> None:
    """Compare a site's records with its policy and the networks; what this says stays at the site.

    Raises:
        DataError: they do not fit, or have labels that the federation has not.
    """
    try:
        data.check(policy.declared_size, models.num_classes)
        if tuple(data.images.shape[1:]) != models.image_shape:
            raise DataError(
                f"images of {tuple(data.images.shape[1:])} (channels, height, width), but the generator gives "
                f"{models.image_shape}; bring them to that shape"
            )
        if data.images.device != models.device:
            raise DataError(
                f"images on {data.images.device}, networks on {models.device}; give Models the images' device"
            )
        if data.units.name != policy.unit:
            raise DataError(
                f"the policy protects {policy.unit}s, the data give {data.units.name}s; "
                "give patient ids if patients are protected, and none otherwise"
            )
    except DataError as error:
        raise DataError(f"site {name}: {error}") from error


_LOST = (
    "the server remembers a newer entry than this site's ledger holds: an older copy may have been put in its place; "
    "put back the newest one"
)
