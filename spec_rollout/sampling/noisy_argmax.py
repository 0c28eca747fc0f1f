"""argmax(x + Gumbel noise) without the noise of most tokens of a large vocabulary.

At a position, few tokens can win. Tokens with large noise are enumerated by the arrivals of `noise`; the best
sum x + noise among them is a lower limit L of the maximum. Any other token has less noise than G = -log T_K,
so that it can only win if x >= L - G. As the first tokens are a random 256th of all, about 256 tokens or
fewer have so large an x, whatever the distribution is. Noise is computed for these candidates only.

The result is exact: the same numbers are added and compared as if all noise were computed, and the lowest
token id wins among equals.

Shapes: B rows, q positions per row, N = B * q, V vocabulary, K arrivals at a position, P = N * K, then with
the candidates of all positions.
"""

import numpy as np
import torch
from torch import Tensor

from aedit.spec_rollout.sampling.noise import Ints, NoiseKeys, to_gumbel

MARGIN = 1e-3
"""Covers the rounding of logarithms."""


def noisy_argmax(x_BqV: Tensor, keys: NoiseKeys) -> Tensor:
    """Return argmax(x + noise) at each position, (B, q) int64, the lowest token id among equals.

    Args:
        x_BqV: float32 or float64, on the CPU, with a finite number at each position.
        keys: Keys of the noise of the B * q positions.
    """
    x_NV = x_BqV.reshape(-1, x_BqV.shape[-1])
    places_P, sums_P, last_N = _large_noise(x_NV, keys)
    places, sums = _candidates(x_NV, keys, last_N, places_P, sums_P, _best(sums_P, places_P, x_NV))
    return _winners(x_NV, places, sums).view(x_BqV.shape[:2])


def noisy_best_two(x_NV: Tensor, keys: NoiseKeys) -> tuple[Tensor, Tensor, Tensor]:
    """Return argmax(x + noise) of each position, its sum, and the second largest sum, each (N,).

    Args:
        x_NV: As `noisy_argmax` takes it, with at least two tokens.
        keys: Keys of the noise of the N positions.
    """
    places_P, sums_P, last_N = _large_noise(x_NV, keys)
    # Two tokens reach the second largest of some sums, so that those two are candidates.
    second_N = _best(_without(places_P, sums_P, _winners(x_NV, places_P, sums_P), x_NV), places_P, x_NV)
    places, sums = _candidates(x_NV, keys, last_N, places_P, sums_P, second_N)
    drawn_N = _winners(x_NV, places, sums)
    rest = _without(places, sums, drawn_N, x_NV)
    return drawn_N, _best(sums, places, x_NV), _best(rest, places, x_NV)


def _large_noise(x_NV: Tensor, keys: NoiseKeys) -> tuple[Ints, Tensor, Tensor]:
    """Return the places with large noise, position * V + token, (P,), their sums, and T_K, (N,).

    A token's later arrivals, and its time after T_K in `_candidates`, give smaller sums: they change nothing.
    """
    marked_NK, times_NK, last_N = keys.arrivals(x_NV.shape[1])
    places_P = (np.arange(len(x_NV))[:, None] * x_NV.shape[1] + marked_NK).ravel()
    return places_P, _at(x_NV, places_P) + to_gumbel(times_NK, x_NV.dtype).ravel(), last_N


def _candidates(
    x_NV: Tensor, keys: NoiseKeys, last_N: Tensor, places_P: Ints, sums_P: Tensor, reached_N: Tensor
) -> tuple[Ints, Tensor]:
    """Return all places whose sum may be `reached_N` or more, and their sums."""
    limits_N1 = _limits(reached_N, last_N)[:, None]
    places_O = (x_NV.numpy() >= limits_N1.numpy()).ravel().nonzero()[0]
    rows_O, tokens_O = np.divmod(places_O, x_NV.shape[1])
    times_O = keys[rows_O].times_after(last_N[torch.from_numpy(rows_O)], tokens_O)
    sums_O = _at(x_NV, places_O) + to_gumbel(times_O, x_NV.dtype)
    return np.concatenate((places_P, places_O)), torch.cat((sums_P, sums_O))


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


def _at(x_NV: Tensor, places_P: Ints) -> Tensor:
    return torch.from_numpy(x_NV.numpy().ravel()[places_P])


def _best(sums_P: Tensor, places_P: Ints, x_NV: Tensor) -> Tensor:
    """Return the largest sum of each position, (N,); -inf where there is none."""
    rows_P = torch.from_numpy(places_P // x_NV.shape[1])
    return sums_P.new_full((len(x_NV),), -torch.inf).scatter_reduce(0, rows_P, sums_P, "amax")


def _limits(best_N: Tensor, last_N: Tensor) -> Tensor:
    """Return a number for each position, such that a token without large noise and a smaller x loses.

    Its sum stays below `best_N` after rounding. Where nothing is known, all finite numbers are above.
    """
    most_N = to_gumbel(last_N, best_N.dtype) + MARGIN
    slack_N = (best_N.abs() + most_N) * 2.0**-20
    return (best_N - most_N - slack_N).clamp(min=torch.finfo(best_N.dtype).min)
