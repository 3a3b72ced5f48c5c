"""A site's own policy: what it accepts of a server's plan, and what may leave. The site sets it; no message can.

It is the `[policy]` table of `site.toml`. Every refusal names the rule, a key of this table.
"""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fl_dpgan.errors import PolicyError
from fl_dpgan.privacy.accountant import Event, Mechanism, best_order, calibrate
from fl_dpgan.privacy.entries import Account, Unit
from fl_dpgan.privacy.plan import LEAST_NOISE, Order, SitePlan


class Policy(BaseModel):
    """The site's terms. All of its numbers are public constants: a server learns them from refusals."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    declared_size: int = Field(
        ge=1,
        le=10**10,
        description="How many privacy units (images or patients) the site declares to have. The number becomes "
        "public; round it down. Sampling rates follow from it.",
    )
    unit: Unit = Field("image", description='What is protected: "image" or "patient" (all images of one person).')
    eps_max: float = Field(10.0, gt=0, le=1000, description="The whole budget, over all runs, for ever.")
    delta: float = Field(1e-5, gt=0, lt=0.5, description="delta of the budget; at most 1/(10 declared_size).")
    order: Order | None = Field(
        None,
        description="RDP order of the ledger, fixed when it is created: the one that suits the planned use (`fl-dpgan "
        "budget plan` shows it). Left out: what suits a thousand D steps at a sample rate of 0.02.",
    )
    eps_per_run: float = Field(
        10.0,
        gt=0,
        le=1000,
        description="The largest share of eps_max that one run may spend. A run is what the server calls one: eps_max "
        "alone bounds all of them.",
    )
    least_noise_multiplier: float = Field(
        LEAST_NOISE, ge=LEAST_NOISE, le=1e6, description="The smallest noise multiplier sigma accepted."
    )
    largest_sample_rate: float = Field(1.0, gt=0, le=1, description="The largest sample rate q = B / declared_size.")
    largest_batch_size: int = Field(4096, ge=1, le=100_000, description="The largest batch size B.")
    largest_clipping_norm: float = Field(100.0, gt=0, le=1e6, description="The largest clipping norm C.")
    largest_d_steps: int = Field(1000, ge=1, le=100_000, description="The most D steps in one round.")
    largest_moments: int = Field(
        20_000,
        ge=1,
        le=10**7,
        description="The most numbers that a moment release may have for each class and channel.",
    )
    mechanisms: tuple[Mechanism, ...] = Field(
        ("discriminator_update",),
        min_length=1,
        description='What may leave: "discriminator_update" (the noised D), "evaluation_count" (a noised count of '
        "how many of the site's images a classifier trained on synthetic ones gets right), "
        '"moment_release" (noised sums of features of the images, class by class), '
        '"image_gradient" (noised gradients of a critic that stays at the site).',
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Policy":
        if self.delta > 1 / (10 * self.declared_size):
            raise ValueError(
                f"delta = {self.delta:g} is more than 1/(10 declared_size) for declared_size = {self.declared_size}; "
                f"set delta to at most {1 / (10 * self.declared_size):.1e}"
            )
        return self

    @property
    def ledger_order(self) -> float:
        """The order at which a new ledger is kept; no server has a say in it."""
        if self.order is not None:
            return self.order
        sigma = calibrate(eps_max=self.eps_max, delta=self.delta, sample_rate=0.02, steps=1000)
        return best_order([Event(0.02, sigma, 1000)], self.delta)

    def account(self, site: str) -> Account:
        """The terms of the site's ledger."""
        return Account(site, self.declared_size, self.eps_max, self.delta, self.ledger_order, self.unit)

    def check(self, plan: SitePlan, mechanism: str) -> None:
        """Compare a plan with this policy; nothing is changed to make it fit.

        Raises:
            PolicyError: names the first rule that the plan breaks.
        """
        if plan.non_private:  # no key of the table: no site can allow it
            raise PolicyError("non_private", "the plan has noise and clipping off, which no site with a ledger accepts")
        equal = ("declared_size", "unit", "delta")
        for rule in equal:
            mine, asked = getattr(self, rule), getattr(plan, rule)
            if mine != asked:
                raise PolicyError(rule, f"the plan has {rule} = {asked}, this site has {mine}")
        if mechanism not in self.mechanisms:
            raise PolicyError("mechanisms", f"{mechanism} may not leave this site, only {', '.join(self.mechanisms)}")
        noise = [plan.noise_multiplier]
        noise += [sigma for sigma in (plan.evaluation_noise, plan.moment_noise) if sigma is not None]
        for rule, asked, largest in (
            ("eps_per_run", plan.eps_max, self.eps_per_run),
            ("largest_sample_rate", plan.sample_rate, self.largest_sample_rate),
            ("largest_batch_size", plan.batch_size, self.largest_batch_size),
            ("largest_clipping_norm", plan.clipping.largest, self.largest_clipping_norm),
            ("largest_d_steps", plan.d_steps, self.largest_d_steps),
            ("largest_moments", plan.moments.numbers if plan.moments else 0, self.largest_moments),
        ):
            if asked > largest:
                raise PolicyError(rule, f"the plan asks for {asked:g}, the site's {rule} is {largest:g}")
        if min(noise) < self.least_noise_multiplier:
            raise PolicyError(
                "least_noise_multiplier",
                f"the plan has sigma = {min(noise):g}, the site's least is {self.least_noise_multiplier:g}",
            )
