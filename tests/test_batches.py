"""Tests batches that mix samples of this step with the long samples of the step before."""

from aedit.spec_rollout.training.batches import is_held_out_entry, newest_held_out, one_step_off
from aedit.spec_rollout.training.feature_ring import RingEntry


def entry(serial, num_tokens, step):
    return RingEntry(0, 2, 0, num_tokens, 4, step, step, serial, serial // 2, True)


def numbered(lengths, step, first):
    """Return samples of these lengths that are not held out."""
    serials = [serial for serial in range(first, first + 2 * len(lengths) + 8) if serial // 2 % 4]
    return [entry(serial, length, step) for serial, length in zip(serials, lengths, strict=False)]


def lengths_by_step(batch):
    return {step: [e.num_tokens for e in batch if e.step == step] for step in (0, 1, 2)}


LAST = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_half_comes_from_the_long_samples_of_the_step_before_while_this_one_has_only_short_ones():
    batch = one_step_off(numbered(LAST, 1, 1) + numbered([10, 12, 14] * 20, 2, 101), {}, 380)
    found = lengths_by_step(batch)
    assert found[1] == [100, 90]
    assert 190 <= sum(found[2]) < 204
    assert set(found[2]) == {14}


def test_a_quarter_does_once_this_step_has_a_long_one():
    batch = one_step_off(numbered(LAST, 1, 1) + numbered([90, 12, 14] * 20, 2, 101), {}, 380)
    found = lengths_by_step(batch)
    assert found[1] == [100]
    assert sum(found[2]) >= 280


def test_what_was_used_least_comes_first():
    entries = numbered(LAST, 1, 1) + numbered([10] * 30, 2, 101)
    uses, seen = {}, set()
    for _ in range(8):
        for chosen in one_step_off(entries, uses, 240):
            uses[chosen.serial] = uses.get(chosen.serial, 0) + 1
            seen.add(chosen.serial)
    assert seen == {e.serial for e in entries}
    assert max(uses.values()) <= 3


def test_one_part_gives_what_the_other_lacks():
    only_before, only_now = numbered(LAST, 1, 1), numbered(LAST, 2, 101)
    assert len(one_step_off(only_before, {}, 10_000)) == 10
    assert len(one_step_off(only_now, {}, 10_000)) == 10
    few = one_step_off(only_before + numbered([10], 2, 101), {}, 300)
    assert sum(e.num_tokens for e in few) >= 300
    assert one_step_off([], {}, 100) == []


def test_a_step_before_the_last_is_used_when_there_is_nothing_nearer():
    entries = numbered([100] * 4, 0, 1) + numbered([20] * 4, 1, 51) + numbered([5] * 4, 2, 101)
    found = lengths_by_step(one_step_off(entries, {}, 200))
    assert (found[2], found[1], found[0]) == ([5] * 4, [20] * 4, [100])


def test_what_is_held_out_is_never_learned_from():
    entries = [entry(serial, 50, serial // 40) for serial in range(80)]
    batch = one_step_off(entries, {}, 100_000)
    apart = newest_held_out(entries, 100_000)
    assert len(batch) == 60
    assert len(apart) == 20
    assert not {e.group for e in batch} & {e.group for e in apart}
    assert all(is_held_out_entry(e) for e in apart)


def test_the_newest_held_out_samples_judge():
    apart = newest_held_out([entry(serial, 50, 0) for serial in range(80)], 120)
    assert [e.serial for e in apart] == [73, 72, 65]
