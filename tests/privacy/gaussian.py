"""What a release's noise must be, as tests at stated error rates: Gaussian, and unrelated to any other noise.

An error rate is that of correct noise: how often a test fails over the choice of the key. Bonferroni shares it out.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special, stats

Floats = NDArray[np.float64]

#: Noise may lie on a grid of a power of two of at most this many standard deviations.
GRID = 1 / 1024


def assert_standard(draws: Floats, error: float) -> None:
    """Mean, variance, fourth moment and distribution (Kolmogorov and Smirnov) are those of a standard Gaussian."""
    draws = draws.ravel()
    count, share = draws.size, error / 4
    bound = stats.norm.isf(share / 2)
    assert abs(draws.mean()) < bound * (1 / count) ** 0.5
    low, high = stats.chi2.interval(1 - share, count)
    assert low / count < (draws**2).mean() < high / count
    assert abs((draws**4).mean() - 3) < bound * (96 / count) ** 0.5
    below = special.ndtr(np.sort(draws))
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    # rounding to a grid moves the distribution by at most its density times half the grid
    own = distance - stats.norm.pdf(0) * GRID / 2
    assert stats.kstwobign.sf(own * count**0.5) > share


def assert_unrelated(rows: Floats, error: float) -> None:
    """However two rows (m, n) of standard draws, or a row and itself, are shifted, nothing of one is in the other.

    Values and squares: a shared radius shows in the squares alone.
    """
    count = rows.shape[1]
    length = fft.next_fast_len(count, real=True)  # a shift goes round: what leaves at the end comes in at the front
    pairs = [(i, j) for i in range(len(rows)) for j in range(i, len(rows))]
    # nearly Gaussian: each is a sum over up to n products
    bound = stats.norm.isf(error / 2 / (2 * len(pairs) * length)) * count**0.5
    for values in (rows, (rows**2 - 1) / 2**0.5):
        spectra = fft.rfft(values, length)
        for i, j in pairs:
            sums = fft.irfft(spectra[i] * spectra[j].conj(), length)
            if i == j:
                sums[0] = 0.0
            worst = int(np.abs(sums).argmax())
            assert abs(sums[worst]) < bound, f"rows {i} and {j} agree at shift {worst}"
