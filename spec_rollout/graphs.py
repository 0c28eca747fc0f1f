"""CUDA graphs: the kernels of a step, recorded once for each size and replayed without the CPU's part.

Graphs of one pool share memory (TLT, arXiv 2511.16665, section on its graph pool): what one leaves behind in
between, another may overwrite, so results are good until the pool's next replay.
"""

import bisect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out, and nothing that waits for the GPU or depends on a tensor's values."""

_WARM_UPS = 2
_MOST_GRAPHS = 256


def batch_bucket(num_rows: int, rows: int) -> int:
    """The rows that a graph for `num_rows` computes, at most `rows`: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    sizes = sorted({1, 3, *(base << k for k in range(16) for base in (2, 6))})
    return min(sizes[bisect.bisect_left(sizes, num_rows)], rows)


def context_bucket(context: int, slots: int) -> int:
    """The slots that a graph for `context` reads, at most `slots`: four sizes to a doubling, from 256 on, so
    that at most a quarter is read for nothing."""
    step = max(64, 1 << max(0, (context - 1).bit_length() - 3))
    return min(max(256, -(-context // step) * step), slots)


class Captured:
    """One function, recorded for inputs of one size."""

    def __init__(self, function: Run, inputs: tuple[Tensor, ...], pool: Any) -> None:
        """Runs `function` on copies of `inputs` to warm up and to record: it must bear being run again."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads of the process, such as a drafter's trainer, may use the GPU meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.outputs


class Graphs:
    """A pool of recorded functions, by a key that says which and of what sizes. Of more than `most`, the one
    that was not used for longest is forgotten."""

    def __init__(self, most: int = _MOST_GRAPHS) -> None:
        self.most, self.pool = most, torch.cuda.graph_pool_handle()
        self._by_key: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def run(self, key: Hashable, function: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`. The first call with a key records it; later ones replay, so that the function
        must be the same, and inputs of the same shapes. Results are good until the pool's next run."""
        captured = self._by_key.pop(key, None) or Captured(function, inputs, self.pool)
        self._by_key[key] = captured
        if len(self._by_key) > self.most:
            del self._by_key[next(iter(self._by_key))]
        return captured(*inputs)
