"""Selection of samples for training and for held-out evaluation."""

import math
from collections.abc import Mapping, Sequence

from aedit.spec_rollout.training.feature_reader import Entry

HELD_OUT_EVERY = 8
HELD_OUT_TOKENS = 4096
EARLY_SHARE, LATE_SHARE = 0.5, 0.25
"""Share of a batch from the previous step: while the current step has no long samples, and afterwards."""


def is_held_out_entry(entry: Entry) -> bool:
    """Return true if the sample is held out of training. This depends on its serial number alone."""
    return entry.serial % HELD_OUT_EVERY == 0


def newest_held_out(entries: Sequence[Entry], num_tokens: int = HELD_OUT_TOKENS) -> list[Entry]:
    """Return the newest held-out samples until they have `num_tokens` tokens together."""
    held_out_entries = sorted(filter(is_held_out_entry, entries), key=lambda entry: -entry.serial)
    return _until(held_out_entries, num_tokens)


def one_step_off(entries: Sequence[Entry], uses: Mapping[int, int], num_tokens: int) -> list[Entry]:
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

    def order(entry: Entry) -> tuple[int, int, int]:
        return uses.get(entry.serial, 0), -entry.step, -entry.num_tokens

    now, before = sorted(now, key=order), sorted(before, key=order)
    from_before = _until(before, math.ceil(num_tokens * _share(now, before)))
    from_now = _until(now, num_tokens - _tokens(from_before))
    missing = num_tokens - _tokens(from_before) - _tokens(from_now)
    return from_before + from_now + _until(before[len(from_before) :], missing)


def _share(now: Sequence[Entry], before: Sequence[Entry]) -> float:
    if not before:
        return 0.0
    newest = max(entry.step for entry in before)
    lengths = sorted(entry.num_tokens for entry in before if entry.step == newest)
    long = lengths[math.ceil(0.9 * len(lengths)) - 1]
    return LATE_SHARE if max(entry.num_tokens for entry in now) >= long else EARLY_SHARE


def _until(entries: Sequence[Entry], num_tokens: int) -> list[Entry]:
    """Return the first entries until they have `num_tokens` tokens."""
    chosen: list[Entry] = []
    for entry in entries:
        if num_tokens <= 0:
            break
        chosen.append(entry)
        num_tokens -= entry.num_tokens
    return chosen


def _tokens(entries: Sequence[Entry]) -> int:
    return sum(entry.num_tokens for entry in entries)
