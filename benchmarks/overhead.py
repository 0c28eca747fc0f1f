"""Measure the cost of EDiT for a node that trains alone. Bar: at most 2 % of the step time.

Two copies of one model take the same steps in one process, turn by turn: one bare, one with `LayerSync` and
`MeanExchange` over a Gloo group of one. Machine noise hits both alike, and on a machine that is busy with
other work the process's CPU time is the fairer clock: nothing here waits for another node.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit import EditConfig, LayerSync, MeanExchange
from aedit.launch.data import batch
from aedit.launch.node import blocks, num_parameters
from aedit.proto.transports import TorchTransport
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main

MOST = 0.02
INTERVALS = (16, 64, 128)
CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}
SEQ_LEN, BATCH_SIZE = 128, 4
LR = 1e-6
"""So small that both models stay where they began: on other numbers the same arithmetic can take longer."""


Times = tuple[float, ...]
"""Seconds of one step, by every clock."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds per step of one interval, the bare loop's next to EDiT's for the same samples. The first step
    of `edit_s` lands a round, the last opens one."""

    bare_s: tuple[float, ...]
    edit_s: tuple[float, ...]

    @property
    def extra_s(self) -> list[float]:
        """Return how much longer each of EDiT's steps took than the bare step beside it."""
        return [edit_s - bare_s for bare_s, edit_s in zip(self.bare_s, self.edit_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in seconds."""

    bare_s: float
    quiet_s: float
    """What EDiT adds to a step without anything of a round."""
    round_s: float
    """What one round adds, beyond that, to the steps that open and land it."""

    def extra_s(self, every: int) -> float:
        """Return the time added to the mean step with a round every `every` steps."""
        return self.quiet_s + self.round_s / every

    def overhead(self, every: int) -> float:
        """Return the added time as a share of the bare step."""
        return self.extra_s(every) / self.bare_s


def measure(quick: bool) -> Report:
    torch.set_num_threads(1)
    num_intervals, size, num_layers = (2, 64, 1) if quick else (16, 128, 6)
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    with _alone() as mesh:
        for name, sharded in (("plain module", False), ("FSDP2, one rank", True)):
            models = [_model(size, num_layers, mesh if sharded else None) for _ in range(2)]
            races = _race(models[0], models[1], INTERVALS[0], num_intervals)
            rows += [_row(name, c, races[c], every) for c, every in product(CLOCKS, INTERVALS)]
            clock = _fair_clock()
            bars += [_bar(name, races[clock], clock, every, quick) for every in (16, 128)]
            figures[name] = {c: [asdict(interval) for interval in races[c]] for c in CLOCKS}
    return Report(
        "overhead of EDiT, one node",
        (
            f"{num_parameters(models[0]):,} parameters, batch {BATCH_SIZE} x {SEQ_LEN} bytes, 1 thread; bare"
            " and EDiT steps in turn, medians of their differences.",
            f"{num_intervals} intervals of 16 steps are measured; longer ones spread the same rounds over"
            " more of the same steps. Bootstrap.",
        ),
        (
            "node",
            "clock",
            "every",
            "bare ms",
            "adds ms",
            "round ms",
            "overhead",
            "95 % interval",
        ),
        tuple(rows),
        tuple(bars),
        figures,
    )


def cost(intervals: Sequence[Interval]) -> Cost:
    """Return the medians over all steps of `intervals`."""
    quiet_s = median([s for interval in intervals for s in interval.extra_s[1:-1]])
    rounds_s = [interval.extra_s[0] + interval.extra_s[-1] - 2 * quiet_s for interval in intervals]
    return Cost(median([s for interval in intervals for s in interval.bare_s]), quiet_s, median(rounds_s))


def bootstrap(intervals: Sequence[Interval], every: int, draws: int = 1000) -> tuple[float, float]:
    """Return the 95 % interval of the overhead, over intervals drawn with replacement."""
    chance = random.Random(0)
    drawn = sorted(cost(chance.choices(intervals, k=len(intervals))).overhead(every) for _ in range(draws))
    return drawn[round(0.025 * draws)], drawn[round(0.975 * draws) - 1]


def _row(name: str, clock: str, intervals: Sequence[Interval], every: int) -> tuple[str, ...]:
    c = cost(intervals)
    low, high = bootstrap(intervals, every)
    milliseconds = [f"{1e3 * s:.2f}" for s in (c.bare_s, c.extra_s(every), c.round_s)]
    spread = f"{percent(low, 2)} to {percent(high, 2)}"
    return name, clock, f"{every} steps", *milliseconds, percent(c.overhead(every), 2), spread


def _bar(name: str, intervals: Sequence[Interval], clock: str, every: int, quick: bool) -> Bar:
    overhead = cost(intervals).overhead(every)
    text = f"{name}: {percent(overhead, 2)} with a round every {every} steps by {clock} time, bar 2 %"
    return Bar(text, None if quick else overhead <= MOST)


def _fair_clock() -> str:
    """Wall time, unless other work has to share the cores with this."""
    return "CPU" if os.getloadavg()[0] > (os.cpu_count() or 1) else "wall"


@contextmanager
def _alone() -> Iterator[DeviceMesh]:
    """Open a `torch.distributed` world of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("sync", "shard"))
    finally:
        dist.destroy_process_group()


def _model(size: int, num_layers: int, mesh: DeviceMesh | None) -> nn.Module:
    model = llama(size, num_layers, SEQ_LEN)
    if mesh is not None:
        for _, block in blocks(model):
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    return model


def _race(bare: nn.Module, edit: nn.Module, every: int, num_intervals: int) -> dict[str, list[Interval]]:
    """Both take the same steps; who goes first is drawn for each. By clock."""
    bare_inner, edit_inner = (torch.optim.AdamW(model.parameters(), lr=LR) for model in (bare, edit))
    transport = TorchTransport(timeout_s=60)
    exchange = MeanExchange(transport)
    sync = LayerSync.of(edit, edit_inner, exchange=exchange, config=EditConfig(every=every))

    def edit_step(samples: Tensor) -> None:
        inner_step(edit, edit_inner, samples)
        sync.step()

    def bare_step(samples: Tensor) -> None:
        inner_step(bare, bare_inner, samples)

    try:
        with sync:
            samples = _samples()
            chance = random.Random(0)
            pairs = [
                _pair(bare_step, edit_step, next(samples), edit_first=chance.random() < 0.5)
                for _ in range(every * (num_intervals + 1))
            ]
    finally:
        transport.close()
    cut = [pairs[i : i + every] for i in range(every, len(pairs), every)]  # the first one warms up
    return {clock: [_interval(pairs, i) for pairs in cut] for i, clock in enumerate(CLOCKS)}


def _interval(pairs: Sequence[tuple[Times, Times]], clock: int) -> Interval:
    return Interval(tuple(bare[clock] for bare, _ in pairs), tuple(edit[clock] for _, edit in pairs))


def _pair(
    bare_step: Callable[[Tensor], None],
    edit_step: Callable[[Tensor], None],
    samples: Tensor,
    *,
    edit_first: bool,
) -> tuple[Times, Times]:
    if edit_first:
        edit = _timed(edit_step, samples)
        return _timed(bare_step, samples), edit
    bare = _timed(bare_step, samples)
    return bare, _timed(edit_step, samples)


def _timed(step: Callable[[Tensor], None], samples: Tensor) -> Times:
    began = [now() for now in CLOCKS.values()]
    step(samples)
    return tuple(now() - then for now, then in zip(CLOCKS.values(), began, strict=True))


def _samples() -> Iterator[Tensor]:
    train = corpus(SEQ_LEN).train
    for step in count():
        yield batch(train, np.arange(BATCH_SIZE) + BATCH_SIZE * step)


if __name__ == "__main__":
    main("overhead", "Step time with EDiT on against a bare loop, one node, CPU.", measure)
