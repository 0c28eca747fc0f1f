"""Tests that the engine's features are kept in a bounded number of bytes and read by another process."""

import mmap
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from aedit.spec_rollout.drafters import RowStart, StepUpdate
from aedit.spec_rollout.training import FeatureReader, FeatureRing, RingShape, RowFeatures
from aedit.spec_rollout.training.feature_ring import SEQUENCE

WIDTH = 6


def made(num_bytes=40_000, dtype=torch.float32, page_tokens=4):
    """Return a ring, its reader, and the bytes."""
    shape = RingShape.within(num_bytes, WIDTH, dtype, page_tokens)
    buffer = bytearray(shape.num_bytes)
    return FeatureRing(buffer, shape), FeatureReader(buffer), buffer


def feature(token, position):
    """Return a feature that encodes its token and position."""
    return torch.full((WIDTH,), float(token)) + torch.arange(WIDTH) * 0.125 + position * 1000


def features_of(tokens):
    made = [feature(token, at) for at, token in enumerate(tokens[:-1])]
    return torch.stack(made) if made else torch.zeros(0, WIDTH)


def put(ring, tokens, *, version=1, num_prompt=2, finished=True):
    sample = ring.begin(tokens[0], num_prompt, version)
    kept = ring.append(sample, torch.tensor(tokens[1:]), features_of(tokens))
    ring.end(sample, finished)
    return kept


def tokens_of(length, first=0):
    return [(first + 3 * i) % 61 for i in range(length)]


def texts(reader):
    return [reader.read(entry).tokens_N.tolist() for entry in reader.entries()]


def test_what_was_written_is_read():
    ring, reader, _ = made()
    for length in (2, 4, 5, 6, 23):
        put(ring, tokens_of(length, length), num_prompt=length - 1, version=7, finished=length > 4)
    for entry, length in zip(reader.entries(), (2, 4, 5, 6, 23), strict=True):
        sample = reader.read(entry)
        assert entry.num_tokens == length
        assert sample.tokens_N.tolist() == tokens_of(length, length)
        assert torch.equal(sample.features_MF, features_of(tokens_of(length, length)))
        assert (sample.num_prompt, sample.version, sample.finished) == (length - 1, 7, length > 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_are_kept_in_the_dtype_that_was_asked_for(dtype):
    ring, reader, _ = made(dtype=dtype)
    put(ring, tokens_of(9))
    sample = reader.read(reader.entries()[0])
    assert torch.equal(sample.features_MF, features_of(tokens_of(9)).to(dtype))


class Rows:
    """Stand-in for the engine: rows whose tokens come from a list, with features that encode them."""

    def __init__(self, sink):
        self.sink, self.rows, self.texts = sink, [], []

    def begin(self, *prompts, version=1):
        begun = []
        for tokens in prompts:
            begun.append(RowStart(len(self.rows), -1, list(tokens), features_of(tokens), len(tokens)))
            self.rows.append(list(tokens))
        self.sink.begin(begun, version)

    def step(self, *emitted, version=1):
        """Write one step; the features share one piece of memory, which the next step uses again."""
        longest = max(map(len, emitted))
        features = torch.zeros(len(emitted), longest, WIDTH)
        for row, tokens in enumerate(emitted):
            for i, token in enumerate(tokens):
                features[row, i] = feature(self.rows[row][-1], len(self.rows[row]) - 1)
                self.rows[row].append(token)
        self.sink.update(StepUpdate(emitted, features), version)
        features.fill_(float("nan"))

    def end(self, row, finished=True):
        self.texts.append(self.rows[row])
        self.sink.end(row, finished)
        last = len(self.rows) - 1
        if row != last:
            self.sink.move(last, row)
            self.rows[row] = self.rows[last]
        self.rows.pop()


@pytest.mark.parametrize("flush_steps", [1, 2, 32])
def test_accepted_tokens_keep_their_own_features_when_rows_move(flush_steps):
    ring, reader, _ = made()
    engine = Rows(RowFeatures(ring, flush_steps=flush_steps))
    engine.begin([5, 6, 7], [5, 6, 7], [9])
    engine.step([1], [2, 3, 4], [8, 8])
    engine.step([11, 12], [13], [14])
    engine.end(0)
    engine.step([15], [16, 17])
    engine.begin([20, 21])
    engine.step([22], [23], [24, 25, 26])
    for row in (1, 0, 0):
        engine.end(row)
    assert sorted(texts(reader)) == sorted(engine.texts)
    for entry in reader.entries():
        sample = reader.read(entry)
        assert torch.equal(sample.features_MF, features_of(sample.tokens_N.tolist()))


def groups_of(prompts):
    """Return the groups of samples of these prompts that an engine begins together."""
    ring, reader, _ = made(num_bytes=400_000)
    sink = RowFeatures(ring)
    for row, prompt in enumerate(prompts):
        tokens = [*prompt, 9, row]
        start = RowStart(row, row, tokens, features_of(tokens)[:-1] if len(tokens) > 1 else None, len(prompt))
        sink.begin([start], 1)
        sink.end(row, True)
    return [entry.group for entry in reader.entries()]


def test_answers_to_one_prompt_are_one_group():
    assert groups_of([[1, 2], [1, 3], [1, 2], [1, 2]]) == [0, 1, 0, 0]
    assert groups_of([[1], [1], [1]]) == [0, 1, 2]  # the first token of any text is no prompt
    assert groups_of([[1, 2]] * 130) == [0] * 64 + [1] * 64 + [2] * 2


def test_a_prompt_that_returns_in_a_later_step_is_another_group():
    ring, reader, _ = made()
    for version in (1, 1, 2, 2):
        sample = ring.begin(1, 2, version, prompt=(1, 2))
        ring.append(sample, torch.tensor([2, 3]), features_of([1, 2, 3]))
        ring.end(sample, True)
    assert [entry.group for entry in reader.entries()] == [0, 0, 1, 1]


def test_a_sample_can_be_learned_from_before_it_is_finished():
    ring, reader, _ = made()
    engine = Rows(RowFeatures(ring, flush_steps=2))
    engine.begin([5, 6, 7])
    engine.step([1])
    assert reader.entries() == []
    engine.step([2])
    (entry,) = reader.entries()
    engine.step([3, 4])
    engine.step([5])
    assert reader.read(entry).tokens_N.tolist() == [5, 6, 7, 1, 2]
    (later,) = reader.entries()
    assert reader.read(later).tokens_N.tolist() == [5, 6, 7, 1, 2, 3, 4, 5]
    assert (later.num_prompt, later.finished) == (3, False)


def test_a_row_that_changes_its_policy_must_begin_again():
    ring, _, _ = made()
    engine = Rows(RowFeatures(ring))
    engine.begin([5, 6, 7])
    with pytest.raises(ValueError, match="began with version 1 of the policy and goes on with 2"):
        engine.step([1], version=2)


def test_a_full_ring_gives_up_the_oldest_steps_and_then_the_shortest_samples():
    ring, reader, buffer = made(num_bytes=4_000)
    pages = ring.shape.num_pages
    put(ring, tokens_of(4 * (pages // 2) + 1, 1), version=1)
    for first in range(2, 2 + pages - pages // 2):
        put(ring, tokens_of(5, first), version=2)
    assert ring.status()["evicted"] == 0
    put(ring, tokens_of(13, 50), version=2)
    assert {entry.version for entry in reader.entries()} == {2}
    while ring.status()["evicted"] == 1:
        put(ring, tokens_of(9, 51), version=2)
    kept = [entry.num_tokens for entry in reader.entries()]
    assert 13 in kept
    assert kept.count(5) < pages - pages // 2
    assert len(buffer) == ring.status()["bytes"] <= 4_000


def test_however_much_comes_the_bytes_stay_the_same_and_every_sample_read_is_whole():
    ring, reader, buffer = made(num_bytes=6_000)
    random = np.random.default_rng(0)
    open_samples = []
    for _ in range(300):
        if len(open_samples) < 5:
            text = tokens_of(2 + int(random.integers(60)), int(random.integers(61)))
            sample = ring.begin(text[0], 1, int(random.integers(1, 3)))
            if sample is not None:
                open_samples.append((sample, text, 1))
        at = int(random.integers(len(open_samples)))
        sample, text, done = open_samples.pop(at)
        more = min(len(text), done + int(random.integers(1, 9)))
        ok = ring.append(sample, torch.tensor(text[done:more]), features_of(text)[done - 1 : more - 1])
        if more < len(text) and ok:
            open_samples.append((sample, text, more))
        else:
            ring.end(sample, True)
        assert ring.num_used_bytes <= len(buffer) <= 6_000
        for entry in reader.entries():
            read = reader.read(entry)
            assert torch.equal(read.features_MF, features_of(read.tokens_N.tolist()))
    assert ring.status()["evicted"] > 10


def test_a_sample_that_fills_all_is_given_up_and_harms_no_other():
    ring, reader, _ = made(num_bytes=4_000)
    put(ring, tokens_of(4 * ring.shape.num_pages + 2))
    assert reader.entries() == []
    assert ring.status()["given_up"] == 1
    assert put(ring, tokens_of(6))
    assert texts(reader) == [tokens_of(6)]


def test_what_is_taken_away_while_it_is_read_is_not_read():
    ring, reader, _ = made(num_bytes=4_000)
    put(ring, tokens_of(20))
    (entry,) = reader.entries()
    assert reader.read(entry) is not None
    for first in range(60):
        put(ring, tokens_of(21, first))
    assert reader.read(entry) is None


def test_torn_bytes_are_never_read():
    ring, reader, buffer = made()
    put(ring, tokens_of(20))
    (entry,) = reader.entries()
    at = bytes(buffer).index(feature(tokens_of(20)[7], 7).numpy().tobytes())
    buffer[at] ^= 1
    assert reader.read(entry) is None
    buffer[at] ^= 1
    assert reader.read(entry) is not None


def test_an_entry_that_is_being_changed_is_nobodys():
    ring, reader, _ = made()
    put(ring, tokens_of(20))
    ring._views.entries[reader.entries()[0].slot, SEQUENCE] += 1
    assert reader.entries() == []


def test_what_is_older_than_two_steps_goes():
    ring, reader, _ = made()
    for version in range(1, 5):
        if version > 1:
            ring.begin_step()
        put(ring, tokens_of(5), version=version)
    assert [entry.version for entry in reader.entries()] == [2, 3, 4]


def test_a_new_policy_begins_a_step_when_nobody_says_so():
    ring, reader, _ = made()
    for version in (1, 1, 2, 3, 3):
        put(ring, tokens_of(5), version=version)
    assert [entry.step for entry in reader.entries()] == [0, 0, 1, 2, 2]


def test_steps_that_are_said_are_counted_once():
    ring, reader, _ = made()
    for version in (1, 2, 2):
        ring.begin_step()
        put(ring, tokens_of(5), version=version)
    assert [entry.step for entry in reader.entries()] == [1, 2, 3]


READER = """
import mmap, sys
from aedit.spec_rollout.training.feature_ring import FeatureReader
with open(sys.argv[1], "r+b") as file:
    reader = FeatureReader(mmap.mmap(file.fileno(), 0))
print("ready", flush=True)
whole = gone = 0
while whole < 300:
    for entry in reader.entries():
        sample = reader.read(entry)
        if sample is None:
            gone += 1
            continue
        tokens, features = sample.tokens_N, sample.features_MF
        assert (features[:, 0] % 1000).tolist() == tokens[:-1].tolist(), "a torn sample was read"
        whole += 1
print(whole, gone)
"""


def test_another_process_reads_whole_samples_while_they_come_and_go(tmp_path):
    shape = RingShape.within(30_000, WIDTH, torch.float32, 4)
    shared = tmp_path / "ring"
    shared.write_bytes(bytes(shape.num_bytes))
    with shared.open("r+b") as file:
        ring = FeatureRing(mmap.mmap(file.fileno(), 0), shape)
    texts = [(tokens_of(n), torch.tensor(tokens_of(n)[1:]), features_of(tokens_of(n))) for n in range(2, 50)]
    process = subprocess.Popen([sys.executable, "-c", READER, str(shared)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        give_up_at = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < give_up_at:
            for tokens, rest, features in texts:
                sample = ring.begin(tokens[0], 1, 1)
                ring.append(sample, rest, features)
                ring.end(sample, True)
        assert process.poll() == 0
        assert int(process.stdout.read().split()[0]) >= 300
    finally:
        process.kill()
        process.communicate()


def test_bytes_that_hold_nothing_are_refused():
    with pytest.raises(ValueError, match="got 100 bytes"):
        RingShape.within(100, WIDTH, torch.float32)
    with pytest.raises(ValueError, match="features must be in one of"):
        RingShape.within(10_000, WIDTH, torch.int8)
    with pytest.raises(ValueError, match="does not contain a feature ring"):
        FeatureReader(bytearray(4_000))
    shape = RingShape.within(10_000, WIDTH, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        FeatureRing(bytearray(100), shape)
    ring, _, _ = made()
    with pytest.raises(ValueError, match="needs one feature per token"):
        ring.append(ring.begin(1, 1, 1), torch.tensor([1, 2]), torch.zeros(1, WIDTH))
