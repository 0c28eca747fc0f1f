"""Selection of samples for training and evaluation, and their packing into rows without padding."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.training.feature_ring import FeatureSample, RingEntry

HELD_OUT_EVERY = 4
"""One of so many groups is held out. A node may begin two a step, and a comparison needs samples of the
present policy."""
HELD_OUT_TOKENS = 4096
EARLY_SHARE, LATE_SHARE = 0.5, 0.25
"""Share of a batch from the previous step: while the current step has no long samples, and afterwards."""


def is_held_out_entry(entry: RingEntry) -> bool:
    """Return true if the sample is held out of training, with all others of its group.

    Answers to one prompt are alike: a drafter that learned some of them is better at the others than at text
    that it has not seen.
    """
    return entry.group % HELD_OUT_EVERY == 0


def newest_held_out(entries: Sequence[RingEntry], num_tokens: int = HELD_OUT_TOKENS) -> list[RingEntry]:
    """Return the newest held-out samples until they have `num_tokens` tokens together."""
    return newest_samples(list(filter(is_held_out_entry, entries)), num_tokens)


def newest_samples(entries: Sequence[RingEntry], num_tokens: int) -> list[RingEntry]:
    """Return the newest samples until they have `num_tokens` tokens together."""
    return _until(sorted(entries, key=lambda entry: -entry.serial), num_tokens)


def one_step_off(entries: Sequence[RingEntry], uses: Mapping[int, int], num_tokens: int) -> list[RingEntry]:
    """Return training samples of at least `num_tokens` tokens together, if there are as many.

    The samples of a step that finish first are its short ones. So half of a batch comes from the previous
    step, whose long samples are available, until the current step has a sample as long as the 90th percentile
    of the previous one; then a quarter (one-step-off sampling, arXiv:2511.16665). Both parts take the least
    used samples, long ones first among equals. What one part lacks comes from the other.

    Args:
        entries: Available samples.
        uses: Number of uses by serial number.
        num_tokens: Size of the batch in tokens.
    """
    training_entries = [entry for entry in entries if not is_held_out_entry(entry)]
    newest = max((entry.step for entry in training_entries), default=0)
    now = [entry for entry in training_entries if entry.step == newest]
    before = [entry for entry in training_entries if entry.step < newest]

    def order(entry: RingEntry) -> tuple[int, int, int]:
        return uses.get(entry.serial, 0), -entry.step, -entry.num_tokens

    now, before = sorted(now, key=order), sorted(before, key=order)
    from_before = _until(before, math.ceil(num_tokens * _share(now, before)))
    from_now = _until(now, num_tokens - _tokens(from_before))
    missing = num_tokens - _tokens(from_before) - _tokens(from_now)
    return from_before + from_now + _until(before[len(from_before) :], missing)


def _share(now: Sequence[RingEntry], before: Sequence[RingEntry]) -> float:
    if not before:
        return 0.0
    newest = max(entry.step for entry in before)
    lengths = sorted(entry.num_tokens for entry in before if entry.step == newest)
    long = lengths[math.ceil(0.9 * len(lengths)) - 1]
    return LATE_SHARE if max(entry.num_tokens for entry in now) >= long else EARLY_SHARE


def _until(entries: Sequence[RingEntry], num_tokens: int) -> list[RingEntry]:
    """Return the first entries until they have `num_tokens` tokens."""
    chosen: list[RingEntry] = []
    for entry in entries:
        if num_tokens <= 0:
            break
        chosen.append(entry)
        num_tokens -= entry.num_tokens
    return chosen


def _tokens(entries: Sequence[RingEntry]) -> int:
    return sum(entry.num_tokens for entry in entries)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Pairs of a few samples, one sample after the other.

    Pair t is the feature of position t and the token at t + 1. From it a drafter predicts the token at t + 2
    and the feature of t + 1, which is the next pair's.
    """

    features_Pw: Tensor
    tokens_P: Tensor
    """int64: token after each feature."""
    targets_P: Tensor
    """int64: token after `tokens_P`, where there is one."""
    positions_P: Tensor
    """int64: from 0 in each segment."""
    segments_P: Tensor
    """int64: segment (piece of a sample) of each pair; pairs attend to their own segment only."""
    counts_P: Tensor
    """Bool: the pair is trained on. The last pair of a segment never is: what it predicts is not in the row.
    """
    versions_P: Tensor
    """int64: version of the policy that computed the features."""

    @property
    def num_counted(self) -> int:
        """Return the number of pairs that are trained on."""
        return int(self.counts_P.sum())

    def to(self, device: torch.device) -> "PackedRow":
        """Return the row on `device`."""
        return PackedRow(*(getattr(self, part.name).to(device, non_blocking=True) for part in fields(self)))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Pairs begin .. end - 1 of a sample; the pairs from begin + counts_from on are trained on."""

    sample: FeatureSample
    begin: int
    end: int
    counts_from: int

    @property
    def num_pairs(self) -> int:
        return self.end - self.begin


def pack_samples(
    samples: Sequence[FeatureSample], num_pairs: int, *, response_only: bool = True
) -> list[PackedRow]:
    """Return rows of at most `num_pairs` pairs.

    The longest pieces are placed first, each in the first row where it fits. A longer sample is cut. Each
    piece but the first begins with a quarter of a row of earlier pairs as context, so that every pair counts
    once.

    Args:
        samples: Samples.
        num_pairs: Upper limit of pairs per row.
        response_only: Pairs that predict a token of the prompt are context only.

    Raises:
        ValueError: `num_pairs` is below 4.
    """
    if num_pairs < 4:
        raise ValueError(f"a row must have at least 4 pairs, got {num_pairs}")
    pieces = [piece for sample in samples for piece in _pieces(sample, num_pairs, response_only)]
    rows: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_pairs):
        fits = (row for row in rows if sum(p.num_pairs for p in row) + piece.num_pairs <= num_pairs)
        row = next(fits, None)
        if row is None:
            rows.append([piece])
        else:
            row.append(piece)
    return [_packed(row) for row in rows]


def visible(segments_P: Tensor, at_C: Tensor, distance: int = 0) -> Tensor:
    """Return which pairs those at `at_C` attend to, bool (C, P).

    They are the pairs of their own segment that are at least `distance` before them.
    """
    pairs_P = torch.arange(len(segments_P), device=segments_P.device)
    is_before_CP = pairs_P <= at_C[:, None] - distance
    return is_before_CP & (segments_P == segments_P[at_C][:, None])


def _pieces(sample: FeatureSample, num_pairs: int, response_only: bool) -> Iterator[_Piece]:
    """Yield the pieces of a sample that contain pairs to train on."""
    all_pairs = len(sample.features_MF)
    counts_from = max(sample.num_prompt - 2, 0) if response_only else 0
    begin = 0 if all_pairs <= num_pairs else max(0, counts_from - num_pairs // 4)
    while counts_from < all_pairs - 1:
        end = min(all_pairs, begin + num_pairs)
        yield _Piece(sample, begin, end, counts_from - begin)
        counts_from = end - 1
        begin = max(0, counts_from - num_pairs // 4)


def _packed(pieces: Sequence[_Piece]) -> PackedRow:
    lengths = torch.tensor([piece.num_pairs for piece in pieces])
    spans = [(piece.sample.tokens_N, piece) for piece in pieces]
    positions_P = torch.cat([torch.arange(piece.num_pairs) for piece in pieces])
    first_P = torch.tensor([piece.counts_from for piece in pieces]).repeat_interleave(lengths)
    last_P = (lengths - 1).repeat_interleave(lengths)
    # The last pair of a sample has no target: 0.
    return PackedRow(
        features_Pw=torch.cat([piece.sample.features_MF[piece.begin : piece.end] for piece in pieces]),
        tokens_P=torch.cat([tokens[piece.begin + 1 : piece.end + 1] for tokens, piece in spans]),
        targets_P=torch.cat(
            [F.pad(tokens, (0, 1))[piece.begin + 2 : piece.end + 2] for tokens, piece in spans]
        ),
        positions_P=positions_P,
        segments_P=torch.arange(len(pieces)).repeat_interleave(lengths),
        counts_P=(positions_P >= first_P) & (positions_P < last_P),
        versions_P=torch.tensor([piece.sample.version for piece in pieces]).repeat_interleave(lengths),
    )
