"""Measure merges on several threads, and while snapshots are written. Part of `benchmarks.hub`.

The ledger and the worker of a hub run in this process, with a journal on the disk and without a network.
There is always a push of every unit that waits for its merge.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from aedit.async_sgd.hub import Hub, Joiner
from aedit.async_sgd.journal import Journal, Ledger, Payload, Store
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig, Push, Vector
from aedit.async_sgd.service import HubWorker
from aedit.proto.codecs import codec
from aedit.system import give_back_what_is_freed
from aedit.types import Layout, TensorLayout, UnitLayout
from benchmarks.hub_parts.process import memory_bytes

STEPS = 64
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model, and for how long it is merged."""

    units: int
    numel: int
    seconds: float

    @property
    def params_bytes(self) -> int:
        return 4 * self.units * self.numel


@dataclass(frozen=True, slots=True)
class Merging:
    """Figures of a hub that merges."""

    threads: int
    gb_s: float
    """GB of fp32 parameters per second, of all units together."""
    snapshots: int
    """Written meanwhile, one after the other."""
    peak_bytes: int
    """The most memory of the process, files left out, above that before the first merge."""
    snapshot_s: float
    """Mean time to write one; 0 without any."""


class BusyHub:
    """A hub with one member whose pushes never end."""

    def __init__(self, folder: Path, load: Load, threads: int) -> None:
        plan = HubPlan(
            hub=HubConfig(address="h:1", weights="uniform", grace=0.0, codec="bf16"),
            outer=OuterConfig(kind="nesterov"),
            penalty=PenaltyConfig(clip=None),
            every=STEPS,
            steps=10**9,
        )
        self.load = load
        self.ledger = Ledger(Hub(plan), Journal(folder, 1, fsync=False), Store(folder, fsync=False))
        self.worker = HubWorker(self.ledger, lambda *_, **__: None, snapshot_bytes=2**50, mergers=threads)
        rng = np.random.default_rng(0)
        first = rng.standard_normal(load.numel, np.float32) * np.float32(0.02)
        self._first = self._stored("fp32", first)
        self._step = self._stored("bf16", rng.standard_normal(load.numel, np.float32) * np.float32(1e-4))
        units = tuple(UnitLayout(f"u{i}", (TensorLayout("w", (load.numel,)),)) for i in range(load.units))
        joiner = Joiner(name="node", layout=Layout(units), facts=(), num_samples=10**6)
        self.ledger.commit(self.ledger.hub.join(joiner, self.ledger.clock()))
        for unit in range(load.units):
            self._push(unit)
        self._merge_here()
        for unit in range(load.units):
            self._push(unit)

    def _stored(self, name: str, x: Vector) -> tuple[Payload, float]:
        payload = self.ledger.store_payload(name, x.size, 0, codec(name).encode(x))
        return payload, float(np.linalg.norm(x))

    def _push(self, unit: int) -> None:
        hub = self.ledger.hub
        base = hub.state.units[unit].version
        values, length = self._step if base else self._first
        push = Push(
            node=0,
            unit=unit,
            seq=hub.state.members[0].received.get(unit, 0) + 1,
            base=base,
            steps=STEPS if base else 0,
            tokens=0,
            values=values,
            norms=(length,),
        )
        self.ledger.commit(hub.offer(push, self.ledger.clock()))

    def _merge_here(self) -> None:
        for record in self.ledger.hub.tick(self.ledger.clock()):
            self.ledger.commit([record], self.ledger.hub.compute(record))

    def feed(self) -> None:
        """Push every unit again whose last push is merged."""
        with self.ledger.lock:
            free = [i for i, unit in self.ledger.hub.state.units.items() if not unit.pending]
            for unit in free:
                self._push(unit)
        if free:
            self.worker.wake()


def merging(load: Load, threads: int, *, snapshots: bool) -> Merging:
    """Return what a hub merges on so many threads. snapshots: write one after the other meanwhile."""
    give_back_what_is_freed()  # as a hub does, for the rest of this process
    with TemporaryDirectory(prefix="aedit-") as name:
        busy = BusyHub(Path(name), load, threads)
        before = memory_bytes(os.getpid(), "RssAnon")
        with _watched() as peak:
            busy.worker.start()
            began, merges = time.perf_counter(), busy.worker.merges
            end, written = began + load.seconds, 0
            saver = None
            while time.perf_counter() < end:
                if snapshots and (saver is None or not saver.is_alive()):
                    written += saver is not None
                    saver = threading.Thread(target=busy.ledger.snapshot, args=(busy.worker.wake,))
                    saver.start()
                busy.feed()
                time.sleep(_LOOK_S)
            took_s, merged = time.perf_counter() - began, busy.worker.merges - merges
            if saver is not None:
                saver.join()
            busy.worker.stop()
        if busy.worker.failure:
            raise RuntimeError(busy.worker.failure)
    gb_s = 4e-9 * merged * load.numel / took_s
    return Merging(threads, gb_s, written, max(peak) - before, took_s / written if written else 0.0)


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Yield a list that fills with the bytes of this process's own memory."""
    own, over = [memory_bytes(os.getpid(), "RssAnon")], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            own.append(memory_bytes(os.getpid(), "RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield own
    finally:
        over.set()
        thread.join()
