"""A patient contributes one clipped gradient to a D step, however many images there are of them (invariant 11)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dpgan.errors import DataError
from fl_dpgan.networks import Discriminator, Generator
from fl_dpgan.privacy.clipping import Automatic, Fixed
from fl_dpgan.privacy.layers import LayerEngine
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.training.discriminator import local_update, summed_gradient
from fl_dpgan.training.records import Records

torch.set_num_threads(1)


class Scripted(KeyedGenerator):
    """Gives the uniform numbers that it was given, so that two data sets can be sampled alike."""

    def __init__(self, *draws):
        self.draws = [np.asarray(d, dtype=np.float64) for d in draws]

    def uniform(self, count):
        given = self.draws.pop(0)
        assert len(given) == count
        return given


def networks():
    torch.manual_seed(5)
    shape = {"size": 28, "channels": 1, "num_classes": 3}
    return Generator(**shape, latent_dim=4, width=2), Discriminator(**shape, width=2)


def images_and_labels(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=random) * 2 - 1, torch.randint(3, (count,), generator=random)


def site_plan(declared_size=5, batch_size=2, **changes):
    constants = {
        "declared_size": declared_size, "batch_size": batch_size, "d_steps": 1, "rounds": 4, "noise_multiplier": 0.8,
        "eps_max": 100.0, "delta": 1e-4, "order": 3.0, "clipping": Fixed(c=0.2), "unit": "patient",
    }  # fmt: skip
    return SitePlan.model_validate({**constants, **changes})


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), who=st.integers(0, 4), many=st.integers(1, 30),
    rule=st.sampled_from([Fixed(c=0.2), Automatic(c=0.2)]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_invariant_11_sensitivity_a_patient_moves_the_clipped_sum_by_at_most_c(sizes, who, many, rule, seed):
    sizes[who := who % len(sizes)] = many
    patients = [f"p{n}" for n, size in enumerate(sizes) for _ in range(size)]
    images, labels = images_and_labels(len(patients), seed)
    random = np.random.default_rng(seed)
    included, which = random.random(len(sizes)), random.random(len(sizes))
    included[who] = 0.0  # the patient is sampled
    plan, fakes, wrapped = site_plan(), images_and_labels(3, seed + 1), LayerEngine(networks()[1])

    def clipped_sum(keep_patients, keep):
        data = Records(images[keep], labels[keep], [p for p, k in zip(patients, keep, strict=True) if k])
        mask = included[keep_patients]
        drawn = plan.sample(data.units, Scripted(mask, which[keep_patients][mask < plan.sample_rate]))
        return flat(summed_gradient(wrapped, data.batch(drawn), fakes, 0.2, rule)[0]), len(drawn)

    everyone = np.ones(len(sizes), bool)
    others = np.arange(len(sizes)) != who
    larger, drawn = clipped_sum(everyone, torch.ones(len(patients), dtype=torch.bool))
    smaller, fewer = clipped_sum(others, torch.tensor([p != f"p{who}" for p in patients]))
    assert drawn == fewer + 1
    moved = float((larger - smaller).norm())
    assert moved <= 0.2 * (1 + 1e-5)
    if rule.rule == "fixed":
        assert moved == pytest.approx(0.2, rel=1e-3)  # C binds, so the bound is tested


def test_invariant_11_one_image_per_sampled_patient_reaches_the_discriminator():
    data = Records(*images_and_labels(40), ["p"] * 20 + ["q"] * 15 + [f"r{n}" for n in range(5)])
    g, model = networks()
    seen = []
    model.features.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = site_plan(declared_size=7, batch_size=7)  # q = 1
    local_update(model, g, optimizer, data, plan, first_step=0, random=KeyedGenerator.from_seed(1))
    reals = torch.cat(seen)[:7]
    assert len(torch.cat(seen)) == 7 + 7
    where = [int((data.images == real).flatten(1).all(1).nonzero()) for real in reals]
    assert sorted(min(index // 20, 1) if index < 35 else index for index in where) == [0, 1, 35, 36, 37, 38, 39]


def test_invariant_11_the_declared_size_is_compared_with_the_number_of_patients():
    data = Records(*images_and_labels(100), [f"{n % 10}" for n in range(100)])
    data.check(11, 3)  # nine tenths are enough
    with pytest.raises(DataError, match="10 patients, too few for the declared size 12"):
        data.check(12, 3)


def test_invariant_11_a_missing_id_is_an_error_and_names_none():
    with pytest.raises(DataError, match="1 records have no patient id") as caught:
        Records(*images_and_labels(3), ["secret-1", "", "secret-2"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("labels", "ids"), [(2, None), (3, ["a", "b"])])
def test_records_whose_numbers_differ_are_refused(labels, ids):
    images, some = images_and_labels(3)
    with pytest.raises(DataError, match="per"):
        Records(images, some[:labels], ids)


def test_a_label_that_the_federation_does_not_have_is_refused():
    with pytest.raises(DataError, match="a label is outside 0 to 1"):
        Records(images_and_labels(3)[0], torch.tensor([0, 1, 2])).check(3, 2)
