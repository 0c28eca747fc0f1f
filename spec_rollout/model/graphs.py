"""CUDA graphs: the kernels of a step, recorded once for each size and replayed without the CPU's part.

Graphs of one pool share memory (TLT, arXiv 2511.16665, section on its graph pool): what is only needed on the
way lies in the same pool for all, and so do what goes in and what comes out (`ReusedBuffers`). So results
are good
until the pool's next run.
"""

import bisect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

GraphFunction = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out, and nothing that waits for the GPU, depends on a tensor's values, or changes its
inputs."""
Replay = Callable[..., tuple[Tensor, ...]]
"""A recorded function. What it returns lies on a shelf."""

_WARM_UPS = 2
_MOST_GRAPHS = 256
_RECORDED_PRIORITY = -1
"""Of recorded kernels: before those of a drafter's trainer, which are at 0, the lowest there is."""


def batch_bucket(num_rows: int, rows: int) -> int:
    """The rows that a graph for `num_rows` computes, at most `rows`: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    sizes = sorted({1, 3, *(base << k for k in range(16) for base in (2, 6))})
    return min(sizes[bisect.bisect_left(sizes, num_rows)], rows)


def context_bucket(context: int, slots: int) -> int:
    """The slots that a graph for `context` reads, at most `slots`: four sizes to a doubling, from 256 on, so
    that at most a quarter is read for nothing."""
    step = max(64, 1 << max(0, (context - 1).bit_length() - 3))
    return min(max(256, -(-context // step) * step), slots)


class ReusedBuffers:
    """Memory for tensors of which only the last that were put there are needed, by their place in a row of
    tensors. It grows by doubling, and who has had a place in smaller memory keeps that."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())

    def buffers_like(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors of these shapes and dtypes, on these devices, for values to come."""
        return tuple(self._buffer_like(index, tensor) for index, tensor in enumerate(like))

    def _buffer_like(self, index: int, like: Tensor) -> Tensor:
        num_bytes = like.numel() * like.element_size()
        memory = self._memory.get(index)
        if memory is None or memory.numel() < num_bytes:
            size = 1 << max(9, (num_bytes - 1).bit_length())
            with torch.inference_mode(False):  # or nobody outside of that mode could write it
                memory = self._memory[index] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return memory[:num_bytes].view(like.dtype).view(like.shape)


class GraphPool:
    """What all graphs of one pool have together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.inputs, self.results = device, ReusedBuffers(), ReusedBuffers()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def pool(self) -> Any:
        """Of CUDA's: what graphs need on their way."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def stream(self) -> torch.cuda.Stream:
        """On which all are recorded: memory of a pool is shared within one stream only."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=_RECORDED_PRIORITY)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def num_bytes(self) -> int:
        """All of it, of the pool what it has taken from the device."""
        buffer_bytes = self.inputs.num_bytes + self.results.num_bytes
        if self._pool is None:
            return buffer_bytes
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)  # type: ignore[no-untyped-call]
        return buffer_bytes + sum(int(segment["total_size"]) for segment in segments)


class CapturedGraph:
    """One function, recorded for inputs of one size."""

    def __init__(self, function: GraphFunction, inputs: Sequence[Tensor], shared: GraphPool) -> None:
        """Runs `function` on copies of `inputs` to warm up and to record: it must bear being run again."""
        self.inputs = shared.inputs.buffers_like(inputs)
        _copy(self.inputs, inputs)
        with torch.cuda.device(shared.device):
            self.results = shared.results.buffers_like(self._warm_up(function, shared.stream))
            self.graph = torch.cuda.CUDAGraph()
            # Other threads of the process, such as a drafter's trainer, may use the GPU meanwhile.
            with torch.cuda.graph(
                self.graph, pool=shared.pool, stream=shared.stream, capture_error_mode="thread_local"
            ):
                # Copies, as a result that is held would keep its part of the pool from all others.
                _copy(self.results, function(*self.inputs))

    def _warm_up(self, function: GraphFunction, stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
        """Results of the right sizes; what must be chosen or allocated once has been."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                made = function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return made

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.results


class GraphCache:
    """A pool of recorded functions, by a key that says which and of what sizes. Of more than `max_graphs`,
    the one
    that was not used for longest is forgotten."""

    def __init__(
        self,
        device: torch.device,
        max_graphs: int = _MOST_GRAPHS,
        record: Callable[[GraphFunction, Sequence[Tensor], GraphPool], Replay] = CapturedGraph,
    ) -> None:
        self.max_graphs, self.shared, self._record = max_graphs, GraphPool(device), record
        self._by_key: dict[Hashable, Replay] = {}
        self.too_large: set[Hashable] = set()
        """Keys of what there was no memory to record: that is run as it is."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_bytes(self) -> int:
        """Of everything that is kept for the graphs."""
        return self.shared.num_bytes

    def run(self, key: Hashable, function: GraphFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`. The first call with a key records it; later ones replay, so that the function
        must be the same, and inputs of the same shapes. Results are good until the pool's next run."""
        replay = self._by_key.pop(key, None) or self._recorded(key, function, inputs)
        if replay is None:
            return function(*inputs)
        self._by_key[key] = replay
        if len(self._by_key) > self.max_graphs:
            del self._by_key[next(iter(self._by_key))]
        return replay(*inputs)

    def _recorded(self, key: Hashable, function: GraphFunction, inputs: Sequence[Tensor]) -> Replay | None:
        """None where there is no memory for it."""
        if key in self.too_large:
            return None
        try:
            return self._record(function, inputs, self.shared)
        except torch.OutOfMemoryError:
            self.too_large.add(key)
            return None


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
