"""What does EDiT cost a node that trains alone? Bar: at most 2 % of the step time.

Two copies of one model take the same steps in one process, turn by turn: one bare, one with `LayerSync` and
`MeanExchange` over a Gloo group of one. Machine noise hits both alike.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit.config import EditConfig
from aedit.edit.exchange import MeanExchange
from aedit.edit.sync import LayerSync
from aedit.launch.model import blocks, num_parameters
from aedit.launch.samples import batch
from aedit.proto.c10d import TorchTransport
from benchmarks.small_llama import corpus, inner_step, llama
from benchmarks.table import Bar, Report, main, median, percent

MOST = 0.02
INTERVALS = (16, 32, 64, 128)
SEQ_LEN, BATCH_SIZE = 128, 4


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds per step of one interval. The first step of `edit_s` lands a round, the last opens one."""

    bare_s: tuple[float, ...]
    edit_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in seconds."""

    bare_s: float
    quiet_s: float
    """A step of EDiT without anything of a round."""
    round_s: float
    """What one round adds to the steps that open and land it."""

    def overhead(self, every: int) -> float:
        """Share of the bare step time with a round every `every` steps."""
        return (self.quiet_s + self.round_s / every) / self.bare_s - 1


def measure(quick: bool) -> Report:
    torch.set_num_threads(1)
    num_intervals, size, num_layers = (2, 64, 1) if quick else (16, 128, 6)
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    with _alone() as mesh:
        for name, sharded in (("plain module", False), ("FSDP2, one rank", True)):
            models = [_model(size, num_layers, mesh if sharded else None) for _ in range(2)]
            intervals = _race(models[0], models[1], INTERVALS[0], num_intervals)
            rows += [_row(name, intervals, every) for every in INTERVALS]
            worst = cost(intervals).overhead(INTERVALS[0])
            passed = None if quick else worst <= MOST
            bars.append(Bar(f"{name}: {percent(worst, 2)} with a round every 16 steps, bar 2 %", passed))
            figures[name] = [(interval.bare_s, interval.edit_s) for interval in intervals]
    return Report(
        "overhead of EDiT, one node",
        (
            f"{num_parameters(models[0]):,} parameters, batch {BATCH_SIZE} x {SEQ_LEN} bytes, 1 thread; bare"
            " and EDiT steps in turn, medians per step, bootstrap.",
            f"{num_intervals} intervals of 16 steps are measured; longer ones spread the same rounds over"
            " more of the same steps.",
        ),
        ("node", "round every", "bare ms", "EDiT ms", "one round ms", "overhead", "95 % interval"),
        tuple(rows),
        tuple(bars),
        figures,
    )


def cost(intervals: Sequence[Interval]) -> Cost:
    """Medians over all steps of `intervals`."""
    quiet_s = median([s for interval in intervals for s in interval.edit_s[1:-1]])
    rounds_s = [interval.edit_s[0] + interval.edit_s[-1] - 2 * quiet_s for interval in intervals]
    return Cost(median([s for interval in intervals for s in interval.bare_s]), quiet_s, median(rounds_s))


def bootstrap(intervals: Sequence[Interval], every: int, draws: int = 1000) -> tuple[float, float]:
    """95 % interval of the overhead, over intervals drawn with replacement."""
    chance = random.Random(0)
    drawn = sorted(cost(chance.choices(intervals, k=len(intervals))).overhead(every) for _ in range(draws))
    return drawn[round(0.025 * draws)], drawn[round(0.975 * draws) - 1]


def _row(name: str, intervals: Sequence[Interval], every: int) -> tuple[str, ...]:
    c = cost(intervals)
    low, high = bootstrap(intervals, every)
    per_step_s = c.quiet_s + c.round_s / every
    milliseconds = [f"{1e3 * s:.2f}" for s in (c.bare_s, per_step_s, c.round_s)]
    return (
        name,
        f"{every} steps",
        *milliseconds,
        percent(c.overhead(every), 2),
        f"{percent(low, 2)} to {percent(high, 2)}",
    )


@contextmanager
def _alone() -> Iterator[DeviceMesh]:
    """A `torch.distributed` world of this process only."""
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


def _race(bare: nn.Module, edit: nn.Module, every: int, num_intervals: int) -> list[Interval]:
    """Both take the same steps; who goes first is drawn for each."""
    bare_inner, edit_inner = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (bare, edit))
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
    return [Interval(tuple(b for b, _ in pairs), tuple(e for _, e in pairs)) for pairs in cut]


def _pair(
    bare_step: Callable[[Tensor], None],
    edit_step: Callable[[Tensor], None],
    samples: Tensor,
    *,
    edit_first: bool,
) -> tuple[float, float]:
    if edit_first:
        edit_s = _timed(edit_step, samples)
        return _timed(bare_step, samples), edit_s
    bare_s = _timed(bare_step, samples)
    return bare_s, _timed(edit_step, samples)


def _timed(step: Callable[[Tensor], None], samples: Tensor) -> float:
    began = time.perf_counter()
    step(samples)
    return time.perf_counter() - began


def _samples() -> Iterator[Tensor]:
    train = corpus(SEQ_LEN).train
    for step in count():
        yield batch(train, np.arange(BATCH_SIZE) + BATCH_SIZE * step)


if __name__ == "__main__":
    main("overhead", "Step time with EDiT on against a bare loop, one node, CPU.", measure)
