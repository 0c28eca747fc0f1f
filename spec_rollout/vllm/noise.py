"""Draws by counter-based Gumbel noise: the numbers of `aedit.spec_rollout.sampling`, without an import of it.

The generator is Philox4x32-10. Key: the low words of rollout and sample. Counter: token block, position, the
ids' high words. Four tokens share a block. In a large vocabulary a stream of its own has the arrivals of a
Poisson process, one in a block, which mark the tokens with large noise.

Shapes: N rows of logits, V vocabulary, K = V >> 8 arrivals of a row.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
AT_ONCE = 1 << 16
"""Numbers that are computed per call on a CPU: they fit into the cache of a core."""
LARGE_VOCABULARY = 1 << 14
ARRIVAL = 2 << 30
"""First block of the arrivals."""
MARGIN, MARGIN_AT = 2.0**-20, 32.0
"""Bound of the difference between a sum in float64 and in float32, over its amount plus `MARGIN_AT`."""
LARGE_SHARE = 2.0**-8
LARGE_WORD = round((1 - LARGE_SHARE) * 2**32)
"""Without arrivals, random words from this one on give large noise."""
SMALL_NOISE = -math.log(-math.log1p(-LARGE_SHARE)) + 1e-3
"""Upper limit of noise that is not large. The margin covers the rounding of logarithms."""
SPAN = 128
"""Tokens that are looked at together."""

NoiseKey = tuple[int, int, int]
"""Rollout, sample and absolute position of the token that is drawn."""


def keyed_draw(x_NV: Tensor, keys: Sequence[NoiseKey]) -> Tensor:
    """Return argmax(x + noise) of each row, (N,) int64, the lowest token id among equals.

    With x = logits / T it is a draw from softmax(logits / T). On a CPU with numba, the noise of most tokens
    is not computed: the best sum of the tokens with large noise is a lower limit L of the maximum, and any
    other token, with noise of at most G, can win only if x >= L - G.

    Args:
        x_NV: float32.
        keys: Key of the noise of each row.
    """
    search = _search() if x_NV.device.type == "cpu" else None
    if search is None:
        return (x_NV + keyed_gumbel(keys, x_NV.shape[1], x_NV.device)).argmax(-1)
    x_NV = x_NV.contiguous()
    spans = x_NV.shape[1] // SPAN  # whole ones
    tops_NS = x_NV[:, : spans * SPAN].view(len(x_NV), spans, SPAN).amax(-1)
    tokens, is_sure = search(x_NV.numpy(), tops_NS.numpy(), np.array(keys, dtype=np.int64))
    drawn_N = torch.from_numpy(tokens)
    if len(unsure := np.flatnonzero(~is_sure).tolist()):  # rounding decides between several
        noise = keyed_gumbel([keys[row] for row in unsure], x_NV.shape[1])
        drawn_N[unsure] = (x_NV[unsure] + noise).argmax(-1)
    return drawn_N


def keyed_gumbel(keys: Sequence[NoiseKey], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the noise of every token at the position of each key, (N, V) float32."""
    blocks = torch.arange(-(-vocabulary // 4), device=device)
    most = len(keys) if torch.device(device).type != "cpu" else max(1, AT_ONCE // (4 * len(blocks)))
    found = torch.empty(len(keys), vocabulary, dtype=torch.float32, device=device)
    for first in range(0, len(keys), most):
        some_N3 = torch.tensor(keys[first : first + most], dtype=torch.int64).to(device)
        words_NV = torch.stack(_words(blocks, some_N3), dim=-1).flatten(-2)[:, :vocabulary]
        times_NV = _exponentials(words_NV)
        if vocabulary >= LARGE_VOCABULARY:
            marked_NK, times_NK = _arrivals(some_N3, vocabulary)
            times_NV = (times_NV + times_NK[:, -1:]).scatter_reduce_(1, marked_NK, times_NK, "amin")
        found[first : first + most] = _to_gumbel(times_NV)
    return found


def _arrivals(keys_N3: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the marked tokens, some more than once, and their times, (N, K) int64 and float64."""
    blocks = torch.arange(vocabulary >> 8, device=keys_N3.device) + ARRIVAL
    high, low, gaps, _ = _words(blocks, keys_N3)
    marked = ((high * vocabulary + (low * vocabulary >> 32 & WORD)) >> 32) & WORD
    return marked, (_exponentials(gaps) / vocabulary).cumsum(-1)


def _words(blocks: Tensor, keys_N3: Tensor) -> list[Tensor]:
    """Return four tensors of random words, (N, blocks), of blocks (N, 1), or (..) for all rows."""
    rollouts, samples, positions = keys_N3[..., None].unbind(1)
    c0, c1 = blocks, positions
    c2, c3 = (rollouts >> 32) & WORD, (samples >> 32) & WORD
    k0, k1 = rollouts & WORD, samples & WORD
    for _ in range(ROUNDS):
        # A product of two words may wrap into the sign bit; the masks remove what right shifts fill in.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & WORD, ((p0 >> 32) ^ c3 ^ k1) & WORD
        c1, c3 = p1 & WORD, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def _exponentials(words: Tensor) -> Tensor:
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32).log_().neg_()


def _to_gumbel(times: Tensor) -> Tensor:
    """Return -log t: float64 resolves the 33 bits of a time's word; for its logarithm, float32 is enough."""
    return times.to(torch.float32).log_().neg_()


@cache
def _search() -> Any:
    """Return the search for the largest sum of each row, which its first call compiles; None without numba.

    It takes x_NV, the maxima of its whole spans, and keys_N3. It returns the tokens, and whether float32
    finds the same: no other sum is near.
    """
    try:  # Not before vLLM has started: its search of all modules for kernels fails at one of numba's.
        from numba import njit
    except ImportError:
        return None
    m0, m1, steps, word = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57), ROUNDS, np.uint64(WORD)
    s0, s1, half, large = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85), np.uint64(32), np.uint64(LARGE_WORD)
    least_arrivals, first_arrival = LARGE_VOCABULARY, np.uint64(ARRIVAL)
    lowest = float(np.finfo(np.float32).min)

    @njit(inline="always")
    def philox_block(key: Any, block: Any) -> Any:
        rollout, sample = np.uint64(key[0]), np.uint64(key[1])
        c0, c1, c2, c3 = np.uint64(block), np.uint64(key[2]), rollout >> half, sample >> half
        k0, k1 = rollout & word, sample & word
        for _ in range(steps):
            p0, p1 = c0 * m0, c2 * m1
            c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & word, (p0 >> half) ^ c3 ^ k1, p0 & word
            k0, k1 = (k0 + s0) & word, (k1 + s1) & word
        return c0, c1, c2, c3

    @njit(inline="always")
    def exponential(drawn: Any) -> Any:
        return -math.log((drawn + 0.5) * 2.0**-32)

    @njit
    def search(x_NV: Any, tops_NS: Any, keys_N3: Any) -> Any:
        num, vocabulary = x_NV.shape
        blocks = (vocabulary + 3) // 4
        has_arrivals = vocabulary >= least_arrivals
        words, highest = np.empty((4, blocks), np.uint64), np.empty(blocks, np.uint64)
        tokens, is_sure = np.zeros(num, np.int64), np.zeros(num, np.bool_)
        for row in range(num):
            key, time, most = keys_N3[row], 0.0, SMALL_NOISE
            best, second, winner, has_nan = -np.inf, -np.inf, -1, False
            if has_arrivals:
                for at in range(vocabulary >> 8):
                    high, low, gap, _ = philox_block(key, first_arrival + np.uint64(at))
                    time += exponential(gap) / vocabulary
                    columns = np.uint64(vocabulary)
                    token = int((high * columns + (low * columns >> half)) >> half)
                    total = x_NV[row, token] - math.log(time)
                    if token != winner and total > best:
                        best, second, winner = total, best, token
                    elif token == winner:
                        best = max(best, total)
                    else:
                        second = max(second, total)
                most = -math.log(time)
            else:
                for block in range(blocks):
                    c0, c1, c2, c3 = philox_block(key, block)
                    words[0, block], words[1, block], words[2, block], words[3, block] = c0, c1, c2, c3
                    highest[block] = max(max(c0, c1), max(c2, c3))
                for block in range(blocks):
                    if highest[block] < large:
                        continue
                    for token in range(4 * block, min(4 * block + 4, vocabulary)):
                        if words[token & 3, block] >= large:
                            total = x_NV[row, token] - math.log(exponential(words[token & 3, block]))
                            if total > best:
                                best, second, winner = total, best, token
                            else:
                                second = max(second, total)
            limit = max(best - most - MARGIN * (abs(best) + MARGIN_AT), lowest)
            for span in range((vocabulary + SPAN - 1) // SPAN):
                if span < tops_NS.shape[1] and tops_NS[row, span] < limit:
                    continue
                for token in range(span * SPAN, min((span + 1) * SPAN, vocabulary)):
                    if x_NV[row, token] < limit or token == winner:
                        continue
                    if has_arrivals:
                        drawn = philox_block(key, token >> 2)[token & 3]
                    else:
                        drawn = words[token & 3, token >> 2]
                    total = x_NV[row, token] - math.log(time + exponential(drawn))
                    has_nan |= math.isnan(total)
                    if total > best:
                        best, second, winner = total, best, token
                    else:
                        second = max(second, total)
            tokens[row] = max(winner, 0)
            is_sure[row] = not has_nan and second < best - MARGIN * (abs(best) + MARGIN_AT)
        return tokens, is_sure

    return search
