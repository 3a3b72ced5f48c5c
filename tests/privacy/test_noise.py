"""Statistical tests: the seeds are fixed, so each either always passes or always fails.

Error rates are those of a correct generator over the choice of the seed.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fl_dpgan.privacy.clipping import EpsilonAdaptive
from fl_dpgan.privacy.noise import KeyedGenerator
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.units import Units

torch.set_num_threads(1)

ERROR = 1e-4


def plan(**changes):
    constants = {
        "declared_size": 50,
        "batch_size": 15,
        "d_steps": 2,
        "rounds": 5,
        "noise_multiplier": 1.7,
        "eps_max": 50.0,
        "delta": 1e-4,
        "order": 4.0,
        "clipping": EpsilonAdaptive(c_min=0.2, c_max=3.0),
    }
    return SitePlan(**{**constants, **changes})


def test_the_same_key_gives_the_same_stream():
    first, second = KeyedGenerator(bytes(range(32))), KeyedGenerator(bytes(range(32)))
    assert np.array_equal(first.uniform(10), second.uniform(10))
    assert np.array_equal(first.normal(7), second.normal(7))
    assert np.array_equal(first.integers(9, 5), second.integers(9, 5))


def test_the_stream_is_aes_256_ctr_of_the_key():
    # NIST's AES-256 of the zero block under the zero key
    word = int.from_bytes(bytes.fromhex("dc95c078a2408989"), "little")
    assert KeyedGenerator(bytes(32)).uniform(1)[0] == ((word >> 11) + 0.5) * 2.0**-53


@pytest.mark.parametrize(
    ("left", "right"), [((0,), (1,)), ((1, "run", 2), (1, "run", 3)), ((1, 23), (12, 3)), ((1,), ("1",))]
)
def test_distinct_seeds_give_distinct_streams(left, right):
    assert not np.isin(
        KeyedGenerator.from_seed(*left).uniform(100), KeyedGenerator.from_seed(*right).uniform(100)
    ).any()


def test_a_stream_does_not_repeat_itself():
    random = KeyedGenerator.from_seed(0)
    assert len(np.unique(np.concatenate([random.uniform(500), random.uniform(500)]))) == 1000


def test_generators_from_the_operating_system_differ_each_time():
    assert not np.isin(KeyedGenerator.from_os().uniform(100), KeyedGenerator.from_os().uniform(100)).any()


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedGenerator(bytes(size))


def test_normals_have_the_moments_of_a_standard_gaussian():
    count = 100_000
    draws = KeyedGenerator.from_seed("moments").normal(count)
    bound = stats.norm.isf(ERROR / 2)  # two-sided, per moment, at error rate 1e-4
    assert abs(draws.mean()) < bound * (1 / count) ** 0.5
    assert abs(draws.var() - 1) < bound * (2 / count) ** 0.5
    assert abs((draws**3).mean()) < bound * (15 / count) ** 0.5
    assert abs((draws**4).mean() - 3) < bound * (96 / count) ** 0.5
    halves = draws[: count // 2] * draws[count // 2 :]  # the cosine and the sine of one angle
    assert abs(halves.mean()) < bound * (2 / count) ** 0.5


def test_normals_pass_kolmogorov_and_smirnov_at_error_rate_1e_4():
    assert stats.kstest(KeyedGenerator.from_seed("ks").normal(100_000), "norm").pvalue > ERROR


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_as_many_normals_come_as_are_asked_for(count):
    draws = KeyedGenerator.from_seed(1).normal(count)
    assert draws.shape == (count,)
    assert np.isfinite(draws).all()


def test_uniforms_pass_kolmogorov_and_smirnov_and_keep_off_the_ends():
    draws = KeyedGenerator.from_seed("uniform").uniform(100_000)
    assert stats.kstest(draws, "uniform").pvalue > ERROR
    assert draws.min() > 0 and draws.max() < 1


def test_integers_cover_their_range_evenly():
    counts = np.bincount(KeyedGenerator.from_seed("integers").integers(70_000, 7), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts).pvalue > ERROR


def test_every_record_is_sampled_at_rate_q_independently_of_the_others():
    random, draws, records = KeyedGenerator.from_seed("poisson"), 4000, 40
    site = plan()
    hits = np.zeros((draws, records))
    for row in hits:
        row[site.sample(Units(records), random)] = 1
    # error rate 1e-4 over all 40 records together
    low, high = stats.binom.interval(1 - ERROR / records, draws, site.sample_rate)
    assert ((low <= hits.sum(axis=0)) & (hits.sum(axis=0) <= high)).all()
    # the batch's size is binomial, not fixed: (draws - 1) s^2 / var is nearly chi-square
    ratio = hits.sum(axis=1).var(ddof=1) / (records * site.sample_rate * (1 - site.sample_rate))
    low, high = np.array(stats.chi2.interval(1 - ERROR, draws - 1)) / (draws - 1)
    assert low <= ratio <= high


def test_a_sample_holds_each_index_at_most_once_and_only_records_that_exist():
    chosen = plan().sample(Units(20), KeyedGenerator.from_seed(4))
    assert 0 < len(chosen) < 20
    assert len(np.unique(chosen)) == len(chosen)
    assert chosen.min() >= 0 and chosen.max() < 20


@pytest.mark.parametrize("step", [0, 7])
def test_noise_has_standard_deviation_sigma_times_c_of_its_step(step):
    site = plan()
    noise = (
        site.noised(torch.zeros(300, 200), site.clipping_norm(step), KeyedGenerator.from_seed("noise", step))
        .double()
        .numpy()
        .ravel()
    )
    scale = 1.7 * site.clipping_norm(step)
    assert stats.kstest(noise / scale, "norm").pvalue > ERROR
    assert abs(noise.std() / scale - 1) < stats.norm.isf(ERROR / 2) / (2 * noise.size) ** 0.5


def test_noise_of_a_late_step_is_scaled_by_a_smaller_norm():
    assert plan().clipping_norm(7) < plan().clipping_norm(0) == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [0.3, 1.0, 700.0])
def test_a_noised_sum_lies_on_a_grid_of_a_power_of_two_whatever_was_added_up(dtype, norm):
    """A float's lowest bits could tell which sum the noise was added to (Mironov, CCS 2012)."""
    sums = 100 * norm * torch.randn(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    site = plan()
    found = site.noised(sums.to(dtype), norm, KeyedGenerator.from_seed("grid"))
    assert found.dtype == dtype
    steps = found.double() / 2.0 ** math.floor(math.log2(1.7 * norm / 1024))
    assert torch.equal(steps, steps.round())
    assert len(steps.unique()) > 1900
    exact = sums.to(dtype).double().numpy() + 1.7 * norm * KeyedGenerator.from_seed("grid").normal(2000)
    np.testing.assert_allclose(found.double().numpy(), exact, rtol=0, atol=1.7 * norm / 2048)
