"""Draws by counter-based Gumbel noise: the numbers of `aedit.spec_rollout.sampling`, without an import of it.

The generator is Philox4x32-10. Key: the low words of rollout and sample. Counter: token block, position, the
ids' high words. Four tokens share a block.

Shapes: N rows of logits, V vocabulary, P candidates of all rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
AT_ONCE = 1 << 16
"""Numbers that are computed per call on a CPU: they fit into the cache of a core."""
LARGE_SHARE = 2.0**-8
LARGE_WORD = round((1 - LARGE_SHARE) * 2**32)
"""Random words from this one on give large noise."""
SMALL_NOISE = -math.log(-math.log1p(-LARGE_SHARE)) + 1e-3
"""Upper limit of noise that is not large. The margin covers the rounding of logarithms."""

NoiseKey = tuple[int, int, int]
"""Rollout, sample and absolute position of the token that is drawn."""
Ints = NDArray[np.int64]


def keyed_draw(x_NV: Tensor, keys: Sequence[NoiseKey]) -> Tensor:
    """Return argmax(x + noise) of each row, (N,) int64, the lowest token id among equals.

    With x = logits / T it is a draw from softmax(logits / T).

    Args:
        x_NV: float32.
        keys: Key of the noise of each row.
    """
    if x_NV.device.type != "cpu" or not _kernels():
        return (x_NV + keyed_gumbel(keys, x_NV.shape[1], x_NV.device)).argmax(-1)
    return _pruned_draw(x_NV.contiguous(), np.array(keys, dtype=np.int64))


def keyed_gumbel(keys: Sequence[NoiseKey], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the noise of every token at the position of each key, (N, V) float32."""
    blocks = -(-vocabulary // 4)
    most = len(keys) if torch.device(device).type != "cpu" else max(1, AT_ONCE // (4 * blocks))
    found = torch.empty(len(keys), vocabulary, device=device)
    for first in range(0, len(keys), most):
        some = torch.tensor(keys[first : first + most], dtype=torch.int64).to(device)
        rollouts, samples, positions = some[..., None].unbind(1)
        c0, c1 = torch.arange(blocks, device=device)[None], positions
        c2, c3 = (rollouts >> 32) & WORD, (samples >> 32) & WORD
        k0, k1 = rollouts & WORD, samples & WORD
        for _ in range(ROUNDS):
            # A product of two words may wrap into the sign bit; the masks remove what right shifts fill in.
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & WORD, ((p0 >> 32) ^ c3 ^ k1) & WORD
            c1, c3 = p1 & WORD, p0 & WORD
            k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
        shape = (len(some), blocks)
        words = torch.stack([each.expand(shape) for each in (c0, c1, c2, c3)], dim=-1).flatten(-2)
        found[first : first + most] = _to_gumbel(words[:, :vocabulary])
    return found


def _to_gumbel(words: Tensor) -> Tensor:
    """Return -log(-log u): float64 resolves the 33 bits of u; for -log u, float32 is enough."""
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().to(torch.float32).log_().neg_()


def _pruned_draw(x_NV: Tensor, keys_N3: Ints) -> Tensor:
    """Return `keyed_draw` without the noise of most tokens, which cannot win.

    The noise of one token in 256 is large. The best sum x + noise among those tokens is a lower limit L of
    the maximum. Any other token can win only if x >= L - SMALL_NOISE: about 256 tokens have so large an x.
    """
    large_words, words_at = _kernels()
    num, vocabulary = x_NV.shape
    rows_P, tokens_P, words_P = large_words(keys_N3, vocabulary)
    sums_P = torch.from_numpy(x_NV.numpy()[rows_P, tokens_P]) + _to_gumbel(torch.from_numpy(words_P))
    best_N = x_NV.new_full((num,), -torch.inf)
    best_N.scatter_reduce_(0, torch.from_numpy(rows_P), sums_P, "amax")
    slack_N = (best_N.abs() + SMALL_NOISE) * 2.0**-20  # of the rounding of a sum
    limits_N = (best_N - SMALL_NOISE - slack_N).clamp(min=torch.finfo(torch.float32).min)
    more_rows, more_tokens = (x_NV.numpy() >= limits_N.numpy()[:, None]).nonzero()
    more_words = words_at(keys_N3, more_rows, more_tokens)
    more_sums = torch.from_numpy(x_NV.numpy()[more_rows, more_tokens]) + _to_gumbel(
        torch.from_numpy(more_words)
    )
    rows, tokens = np.concatenate((rows_P, more_rows)), np.concatenate((tokens_P, more_tokens))
    sums = torch.cat((sums_P, more_sums)).numpy()
    order = np.lexsort((-tokens, sums, rows))  # the last one of each row has the largest sum, then lowest id
    last = order[np.flatnonzero(np.diff(rows[order], append=num))]
    return torch.from_numpy(tokens[last])


_compiled: list[Callable[..., Any]] = []


def _kernels() -> list[Callable[..., Any]]:
    """Return `large_words` and `words_at`, which their first calls compile; none without numba."""
    if _compiled:
        return _compiled
    try:  # Not before vLLM has started: its search of all modules for kernels fails at one of numba's.
        from numba import njit
    except ImportError:
        return []
    m0, m1, steps, word = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57), ROUNDS, np.uint64(WORD)
    s0, s1, half, large = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85), np.uint64(32), np.uint64(LARGE_WORD)

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

    @njit
    def large_words(keys_N3: Any, vocabulary: Any) -> Any:
        blocks = (vocabulary + 3) // 4
        words = np.empty((4, blocks), np.uint64)
        most = len(keys_N3) * blocks * 4
        rows, tokens, found = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
        num = 0
        for row in range(len(keys_N3)):
            for block in range(blocks):
                words[0, block], words[1, block], words[2, block], words[3, block] = philox_block(
                    keys_N3[row], block
                )
            for block in range(blocks):
                for i in range(4):
                    if words[i, block] >= large and 4 * block + i < vocabulary:
                        rows[num], tokens[num] = row, 4 * block + i
                        found[num] = np.int64(words[i, block])
                        num += 1
        return rows[:num].copy(), tokens[:num].copy(), found[:num].copy()

    @njit
    def words_at(keys_N3: Any, rows: Any, tokens: Any) -> Any:
        found = np.empty(len(rows), np.int64)
        for i in range(len(rows)):
            found[i] = np.int64(philox_block(keys_N3[rows[i]], tokens[i] >> 2)[tokens[i] & 3])
        return found

    _compiled.extend((large_words, words_at))
    return _compiled
