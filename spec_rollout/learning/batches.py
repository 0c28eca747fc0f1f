"""Which samples are learned from next, and which are kept apart to judge by."""

import math
from collections.abc import Mapping, Sequence

from aedit.spec_rollout.learning.feature_reader import Entry

HELD_OUT_EVERY = 8
HELD_OUT_TOKENS = 4096
EARLY_SHARE, LATE_SHARE = 0.5, 0.25
"""Of a batch, from the step before: as long as this step has no long samples, and then."""


def is_held_out(entry: Entry) -> bool:
    """Whole samples are kept apart, by their number alone: never learned from by anybody."""
    return entry.serial % HELD_OUT_EVERY == 0


def held_out(entries: Sequence[Entry], num_tokens: int = HELD_OUT_TOKENS) -> list[Entry]:
    """The newest samples nobody learns from, until they have so many tokens together."""
    held_out_entries = sorted(filter(is_held_out, entries), key=lambda entry: -entry.serial)
    return _until(held_out_entries, num_tokens)


def one_step_off(entries: Sequence[Entry], uses: Mapping[int, int], num_tokens: int) -> list[Entry]:
    """Samples of at least `num_tokens` together, if there are so many: some of this step, some of before.

    The samples of a step that come in first are its short ones. So half of a batch comes from the step
    before, of which the long ones are there, until this step has one that is as long as nine in ten of that;
    then a quarter does (one-step-off sampling, arXiv:2511.16665). Both parts take what has been used least
    (`uses` by serial), the long ones first among equals. What one part lacks the other gives.
    """
    training_entries = [entry for entry in entries if not is_held_out(entry)]
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
    """The first of them, until they have so many tokens."""
    chosen: list[Entry] = []
    for entry in entries:
        if num_tokens <= 0:
            break
        chosen.append(entry)
        num_tokens -= entry.num_tokens
    return chosen


def _tokens(entries: Sequence[Entry]) -> int:
    return sum(entry.num_tokens for entry in entries)
