"""Tests weights through shared memory: read whole or not at all, and the last good ones are kept."""

import threading
import time

import pytest
import torch

from aedit.spec_rollout.training import SharedSlots, SlotLayout, publishing

FORMS = {"fc.weight": torch.zeros(3, 5), "norm": torch.zeros(7, dtype=torch.bfloat16)}


def both_ends(like=None):
    """Return the slots as the writer and as the reader have them."""
    layout = SlotLayout.of(like or FORMS)
    memory = memoryview(bytearray(layout.num_bytes))
    return SharedSlots(layout, memory), SharedSlots(layout, memory)


def numbers(seed):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=rng).to(t.dtype) for name, t in FORMS.items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def slot_of(slots, number):
    return slots._slot(number)


def test_what_is_published_is_what_is_read():
    writer, reader = both_ends()
    assert reader.newest() is None
    for n in range(1, 6):
        assert writer.publish(numbers(n), version=10 * n) == n
        found = reader.newest(after=n - 1)
        assert (found.number, found.version) == (n, 10 * n)
        assert same(found.tensors, numbers(n))
        assert found.tensors["norm"].dtype == torch.bfloat16


def test_nothing_is_read_twice():
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    writer.publish(numbers(2), 1)
    assert reader.newest(after=1).number == 2
    assert reader.newest(after=2) is None
    assert reader.newest(after=3) is None


def test_what_was_read_stays_when_the_slot_is_used_again():
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    found = reader.newest()
    for n in (2, 3, 4):
        writer.publish(numbers(n), 1)
    assert same(found.tensors, numbers(1))


def test_a_writer_that_dies_in_the_middle_has_published_nothing(monkeypatch):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    monkeypatch.setattr(publishing, "slot_checksum", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.publish(numbers(2), 1)
    monkeypatch.undo()
    assert same(reader.newest().tensors, numbers(1))
    assert writer.publish(numbers(3), 1) == 2
    assert same(reader.newest(after=1).tensors, numbers(3))


def overtaken_once(writer, monkeypatch, publications):
    """Let the writer publish `publications` times between the reader's copy and its second check."""
    real, calls = publishing.memory_fence, []

    def fence():
        real()
        calls.append(None)
        if len(calls) == 2:
            for n in range(publications):
                writer.publish(numbers(100 + n), 1)

    monkeypatch.setattr(publishing, "memory_fence", fence)


def test_a_slot_that_is_overwritten_while_it_is_copied_is_not_taken(monkeypatch):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    overtaken_once(writer, monkeypatch, publications=2)
    assert reader.newest() is None
    assert (reader.torn, reader.corrupt) == (1, 0)
    found = reader.newest()
    assert found.number == 3
    assert same(found.tensors, numbers(101))


def test_a_publication_into_the_other_slot_disturbs_no_reader(monkeypatch):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    overtaken_once(writer, monkeypatch, publications=1)
    assert same(reader.newest().tensors, numbers(1))


@pytest.mark.parametrize("byte", [0, 59, 64, 77])
def test_one_changed_byte_is_seen_and_the_next_publication_is_taken(byte):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    slot_of(writer, 1)[byte] += 1
    assert reader.newest() is None
    assert reader.newest() is None
    assert (reader.corrupt, reader.torn) == (1, 0), "it is not copied again at every step"
    writer.publish(numbers(2), 1)
    assert same(reader.newest().tensors, numbers(2))


def test_a_mixture_of_two_publications_is_seen():
    writer, reader = both_ends({"w": torch.zeros(4096)})
    writer.publish({"w": torch.ones(4096)}, 1)
    slot_of(writer, 1)[:8192] = 0
    assert reader.newest() is None
    assert reader.corrupt == 1


def test_the_right_bytes_under_a_wrong_version_are_not_taken():
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    writer._slot_header(1)[publishing.VERSION] = 2
    assert reader.newest() is None
    assert reader.corrupt == 1


def test_an_index_without_a_slot_is_not_followed():
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    writer._head[publishing.NEWEST] = 77
    assert reader.newest() is None
    assert reader.torn == 1


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": torch.zeros(3, 5)}, "expected fc.weight, norm, got fc.weight"),
        (FORMS | {"norm": torch.zeros(7)}, "norm must be torch.bfloat16"),
        (FORMS | {"fc.weight": torch.zeros(5, 3)}, r"fc.weight must be torch.float32 \(3, 5\)"),
    ],
)
def test_tensors_of_another_kind_are_refused_before_anything_is_written(tensors, message):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    writer.publish(numbers(2), 1)
    with pytest.raises(ValueError, match=message):
        writer.publish(tensors, 1)
    assert same(reader.newest().tensors, numbers(2))
    assert slot_of(reader, 1).any()


def test_too_little_memory_is_refused():
    with pytest.raises(ValueError, match="slots need 12,288 bytes of shared memory, got 100"):
        SharedSlots(SlotLayout.of(FORMS), memoryview(bytearray(100)))


def test_whoever_reads_while_another_thread_writes_never_sees_a_mixture():
    writer, reader = both_ends({"w": torch.zeros(100_000)})
    stop = threading.Event()

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            writer.publish({"w": torch.full((100_000,), float(n))}, n)
            stop.wait(1e-3 * (n % 3))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, give_up_s = 0, time.monotonic() + 60
        while seen < 300 and time.monotonic() < give_up_s:
            found = reader.newest(after=seen)
            if found is not None:
                seen = found.number
                assert torch.equal(found.tensors["w"], torch.full((100_000,), float(found.version)))
                assert found.version == found.number
    finally:
        stop.set()
        thread.join(10)
    assert seen > 0
    assert reader.corrupt == 0


class Dying(dict):
    """Tensors whose writer dies after it has copied the first of them."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.looks = 0

    def __getitem__(self, name):
        self.looks += 1
        if self.looks == 2 * len(self):  # looked through once before
            raise ZeroDivisionError
        return super().__getitem__(name)


def test_a_slot_whose_writer_is_in_the_middle_of_it_is_torn_and_not_corrupt(monkeypatch):
    writer, reader = both_ends()
    writer.publish(numbers(1), 1)
    real, calls = publishing.memory_fence, []

    def fence():
        real()
        calls.append(None)
        if len(calls) == 2:
            writer.publish(numbers(2), 1)
            with pytest.raises(ZeroDivisionError):
                writer.publish(Dying(numbers(3)), 1)

    monkeypatch.setattr(publishing, "memory_fence", fence)
    assert reader.newest() is None
    assert (reader.torn, reader.corrupt) == (1, 0)
    assert same(reader.newest().tensors, numbers(2))
