"""argmax(x + Gumbel noise) without the noise of most tokens.

At a position, few tokens can win. Let G0 be a number that the noise of one token in 256 exceeds. The best
sum x + noise among those tokens is a lower limit L of the maximum. Any other token has at most G0, so that it
can only win if x >= L - G0. As the first tokens are a random 256th of all, about 256 tokens or fewer have so
large an x, whatever the distribution is. Which tokens have large noise is decided by their random words
alone, and logarithms are computed for the remaining candidates only.

The result is exact: the same numbers are added and compared as if all noise were computed, and the lowest
token id wins among equals.

Shapes: B rows, q positions per row, N = B * q, V vocabulary, P candidates of all positions.
"""

import math

import numpy as np
import torch
from torch import Tensor

from aedit.spec_rollout.sampling.noise import Ints, NoiseKeys

LARGE_SHARE = 2.0**-8
LARGE_WORD = round((1 - LARGE_SHARE) * 2**32)
"""Random words from this one on give large noise."""
SMALL_NOISE = -math.log(-math.log1p(-LARGE_SHARE)) + 1e-3
"""G0. The margin covers the rounding of logarithms."""

BLOCKS_AT_ONCE = 3 << 14
"""Token blocks per call: larger temporaries do not fit into the cache of a core."""


def noisy_argmax(x_BqV: Tensor, keys: NoiseKeys) -> Tensor:
    """Return argmax(x + noise) at each position, (B, q) int64, the lowest token id among equals.

    Args:
        x_BqV: float32 or float64, on the CPU, with a finite number at each position.
        keys: Keys of the noise of the B * q positions.
    """
    x_NV = x_BqV.reshape(-1, x_BqV.shape[-1])
    places_P = _large_noise(keys, x_NV.shape[1])
    sums_P = _sums(x_NV, keys, places_P)
    places, sums = _candidates(x_NV, keys, places_P, sums_P, _best(sums_P, places_P, x_NV))
    return _winners(x_NV, places, sums).view(x_BqV.shape[:2])


def noisy_best_two(x_NV: Tensor, keys: NoiseKeys) -> tuple[Tensor, Tensor, Tensor]:
    """Return argmax(x + noise) of each position, its sum, and the second largest sum, each (N,).

    Args:
        x_NV: As `noisy_argmax` takes it, with at least two tokens.
        keys: Keys of the noise of the N positions.
    """
    places_P = _large_noise(keys, x_NV.shape[1])
    sums_P = _sums(x_NV, keys, places_P)
    # Two tokens reach the second largest of some sums, so that those two are candidates.
    second_N = _best(_without(places_P, sums_P, _winners(x_NV, places_P, sums_P), x_NV), places_P, x_NV)
    places, sums = _candidates(x_NV, keys, places_P, sums_P, second_N)
    drawn_N = _winners(x_NV, places, sums)
    rest = _without(places, sums, drawn_N, x_NV)
    return drawn_N, _best(sums, places, x_NV), _best(rest, places, x_NV)


def _candidates(
    x_NV: Tensor, keys: NoiseKeys, places_P: Ints, sums_P: Tensor, reached_N: Tensor
) -> tuple[Ints, Tensor]:
    """Return all places whose sum may be `reached_N` or more, and their sums."""
    limits_N1 = _limits(reached_N)[:, None]
    places_O = (x_NV.numpy() >= limits_N1.numpy()).ravel().nonzero()[0]
    return np.concatenate((places_P, places_O)), torch.cat((sums_P, _sums(x_NV, keys, places_O)))


def _winners(x_NV: Tensor, places_P: Ints, sums_P: Tensor) -> Tensor:
    """Return the token of the largest sum of each position, (N,); argmax(x) where there is none."""
    vocabulary = x_NV.shape[1]
    is_best = (sums_P == _best(sums_P, places_P, x_NV)[places_P // vocabulary]).numpy()
    rows, tokens = np.divmod(np.sort(places_P[is_best])[::-1], vocabulary)
    drawn_N = (
        x_NV.argmax(-1) if len(np.unique(rows)) < len(x_NV) else torch.empty(len(x_NV), dtype=torch.int64)
    )
    drawn_N.numpy()[rows] = tokens  # the last one remains, which is the lowest
    return drawn_N


def _without(places_P: Ints, sums_P: Tensor, tokens_N: Tensor, x_NV: Tensor) -> Tensor:
    """Return the sums with -inf at one token of each position."""
    rows, tokens = np.divmod(places_P, x_NV.shape[1])
    return sums_P.masked_fill(torch.from_numpy(tokens == tokens_N.numpy()[rows]), -torch.inf)


def _large_noise(keys: NoiseKeys, vocabulary: int) -> Ints:
    """Return where the noise is large, (P,): position * V + token."""
    blocks = np.arange(-(-vocabulary // 4))
    count = max(1, BLOCKS_AT_ONCE // len(blocks))
    parts = []
    for first in range(0, len(keys.positions_N), count):
        some = keys[first : first + count]
        is_large = np.empty((len(some.positions_N), len(blocks), 4), dtype=bool)
        for i, word in enumerate(some.words(blocks)):
            np.greater_equal(word, LARGE_WORD, out=is_large[..., i])
        rows_P, tokens_P = np.divmod(is_large.ravel().nonzero()[0], 4 * len(blocks))
        parts.append(((rows_P + first) * vocabulary + tokens_P)[tokens_P < vocabulary])
    return np.concatenate(parts)


def _sums(x_NV: Tensor, keys: NoiseKeys, places_P: Ints) -> Tensor:
    rows_P, tokens_P = np.divmod(places_P, x_NV.shape[1])
    x_P = torch.from_numpy(x_NV.numpy().ravel()[places_P])
    return x_P + keys[rows_P].gumbel_of(tokens_P, x_NV.dtype)


def _best(sums_P: Tensor, places_P: Ints, x_NV: Tensor) -> Tensor:
    """Return the largest sum of each position, (N,); -inf where there is none."""
    rows_P = torch.from_numpy(places_P // x_NV.shape[1])
    return sums_P.new_full((len(x_NV),), -torch.inf).scatter_reduce(0, rows_P, sums_P, "amax")


def _limits(best_N: Tensor) -> Tensor:
    """Return a number for each position, such that a token without large noise and a smaller x loses.

    Its sum stays below `best_N` after rounding. Where nothing is known, all finite numbers are above.
    """
    slack_N = (best_N.abs() + SMALL_NOISE) * 2.0**-20
    return (best_N - SMALL_NOISE - slack_N).clamp(min=torch.finfo(best_N.dtype).min)
