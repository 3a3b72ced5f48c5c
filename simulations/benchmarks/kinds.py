"""The kinds of D step that `step` times: plain, ours, and Opacus' in each of its modes."""

from collections.abc import Callable

import torch
from opacus.grad_sample import GradSampleModuleNoOp
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_dpgan.privacy.clipping import Fixed
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import PrivacyConfig, SitePlan

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, targets
Step = Callable[[], object]

C = 1.0
#: Opacus' modes and what they are asked for with.
MODES = {
    "hooks": {"grad_sample_mode": "hooks"},
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "no-op": {"grad_sample_mode": "no_op"},
    "ghost": {"grad_sample_mode": "ghost", "use_ghost_clipping": True, "max_grad_norm": C},
    "fast": {"grad_sample_mode": "ghost", "use_ghost_clipping": False, "max_grad_norm": C},
}


def adam(model: nn.Module) -> torch.optim.Adam:
    """The sites' optimiser."""
    return torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.99))


def plain(model: nn.Module, batch: Batch) -> Step:
    """A step without privacy."""
    images, labels, targets = batch
    optimizer = adam(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        binary_cross_entropy_with_logits(model(images, labels), targets).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, batch: Batch, noise: float) -> Step:
    """A step as `local_update` takes it."""
    samples, optimizer, engine = len(batch[2]), adam(model), LayerEngine(model)
    privacy = PrivacyConfig(batch_size=max(1, samples // 2), noise_multiplier=1.0, clipping=Fixed(c=C))
    plan = SitePlan.derive(privacy, declared_size=6000, d_steps=10, rounds=1)
    random = KeyedGenerator.from_os()

    def step() -> None:
        total, _ = engine.clipped_sum(*batch, C, plan.clipping)
        for parameter, clipped in zip(model.parameters(), total, strict=True):
            noised = plan.noised(clipped, C, random) if noise else clipped
            parameter.grad = noised / samples
        optimizer.step()

    return step


def opacus(model: nn.Module, batch: Batch, noise: float, mode: str) -> Step:
    """A step as Opacus' documentation takes it in this mode, with its own noise."""
    images, labels, targets = batch
    wrapped, criterion = wrap_model(model.train(), **MODES[mode]), nn.BCEWithLogitsLoss()
    kind = DPOptimizerFastGradientClipping if mode in ("ghost", "fast") else DPOptimizer
    optimizer = kind(adam(model), noise_multiplier=noise, max_grad_norm=C, expected_batch_size=len(targets))
    if kind is DPOptimizerFastGradientClipping:
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if isinstance(wrapped, GradSampleModuleNoOp):
            _per_sample(model, batch)
        else:
            criterion(wrapped(images, labels), targets).backward()
        optimizer.step()

    return step


def _per_sample(model: nn.Module, batch: Batch) -> None:
    """What the no-op mode leaves to its user: gradients (n, *shape) by torch.func."""

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor, target: Tensor) -> Tensor:
        logit = functional_call(model, parameters, (image[None], label[None]))
        return binary_cross_entropy_with_logits(logit, target[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, *batch)
    for name, parameter in model.named_parameters():
        parameter.grad_sample = gradients[name]
