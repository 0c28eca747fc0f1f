"""Counter-based noise: random numbers as a pure function of (rollout, sample, position, token).

Plain decoding, a chain, a tree, or another engine after a migration see the same numbers at a position, so
they draw the same token. The generator is Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as
1, 2, 3, SC 2011): integer arithmetic, the same bits on every device. The logarithms of the Gumbel noise, and
sums of them, may differ between devices in the last bit.

Key: the low words of the two ids. Counter: token block (with the stream in its high bits), position, the ids'
high words. Four tokens share a block. So no two of (stream, rollout, sample, position, block) share a
counter. A word w is the uniform number u = (w + 1/2) / 2**32.

The Gumbel noise of a token is -log of a time, which has the distribution Exp(1). Below `LARGE_VOCABULARY`
tokens the time is -log u, with the token's word. In a larger vocabulary the tokens with large noise can be
enumerated. A Poisson process of rate V has the arrivals T_1 < ... < T_K, K = V >> 8, one in each block of a
stream of its own. Of its words w0, w1, w2, the last one gives the gap before it, -log(u2) / V, and the others
the token that it marks, (w0 * 2**32 + w1) * V >> 64. The time of a marked token is its first arrival. That of
another token is T_K - log u, with the token's word. By thinning, the first arrivals of the tokens are
independent and Exp(1); by memorylessness, so is what remains after T_K. V is the number of columns of the
policy's logits.

Shapes: B rows, m positions, V vocabulary, K arrivals, W numbers per position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aedit.spec_rollout.model import to_device
from aedit.types import check

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Streams, above the block, which has at most 30 bits: Gumbel noise, uniforms of rejection sampling, arrivals.
_GUMBEL, _UNIFORM, _ARRIVAL = 0, 1 << 30, 2 << 30

Ints = NDArray[np.int64]
_Words = TypeVar("_Words", Tensor, Ints)
Ids = Tensor | int
"""int64, (B,), or one number for B = 1."""
_Make = Callable[[Ids, Ids, Tensor], Tensor]
"""(rollouts, samples, positions_Bm) -> (B, m, W)."""
# Numbers computed per call. On a CPU they must fit into the cache of a core; on a GPU larger calls amortize
# the launches, some 128 per call.
_AT_ONCE, _AT_ONCE_CUDA = 1 << 16, 1 << 24


LARGE_VOCABULARY = 1 << 14
"""Vocabulary from which on the noise has arrivals, so that a CPU finds the best token without all noise."""


def num_arrivals(vocabulary: int) -> int:
    """Return K, the number of arrivals at a position."""
    return vocabulary >> 8 if vocabulary >= LARGE_VOCABULARY else 0


def philox(counter: Sequence[_Words], key: Sequence[_Words | int]) -> list[_Words]:
    """Return four random words for each counter of four words, under a key of two words.

    Counters broadcast against each other, and shared parts are computed once.

    Args:
        counter: Four int64 tensors or arrays of words, 0 to 2**32 - 1.
        key: Two words. They must broadcast to the last two counter words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two words may wrap into the sign bit, which loses no bit. The right shift then fills
        # with ones, and c1 and c3 keep the high halves of their products: the mask removes both.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32) ^ c1, (p0 >> 32) ^ c3
        c0 ^= k0
        c2 ^= k1
        c0 &= _WORD
        c2 &= _WORD
        c1, c3 = p1, p0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return [c0, c1 & _WORD, c2, c3 & _WORD]


def gumbel(
    rollouts: Ids, samples: Ids, positions_Bm: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the Gumbel noise of every token, (B, m, V). argmax(log p + noise) is a draw from p.

    Args:
        rollouts: Rollout ids.
        samples: Sample ids.
        positions_Bm: int64, absolute positions below 2**32.
        vocabulary: V, that of the policy.
        dtype: Dtype of the result.
    """
    blocks = torch.arange(-(-vocabulary // 4), device=positions_Bm.device) + _GUMBEL
    words = _words(rollouts, samples, positions_Bm, blocks)
    times_BmV = _exponentials(torch.stack(words, dim=-1).flatten(-2)[..., :vocabulary])
    if num := num_arrivals(vocabulary):
        blocks = torch.arange(num, device=positions_Bm.device) + _ARRIVAL
        marked_BmK, arrivals_BmK = _arrivals(_words(rollouts, samples, positions_Bm, blocks), vocabulary)
        times_BmV += arrivals_BmK[..., -1:]
        times_BmV.scatter_reduce_(-1, marked_BmK, arrivals_BmK, "amin")
    return to_gumbel(times_BmV, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class NoiseKeys:
    """Keys of the Gumbel noise of N positions on the CPU, (N,) each. Positions of a row share its ids.

    NumPy takes half the time of torch for these integers, which are few or fit into the cache of a core.
    """

    rollouts_N: Ints
    samples_N: Ints
    positions_N: Ints

    def __getitem__(self, index: Ints) -> "NoiseKeys":
        """Return the keys of some of the positions."""
        return NoiseKeys(self.rollouts_N[index], self.samples_N[index], self.positions_N[index])

    def arrivals(self, vocabulary: int) -> tuple[Ints, Tensor, Tensor]:
        """Return the tokens with large noise, (N, K), their times, and the last time of each position, (N,).

        A token may be marked more than once; its first time counts. Times are float64. Without arrivals the
        last time is 0.
        """
        words = self._words(np.arange(num_arrivals(vocabulary)) + _ARRIVAL)
        marked_NK, times_NK = _arrivals([torch.from_numpy(each) for each in words], vocabulary)
        last_N = times_NK[:, -1] if times_NK.shape[1] else times_NK.new_zeros(len(times_NK))
        return marked_NK.numpy(), times_NK, last_N

    def times_after(self, last_N: Tensor, tokens_N: Ints) -> Tensor:
        """Return the time of a token without arrival at each position, (N,); last_N: of the last arrival."""
        words_4N = np.stack(self._words((tokens_N[:, None] >> 2) + _GUMBEL))[..., 0]
        words_N = torch.from_numpy(words_4N[tokens_N & 3, np.arange(len(tokens_N))])
        return _exponentials(words_N).add_(last_N)

    def gumbel_of(self, tokens_N: Ints, vocabulary: int, dtype: torch.dtype) -> Tensor:
        """Return the noise of one token at each position, (N,): the numbers that `gumbel` returns."""
        marked_NK, times_NK, last_N = self.arrivals(vocabulary)
        others_NK = torch.from_numpy(marked_NK != tokens_N[:, None])
        after_N1 = self.times_after(last_N, tokens_N)[:, None]
        return to_gumbel(torch.cat((times_NK.masked_fill(others_NK, torch.inf), after_N1), 1).amin(1), dtype)

    def _words(self, blocks: Ints) -> list[Ints]:
        """Return four arrays of random words, (N, ...), of blocks (N, 1), or (...) for all positions."""
        ids = self.rollouts_N[:, None], self.samples_N[:, None]
        counter = (blocks, self.positions_N[:, None], *((x >> 32) & _WORD for x in ids))
        return philox(counter, [x & _WORD for x in ids])


def uniforms(rollouts: Ids, samples: Ids, positions_Bm: Tensor) -> Tensor:
    """Return two uniforms per position, (B, m, 2), float64 in (0, 1), independent of the Gumbel noise.

    The first decides whether the drafted token is accepted, the second draws its replacement.
    """
    block = torch.full((1,), _UNIFORM, device=positions_Bm.device)
    first, second, *_ = _words(rollouts, samples, positions_Bm, block)
    return _between_0_and_1(torch.cat((first, second), dim=-1))


def _words(rollouts: Ids, samples: Ids, positions_Bm: Tensor, blocks: Tensor) -> list[Tensor]:
    """Return four tensors of random words, (B, m, blocks)."""
    if not positions_Bm.is_cpu:
        return _words_of((rollouts, samples), positions_Bm, blocks)
    return _words_on_cpu(rollouts, samples, positions_Bm, blocks)


def _words_on_cpu(rollouts: Ids, samples: Ids, positions_Bm: Tensor, blocks: Tensor) -> list[Tensor]:
    """Return `_words` by NumPy, which takes half the time of torch for these integers."""
    ids = (
        rollouts if isinstance(rollouts, int) else rollouts.numpy(),
        samples if isinstance(samples, int) else samples.numpy(),
    )
    return list(map(torch.from_numpy, _words_of(ids, positions_Bm.numpy(), blocks.numpy())))


def _words_of(ids: Sequence[_Words | int], positions_Bm: _Words, blocks: _Words) -> list[_Words]:
    """Return `_words` of tensors or arrays. Numbers as ids are faster than ids (1,)."""
    ids_B11 = [each if isinstance(each, int) else each[:, None, None] for each in ids]
    zero = blocks[:1] * 0
    high, sample_high = (zero + ((each >> 32) & _WORD) for each in ids_B11)
    return philox((blocks, positions_Bm[..., None], high, sample_high), [each & _WORD for each in ids_B11])


def _arrivals(words: Sequence[Tensor], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the marked tokens and the times of consecutive arrivals, (..., K), from their words."""
    high, low, gaps, _ = words
    # Products may wrap into the sign bit, as in `philox`.
    marked = (high * vocabulary + ((low * vocabulary >> 32) & _WORD) >> 32) & _WORD
    return marked, (_exponentials(gaps) / vocabulary).cumsum(-1)


def to_gumbel(times: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -log t: float64 resolves the 33 bits of a time's word; for its logarithm, float32 is enough."""
    return times.to(dtype).log().neg_()


def _exponentials(words: Tensor) -> Tensor:
    return _between_0_and_1(words).log_().neg_()


def _between_0_and_1(words: Tensor) -> Tensor:
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


class RowNoise:
    """Noise of the engine's rows (`drafts.Noise`), computed ahead of the requests.

    Positions may be requested in any order. Results are read-only and valid until the next step.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        row_bytes: int = 4 << 20,
    ) -> None:
        """Allocate the rings.

        Args:
            rows: Number of rows.
            vocabulary: V.
            device: Device of the noise.
            dtype: Dtype of the Gumbel noise.
            row_bytes: Upper limit of the bytes kept per row, unless 16 positions need more.
        """
        check(rows > 0, "rows", "must be above 0", rows)
        check(0 < vocabulary <= 1 << 32, "vocabulary", "must be 1 to 2**32", vocabulary)
        block = min(64, max(8, row_bytes // (2 * vocabulary * dtype.itemsize)))

        def noise(rollouts: Ids, samples: Ids, positions_Bm: Tensor) -> Tensor:
            return gumbel(rollouts, samples, positions_Bm, vocabulary, dtype)

        self.is_ahead = torch.device(device).type != "cpu" or vocabulary < LARGE_VOCABULARY
        """Use `at`; else `keys` and `noisy_argmax` take less time, as far as only the best token counts."""
        self._gumbel = _NoiseRing(noise, (rows, 2 * block, vocabulary), device, dtype)
        self._uniforms = _NoiseRing(uniforms, (rows, 256, 2), device, torch.float64)

    @property
    def num_bytes(self) -> int:
        """Return the size of the kept noise in bytes."""
        return self._gumbel.num_bytes + self._uniforms.num_bytes

    def begin(self, row: int, rollout: int, sample: int) -> None:
        """Assign a sample to `row`.

        Raises:
            ValueError: An id does not fit into 64 bits (signed).
        """
        for name, value in (("rollout", rollout), ("sample", sample)):
            check(-(1 << 63) <= value < 1 << 63, name, "must fit into 64 bits", value)
        for ring in (self._gumbel, self._uniforms):
            ring.begin(row, rollout, sample)

    def keys(self, rows: Sequence[int], first: Sequence[int], offsets_Bq: Ints) -> NoiseKeys:
        """Return the keys of the positions first[i] + offsets_Bq[i] of row rows[i], in this order.

        Args:
            rows: Rows.
            first: Absolute position of offset 0 of each row.
            offsets_Bq: Offsets; (1, q) if the rows share them.
        """
        ids_B21 = np.array([self._gumbel.ids(row) for row in rows])[..., None]
        positions_Bq = np.array(first)[:, None] + offsets_Bq
        rollouts_Bq, samples_Bq = (np.broadcast_to(ids_B21[:, i], positions_Bq.shape) for i in range(2))
        return NoiseKeys(rollouts_Bq.ravel(), samples_Bq.ravel(), positions_Bq.ravel())

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        for ring in (self._gumbel, self._uniforms):
            ring.move(source, target)

    def end(self, row: int) -> None:
        """Release `row`."""
        for ring in (self._gumbel, self._uniforms):
            ring.end(row)

    def at(self, rows: Sequence[int], first: Sequence[int], count: int) -> Tensor:
        """Return the Gumbel noise of `count` positions of each row, (len(rows), count, V).

        Row rows[i] starts at the absolute position first[i]. No row may be given twice.
        """
        return self._gumbel.at(rows, first, count)

    def uniforms(self, rows: Sequence[int], first: Sequence[int], count: int) -> Tensor:
        """Return the uniforms of rejection sampling, (len(rows), count, 2), float64; see `at`."""
        return self._uniforms.at(rows, first, count)


class _NoiseRing:
    """Ring of consecutive positions for each row; a request takes less than half of it at once."""

    def __init__(
        self, make: _Make, shape: tuple[int, int, int], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Allocate the ring; `shape` is (rows, positions in a ring, W)."""
        rows, self._ring, self._width = shape
        self._make, self._device = make, torch.device(device)
        self._ids: list[tuple[int, int] | None] = [None] * rows
        self._kept = [range(0)] * rows  # the positions in each ring
        self._ring_index = list(range(rows))  # rows move by exchanging their rings
        self._shape, self._dtype = (rows * self._ring, self._width), dtype
        self._allocated: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._allocated is None else self._allocated.numel() * self._allocated.itemsize

    @property
    def _values(self) -> Tensor:
        """The ring, allocated when it is first used."""
        if self._allocated is None:
            with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
                self._allocated = torch.empty(self._shape, device=self._device, dtype=self._dtype)
        return self._allocated

    def ids(self, row: int) -> tuple[int, int]:
        """Return rollout and sample of a row."""
        found = self._ids[self._ring_index[row]]
        if found is None:
            raise ValueError(f"row {row} has no sample: call begin before requesting its noise")
        return found

    def begin(self, row: int, rollout: int, sample: int) -> None:
        self._ids[self._ring_index[row]] = (rollout, sample)
        self._kept[self._ring_index[row]] = range(0)

    def move(self, source: int, target: int) -> None:
        index = self._ring_index
        index[source], index[target] = index[target], index[source]
        self.end(source)

    def end(self, row: int) -> None:
        self._ids[self._ring_index[row]] = None
        self._kept[self._ring_index[row]] = range(0)

    def at(self, rows: Sequence[int], first: Sequence[int], count: int) -> Tensor:
        half = self._ring // 2 - 1
        if count > half:
            starts = range(0, count, half)
            parts = [self.at(rows, [f + s for f in first], min(half, count - s)).clone() for s in starts]
            return torch.cat(parts, dim=1)
        self._compute_missing(rows, first, count)
        if len(rows) == 1:
            offset = first[0] % self._ring
            if offset + count <= self._ring:
                return self._values.narrow(0, self._ring_index[rows[0]] * self._ring + offset, count)[None]
        places_B1 = np.array([[self._ring_index[row]] for row in rows])
        offsets_Bm = (np.array(first)[:, None] + np.arange(count)) % self._ring
        index = to_device((places_B1 * self._ring + offsets_Bm).ravel(), self._device)
        return self._values.index_select(0, index).view(len(rows), count, self._width)

    def _compute_missing(self, rows: Sequence[int], first: Sequence[int], count: int) -> None:
        """Compute what the ring lacks of the requested positions, and the next ones up to `_at_once` numbers.

        The fewer rows lack something, the more positions ahead: a call has a cost of its own.
        """
        missing: list[int] = []
        needed = 0
        for row, start in zip(rows, first, strict=True):
            index = self._ring_index[row]
            kept = self._kept[index]
            if not kept.start <= start <= kept.stop + 1:  # a drafter begins one position later than its step
                kept = self._kept[index] = range(start, start)
            if kept.stop < start + count:
                self.ids(row)
                missing.append(index)
                needed = max(needed, start + count - kept.stop)
        if not missing:
            return
        ahead = min(self._ring // 2, max(needed, self._at_once // (len(missing) * self._width)))
        rows_at_once = max(1, self._at_once // (ahead * self._width))
        for i in range(0, len(missing), rows_at_once):
            self._fill(missing[i : i + rows_at_once], ahead)

    @property
    def _at_once(self) -> int:
        return _AT_ONCE_CUDA if self._device.type == "cuda" else _AT_ONCE

    def _fill(self, ring_indices: Sequence[int], ahead: int) -> None:
        """Compute so many positions after the kept ones of each ring."""
        ids = [numbers for index in ring_indices if (numbers := self._ids[index])]
        rollouts: Ids
        samples: Ids
        if len(ids) == 1:
            rollouts, samples = ids[0]
        else:
            rollouts, samples = to_device(ids, self._device).unbind(1)
        starts_B1 = np.array([[self._kept[index].stop] for index in ring_indices])
        places_B1 = np.array(ring_indices)[:, None] * self._ring
        count = max(1, self._at_once // (len(ids) * self._width))
        for offset in range(0, ahead, count):
            positions_Bm = starts_B1 + np.arange(offset, min(ahead, offset + count))
            made = self._make(rollouts, samples, to_device(positions_Bm, self._device))
            places = to_device((places_B1 + positions_Bm % self._ring).ravel(), self._device)
            self._values.index_copy_(0, places, made.view(-1, self._width))
        for index in ring_indices:
            kept = self._kept[index]
            stop = kept.stop + ahead
            self._kept[index] = range(max(kept.start, stop - self._ring), stop)
