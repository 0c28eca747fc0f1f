"""Tests merges of several units at once, and merges while a snapshot is being written.

A real ledger with a journal on the disk, and the hub's own threads; the clock stands still.
"""

import threading
import tracemalloc
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from kit.hub_machine import AVERAGE, config, joiner, picture, plan
from kit.leading_hub import leading_hub
from kit.waiting import until

from aedit.async_sgd.hub import Hub
from aedit.async_sgd.journal import Journal, Ledger, Store, snapshot
from aedit.async_sgd.journal.snapshot import read_snapshot
from aedit.async_sgd.rules import Merged, OuterConfig, Push
from aedit.async_sgd.service import HubWorker
from aedit.proto.codecs import codec
from aedit.types import Layout, TensorLayout, UnitLayout

NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)


def layout_of(units, numel):
    return Layout(tuple(UnitLayout(f"u{i}", (TensorLayout("w", (numel,)),)) for i in range(units)))


@dataclass
class Book:
    """A hub of equal units with its ledger; `nodes` members push."""

    folder: object
    units: int = 4
    numel: int = 5000
    nodes: int = 1
    outer: object = AVERAGE
    events: list = field(default_factory=list)

    def __post_init__(self):
        self.folder.mkdir(exist_ok=True)
        self.ledger = Ledger(
            Hub(plan(config(), self.outer)),
            Journal(self.folder, 1, fsync=False),
            Store(self.folder, fsync=False),
            clock=lambda: 100.0,
        )
        join_all(self.ledger, self.nodes, layout_of(self.units, self.numel))

    @property
    def hub(self):
        return self.ledger.hub

    def worker(self, threads):
        event = lambda *args, **values: self.events.append((*args, values))  # noqa: E731
        worker = HubWorker(self.ledger, event, snapshot_bytes=2**40, mergers=threads)
        worker.start()
        return worker

    def versions(self):
        return [unit.version for unit in self.hub.state.units.values()]


def join_all(ledger, nodes, layout):
    for i in range(nodes):
        with ledger.lock:
            ledger.commit(ledger.hub.join(joiner(f"node{i}", layout=layout), ledger.clock()))
    for unit in range(len(layout.units)):
        push(ledger, unit, 0)
    with ledger.lock:
        for record in ledger.hub.tick(ledger.clock()):
            ledger.commit([record], ledger.hub.compute(record))


def push(ledger, unit, node, scale=1.0):
    """Accept the node's next push of the unit: noise, or ones as the first anchor."""
    with ledger.lock:
        state = ledger.hub.state
        base, seq = state.units[unit].version, state.members[node].received.get(unit, 0) + 1
        numel = state.layout.units[unit].numel
        x = np.random.default_rng([unit, node, seq]).standard_normal(numel, np.float32) * np.float32(scale)
        x = x if base else np.ones(numel, np.float32)
        name = "bf16" if base else "fp32"
        data = codec(name).encode(x)
        values = ledger.store_payload(name, numel, zlib.crc32(data), data)
        norms = (float(np.linalg.norm(x)),)
        made = Push(
            node=node,
            unit=unit,
            seq=seq,
            base=base,
            steps=10 if base else 0,
            tokens=0,
            values=values,
            norms=norms,
        )
        ledger.commit(ledger.hub.offer(made, ledger.clock()))


def trained(folder, threads, meet=None):
    """Return the hub after six rounds of pushes of all units by three nodes."""
    book = Book(folder, units=6, numel=150_000, nodes=3, outer=NESTEROV)
    compute, meeting = book.hub.compute, meet or (lambda record: None)
    book.hub.compute = lambda record: (meeting(record), compute(record))[1]
    worker = book.worker(threads)
    for turn in range(6):
        for unit in range(6):
            for node in range(3):
                push(book.ledger, unit, node)
        worker.wake()
        wanted = [1 + 3 * (turn + 1)] * 6
        until(lambda wanted=wanted: book.versions() == wanted or worker.failure, "merges")
    worker.stop()
    assert not worker.failure
    return book.hub


def test_merges_on_four_threads_give_the_bits_of_one_thread(tmp_path):
    together, first = threading.Barrier(4, timeout=20), threading.local()

    def meet(record):  # the first merge of each thread begins when four are under way
        if isinstance(record, Merged) and not hasattr(first, "done"):
            first.done = True
            together.wait()

    one, four = trained(tmp_path / "one", 1), trained(tmp_path / "four", 4, meet)
    assert picture(one)[1] == picture(four)[1]
    assert not together.broken


def test_a_hub_merges_as_many_units_at_a_time_as_it_was_told(tmp_path):
    with leading_hub(tmp_path, "threads = 3") as hub:
        ledger, together = hub.leading.ledger, threading.Barrier(3, timeout=20)
        join_all(ledger, 1, layout_of(3, 4096))
        compute = ledger.hub.compute
        ledger.hub.compute = lambda record: (isinstance(record, Merged) and together.wait(), compute(record))[
            1
        ]
        for unit in range(3):
            push(ledger, unit, 0)
        hub.leading.engine.wake()
        until(lambda: [unit.version for unit in ledger.hub.state.units.values()] == [2, 2, 2], "merges")
        ledger.hub.compute = compute
        assert not hub.leading.failure


# --- while a snapshot is being written


class SlowDisk:
    """Writes a unit of a snapshot only when told."""

    def __init__(self, monkeypatch):
        self.begun, self.written = [], []
        self._go, self._write = threading.Semaphore(0), snapshot._write_unit
        monkeypatch.setattr(snapshot, "_write_unit", self._wait_and_write)

    def _wait_and_write(self, out, unit):
        self.begun.append(unit.index)
        assert self._go.acquire(timeout=30)
        self._write(out, unit)
        self.written.append(unit.index)

    def let(self, count):
        """Let the writer finish `count` more units."""
        wanted = len(self.written) + count
        self._go.release(count)
        until(lambda: len(self.written) == wanted, "units on disk")


@pytest.fixture
def disk(monkeypatch):
    return SlowDisk(monkeypatch)


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path / "hub")


@pytest.fixture
def worker(book):
    worker = book.worker(2)
    yield worker
    worker.stop()
    assert not worker.failure


def saving(worker):
    """Write a snapshot as if the journal had grown long enough."""
    worker._snapshots = thread = threading.Thread(target=worker._snapshot)
    thread.start()
    return thread


def test_units_that_are_written_are_merged_while_the_rest_of_a_snapshot_is_written(book, worker, disk):
    thread = saving(worker)
    disk.let(1)
    assert disk.written == [0]
    until(lambda: disk.begun == [0, 1], "the next unit")
    for turn in range(3):
        push(book.ledger, 0, 0)
        worker.wake()
        until(lambda turn=turn: book.versions() == [2 + turn, 1, 1, 1], "a merge")
    assert thread.is_alive()
    disk.let(3)
    thread.join()


def test_a_unit_that_a_merge_waits_for_is_written_next_and_merged_then(book, worker, disk):
    thread = saving(worker)
    until(lambda: disk.begun == [0], "the first unit")
    push(book.ledger, 3, 0)
    worker.wake()
    until(lambda: 3 in book.ledger.held, "a merge that waits")
    assert book.versions() == [1, 1, 1, 1]
    disk.let(1)
    until(lambda: disk.begun == [0, 3], "the unit that is waited for")
    assert book.versions() == [1, 1, 1, 1]
    disk.let(1)
    until(lambda: book.versions() == [1, 1, 1, 2], "a merge")
    assert thread.is_alive()
    disk.let(2)
    thread.join()


def test_a_snapshot_with_merges_beside_it_is_of_the_moment_at_which_it_began(book, worker, disk):
    for unit in range(4):
        push(book.ledger, unit, 0)
    worker.wake()
    until(lambda: book.versions() == [2, 2, 2, 2], "merges")
    before = picture(book.hub)
    thread = saving(worker)
    for unit in (2, 0, 1, 3):
        until(lambda: len(disk.begun) == len(disk.written) + 1, "the next unit")
        push(book.ledger, unit, 0)
        worker.wake()
        disk.let(1)
    thread.join()
    until(lambda: book.versions() == [3, 3, 3, 3], "merges")
    again = Hub(book.hub.plan)
    again.restore(read_snapshot(book.folder / "snapshot-00000002"))
    assert picture(again) == before
    recovered = Hub(book.hub.plan)
    Store(book.folder).read(recovered)
    assert picture(recovered) == picture(book.hub)


def test_a_snapshot_that_fails_holds_no_merge_back(book, worker, monkeypatch):
    def fails(out, unit):
        until(lambda: 2 in book.ledger.held, "a merge that waits")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "_write_unit", fails)
    thread = saving(worker)
    until(lambda: not book.ledger.may_advance(2), "the snapshot")
    push(book.ledger, 2, 0)
    worker.wake()
    thread.join()
    until(lambda: book.versions() == [1, 1, 2, 1], "a merge")
    assert [event[0] for event in book.events] == ["snapshot_failed"]


def test_merges_beside_a_snapshot_do_not_keep_a_second_copy_of_the_model(tmp_path, disk):
    units, numel = 12, 200_000
    tracemalloc.start()
    try:
        book = Book(tmp_path / "hub", units=units, numel=numel, outer=NESTEROV)
        worker = book.worker(1)
        for unit in range(units):
            push(book.ledger, unit, 0)
        worker.wake()
        until(lambda: book.versions() == [2] * units, "merges")  # momentum is there, too
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        thread = saving(worker)
        for written in range(units):
            for unit in range(units):
                if not book.hub.state.units[unit].pending:
                    push(book.ledger, unit, 0)
            worker.wake()
            disk.let(1)
            until(lambda n=written + 1: sum(v > 2 for v in book.versions()) >= n, "a merge")
        thread.join()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        worker.stop()
    unit_bytes = 2 * 4 * numel
    assert peak - before < 4 * unit_bytes < units * unit_bytes / 2
