"""Draws by counter-based Gumbel noise: the numbers of `aedit.spec_rollout.sampling`, without an import of it.

The generator is Philox4x32-10. Key: the low words of rollout and sample. Counter: token block, position, the
ids' high words. Four tokens share a block. In a large vocabulary a stream of its own has the arrivals of a
Poisson process, one in a block, which mark the tokens with large noise.

Shapes: N rows of logits, V vocabulary, K = V >> 8 arrivals of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
AT_ONCE = 1 << 16
"""Numbers that are computed per call on a CPU: they fit into the cache of a core."""
LARGE_VOCABULARY = 1 << 14
ARRIVAL = 2 << 30
"""First block of the arrivals."""
MARGIN, SLACK = 1e-3, 2.0**-20
"""Cover the rounding of logarithms and of sums."""

NoiseKey = tuple[int, int, int]
"""Rollout, sample and absolute position of the token that is drawn."""


def keyed_draw(x_NV: Tensor, keys: Sequence[NoiseKey]) -> Tensor:
    """Return argmax(x + noise) of each row, (N,) int64, the lowest token id among equals.

    With x = logits / T it is a draw from softmax(logits / T). On a CPU, the noise of most tokens of a large
    vocabulary is not computed. The best sum of the tokens with arrivals is a lower limit L of the maximum.
    Any other token has noise below G = -log T_K, and can win only if x >= L - G: about 256 tokens.

    Args:
        x_NV: float32.
        keys: Key of the noise of each row.
    """
    vocabulary = x_NV.shape[1]
    if x_NV.device.type != "cpu" or vocabulary < LARGE_VOCABULARY:
        return (x_NV + keyed_gumbel(keys, vocabulary, x_NV.device)).argmax(-1)
    keys_N3 = torch.tensor(keys, dtype=torch.int64)
    marked_NK, times_NK = _arrivals(keys_N3, vocabulary)
    arrived_NK = x_NV.gather(1, marked_NK) + _to_gumbel(times_NK)
    best_N1, most_N1 = arrived_NK.amax(1, keepdim=True), _to_gumbel(times_NK[:, -1:]) + MARGIN
    if best_N1.isnan().any():
        return (x_NV + keyed_gumbel(keys, vocabulary)).argmax(-1)
    limit_N1 = best_N1 - most_N1 - (best_N1.abs() + most_N1) * SLACK
    may_win_NV = x_NV >= limit_N1.clamp(min=torch.finfo(torch.float32).min)
    rows, tokens = may_win_NV.scatter_(1, marked_NK, False).nonzero(as_tuple=True)
    words = torch.stack(_words(tokens[:, None] >> 2, keys_N3[rows]), -1)[:, 0].gather(1, tokens[:, None] & 3)
    times = times_NK[rows, -1] + _exponentials(words[:, 0])
    sums_NV = torch.full_like(x_NV, -torch.inf).scatter_reduce_(1, marked_NK, arrived_NK, "amax")
    sums_NV[rows, tokens] = x_NV[rows, tokens] + _to_gumbel(times)
    return torch.from_numpy(sums_NV.numpy().argmax(-1))  # takes a tenth of torch's time


def keyed_gumbel(keys: Sequence[NoiseKey], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the noise of every token at the position of each key, (N, V) float32."""
    blocks = torch.arange(-(-vocabulary // 4), device=device)
    most = len(keys) if torch.device(device).type != "cpu" else max(1, AT_ONCE // (4 * len(blocks)))
    found = torch.empty(len(keys), vocabulary, device=device)
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
