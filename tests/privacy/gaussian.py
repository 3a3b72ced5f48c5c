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
    """Mean, variance, distribution (Kolmogorov and Smirnov) and tails are those of a standard Gaussian."""
    draws = draws.ravel()
    count, share = draws.size, error / 4
    assert abs(draws.mean()) < stats.norm.isf(share / 2) * (1 / count) ** 0.5
    low, high = stats.chi2.interval(1 - share, count)
    assert low / count < (draws**2).mean() < high / count
    below = special.ndtr(np.sort(draws))
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    # rounding to a grid moves the distribution by at most its density times half the grid
    own = distance - stats.norm.pdf(0) * GRID / 2
    assert stats.kstwobign.sf(own * count**0.5) > share
    # noise that ends somewhere would give a record away there, which no moment shows
    low, high = stats.binom.interval(1 - share, count, 100 / count)
    assert low <= (np.abs(draws) > stats.norm.isf(50 / count)).sum() <= high


def assert_unrelated(rows: Floats, error: float) -> None:
    """However two rows (m, n) of standard draws, or a row and itself, are shifted, nothing of one is in the other.

    Neither the values nor whether they are large, in which alone it shows if they share an absolute value.
    """
    count = rows.shape[1]
    length = fft.next_fast_len(count, real=True)  # a shift goes round: what leaves at the end comes in at the front
    pairs = [(i, j) for i in range(len(rows)) for j in range(i, len(rows))]
    # each sum is over up to n products of variance 1; of the second kind they are 1 or -1, so its tails are no heavier
    bound = stats.norm.isf(error / 2 / (2 * len(pairs) * length)) * count**0.5
    for values in (rows, np.sign(np.abs(rows) - stats.norm.isf(0.25))):
        spectra = fft.rfft(values, length)
        for i, j in pairs:
            sums = fft.irfft(spectra[i] * spectra[j].conj(), length)
            if i == j:
                sums[0] = 0.0
            worst = int(np.abs(sums).argmax())
            assert abs(sums[worst]) < bound, f"rows {i} and {j} agree at shift {worst}"
