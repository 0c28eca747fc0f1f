"""CUDA graphs: the kernels of a step, captured once per size and replayed without the work of the CPU.

Graphs of one pool share memory (graph pool of TLT, arXiv:2511.16665): intermediate results are in one memory
pool, and inputs and outputs are in `ReusedBuffers`. So results are valid until the next run of any graph of
the pool.
"""

import bisect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

GraphFunction = Callable[..., tuple[Tensor, ...]]
"""Function from tensors to tensors that can be captured: it does not synchronize with the GPU, does not
depend on values of tensors, and does not change its inputs."""
Replay = Callable[..., tuple[Tensor, ...]]
"""Captured function. Its results are in reused buffers."""

_WARM_UPS = 2
_MOST_GRAPHS = 256
_RECORDED_PRIORITY = -1
"""Stream priority of captured kernels. They go before those of drafter training, whose priority 0 is the
lowest."""


def batch_bucket(num_rows: int, rows: int) -> int:
    """Return the number of rows, at most `rows`, of the graph that serves `num_rows`.

    The sizes are 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...
    """
    sizes = sorted({1, 3, *(base << k for k in range(16) for base in (2, 6))})
    return min(sizes[bisect.bisect_left(sizes, num_rows)], rows)


def context_bucket(context: int, slots: int) -> int:
    """Return the number of slots that the graph for `context` reads, at most `slots`.

    There are four sizes per doubling, from 256 on, so that at most a quarter of the slots is read needlessly.
    """
    step = max(64, 1 << max(0, (context - 1).bit_length() - 3))
    return min(max(256, -(-context // step) * step), slots)


class ReusedBuffers:
    """Memory for tensors of which only the last written values are needed, by index in a sequence of tensors.

    A buffer grows by doubling. A tensor that was returned earlier keeps the smaller memory.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Return the size of all buffers in bytes."""
        return sum(memory.numel() for memory in self._memory.values())

    def buffers_like(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return uninitialized tensors with the shapes, dtypes and devices of `like`."""
        found = []
        for index, tensor in enumerate(like):
            memory = self._memory.get(index)
            if memory is None or memory.numel() < tensor.nbytes:
                size = 1 << max(9, (tensor.nbytes - 1).bit_length())
                with torch.inference_mode(
                    False
                ):  # inference tensors could not be written outside of that mode
                    memory = self._memory[index] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            found.append(memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        return tuple(found)


class GraphPool:
    """State shared by all graphs of one pool: memory pool, stream, input and result buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.inputs, self.results = device, ReusedBuffers(), ReusedBuffers()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def pool(self) -> Any:
        """Return the CUDA memory pool of intermediate results."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def stream(self) -> torch.cuda.Stream:
        """Return the capture stream: CUDA shares the memory of a pool within one stream only."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=_RECORDED_PRIORITY)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the buffers and of the memory that the pool has taken from the device."""
        buffer_bytes = self.inputs.num_bytes + self.results.num_bytes
        if self._pool is None:
            return buffer_bytes
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)  # type: ignore[no-untyped-call]
        return buffer_bytes + sum(int(segment["total_size"]) for segment in segments)


class CapturedGraph:
    """One function, captured for inputs of one size."""

    def __init__(self, function: GraphFunction, inputs: Sequence[Tensor], shared: GraphPool) -> None:
        """Run `function` on copies of `inputs` to warm up and to capture. It must allow repeated runs."""
        self.inputs = shared.inputs.buffers_like(inputs)
        _copy(self.inputs, inputs)
        with torch.cuda.device(shared.device):
            # Run the function until lazy initialization is done, which also gives results of the right sizes.
            shared.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(shared.stream):
                for _ in range(_WARM_UPS):
                    made = function(*self.inputs)
            torch.cuda.current_stream().wait_stream(shared.stream)
            self.results = shared.results.buffers_like(made)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads of the process, such as drafter training, may use the GPU during capture.
            with torch.cuda.graph(
                self.graph, pool=shared.pool, stream=shared.stream, capture_error_mode="thread_local"
            ):
                # Copy the results: a result that stays referenced would block its part of the pool.
                _copy(self.results, function(*self.inputs))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy the inputs, replay the graph and return the results, which are in reused buffers."""
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.results


class GraphCache:
    """Captured functions by a key of function and sizes.

    Above `max_graphs` the least recently used one is dropped.
    """

    def __init__(
        self,
        device: torch.device,
        max_graphs: int = _MOST_GRAPHS,
        record: Callable[[GraphFunction, Sequence[Tensor], GraphPool], Replay] = CapturedGraph,
    ) -> None:
        self.max_graphs, self.shared, self._record = max_graphs, GraphPool(device), record
        self._by_key: dict[Hashable, Replay] = {}
        self.too_large: set[Hashable] = set()
        """Keys of functions that did not fit into memory. They run without a graph."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all memory kept for the graphs."""
        return self.shared.num_bytes

    def clear(self) -> None:
        """Drop all graphs, as tensors that they read are now elsewhere in memory."""
        self._by_key.clear()
        self.too_large.clear()

    def run(self, key: Hashable, function: GraphFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return `function(*inputs)`, captured at the first call with `key` and replayed at later ones.

        Args:
            key: Identifies the function and the shapes of its inputs, which must not change under one key.
            function: Function to capture.
            *inputs: Tensors on the device.

        Returns:
            Results that are valid until the next run of this cache.
        """
        replay = self._by_key.pop(key, None)
        if replay is None and key not in self.too_large:
            try:
                replay = self._record(function, inputs, self.shared)
            except torch.OutOfMemoryError:
                self.too_large.add(key)
        if replay is None:
            return function(*inputs)
        self._by_key[key] = replay
        if len(self._by_key) > self.max_graphs:
            del self._by_key[next(iter(self._by_key))]
        return replay(*inputs)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
