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
MARGIN, MARGIN_AT = 2.0**-20, 32.0
"""Bound of the difference between a sum in float64 and in float32, over its amount plus `MARGIN_AT`."""
LOWEST = float(np.finfo(np.float32).min)
SPAN = 128
"""Tokens that are looked at together."""

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
    Their sums in float64 leave one token per row; where rounding decides between more, those are compared as
    `keyed_gumbel` computes them.
    """
    num, vocabulary = x_NV.shape
    spans = vocabulary // SPAN  # whole ones
    tops_NS = x_NV[:, : spans * SPAN].view(num, spans, SPAN).amax(-1)
    rows, tokens, words = _kernels()[0](x_NV.numpy(), tops_NS.numpy(), keys_N3)
    if np.array_equal(rows, np.arange(num)):
        return torch.from_numpy(tokens)
    if not np.array_equal(np.unique(rows), np.arange(num)):  # a row without a number above -infinity
        return (x_NV + keyed_gumbel(keys_N3.tolist(), vocabulary)).argmax(-1)
    sums = (torch.from_numpy(x_NV.numpy()[rows, tokens]) + _to_gumbel(torch.from_numpy(words))).numpy()
    order = np.lexsort((-tokens, sums, rows))  # the last one of each row has the largest sum, then lowest id
    last = order[np.flatnonzero(np.diff(rows[order], append=num))]
    return torch.from_numpy(tokens[last])


_compiled: list[Callable[..., Any]] = []


def _kernels() -> list[Callable[..., Any]]:
    """Return the search for tokens whose sums may be the largest, which its first call compiles; or nothing.

    It takes x_NV, the maxima of its whole spans, and keys_N3. It returns rows, tokens and random words, in
    order of rows. Without numba there is none.
    """
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

    @njit(inline="always")
    def noise_of(drawn: Any) -> Any:
        return -math.log(-math.log((drawn + 0.5) * 2.0**-32))

    @njit
    def near_best(x_NV: Any, tops_NS: Any, keys_N3: Any) -> Any:
        num, vocabulary = x_NV.shape
        blocks = (vocabulary + 3) // 4
        words, highest = np.empty((4, blocks), np.uint64), np.empty(blocks, np.uint64)
        rows, tokens, found = [np.int64(0)][:0], [np.int64(0)][:0], [np.int64(0)][:0]
        near = [(0.0, np.int64(0))][:0]
        for row in range(num):
            for block in range(blocks):
                c0, c1, c2, c3 = philox_block(keys_N3[row], block)
                words[0, block], words[1, block], words[2, block], words[3, block] = c0, c1, c2, c3
                highest[block] = max(max(c0, c1), max(c2, c3))
            near.clear()
            best = -np.inf
            for block in range(blocks):
                if highest[block] < large:
                    continue
                for token in range(4 * block, min(4 * block + 4, vocabulary)):
                    if words[token & 3, block] >= large:
                        total = x_NV[row, token] + noise_of(words[token & 3, block])
                        if total > best - MARGIN * (abs(best) + MARGIN_AT):
                            near.append((total, np.int64(token)))
                            best = max(best, total)
            limit = max(best - SMALL_NOISE - MARGIN * (abs(best) + MARGIN_AT), LOWEST)
            for span in range((vocabulary + SPAN - 1) // SPAN):
                if span < tops_NS.shape[1] and tops_NS[row, span] < limit:
                    continue
                for token in range(span * SPAN, min((span + 1) * SPAN, vocabulary)):
                    word = words[token & 3, token >> 2]
                    if x_NV[row, token] >= limit and word < large:
                        total = x_NV[row, token] + noise_of(word)
                        if total > best - MARGIN * (abs(best) + MARGIN_AT):
                            near.append((total, np.int64(token)))
                            best = max(best, total)
            for total, likely in near:
                if total > best - MARGIN * (abs(best) + MARGIN_AT):
                    rows.append(np.int64(row))
                    tokens.append(likely)
                    found.append(np.int64(words[likely & 3, likely >> 2]))
        return np.array(rows), np.array(tokens), np.array(found)

    _compiled.append(near_best)
    return _compiled
