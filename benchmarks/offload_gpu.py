"""Measure the cost of EDiT with offload on a GPU.

Bars: <= 2 % of the step time; no host synchronisation in a step without a round; peak memory <= bare + one
unit's fp32 anchor and momentum. One rank, NCCL, a Llama of about 150 M parameters under bf16 autocast. Needs
a CUDA device.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aedit.edit import EditConfig, LayerSync, MeanExchange
from aedit.launch.config import ModelConfig
from aedit.launch.node import build_model, loss, num_parameters
from aedit.proto.transports import TorchTransport
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main

MOST = 0.02
VOCABULARY = 32_000
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Duration and sizes of the benchmark."""

    hidden_size: int = 768
    num_layers: int = 14
    seq_len: int = 1024
    batch_size: int = 8
    every: int = 32
    intervals: int = 6


QUICK = Size(hidden_size=128, num_layers=2, seq_len=128, every=4, intervals=3)


@dataclass(frozen=True, slots=True)
class Ride:
    """Measurements of one training loop."""

    step_s: tuple[float, ...]
    """Time per step, one value per interval, its round included."""
    peak_bytes: int
    host_syncs: int
    """Times the host waited for the GPU in one step without a round."""
    params: int
    largest_unit: int
    """Parameters of the largest unit."""


def measure(quick: bool) -> Report | str:
    if not torch.cuda.is_available():
        return "needs a CUDA device: not run"
    size = QUICK if quick else Size()
    with _alone():
        bare = _ride(size, with_edit=False)
        edit = _ride(size, with_edit=True)
    overhead = median(edit.step_s) / median(bare.step_s) - 1
    extra_bytes, allowed_bytes = edit.peak_bytes - bare.peak_bytes, 2 * 4 * edit.largest_unit
    extra_syncs = edit.host_syncs - bare.host_syncs
    memory = (
        f"peak memory {extra_bytes / MIB:.0f} MiB above bare, bar {allowed_bytes / MIB:.0f} MiB (one unit)"
    )
    return Report(
        "EDiT with offload, one GPU",
        (
            f"{torch.cuda.get_device_name()}, {bare.params:,} parameters, bf16, batch {size.batch_size} x"
            f" {size.seq_len}, AdamW, a round every {size.every} steps, NCCL with one rank.",
            f"Median over {size.intervals} whole intervals, rounds included; host syncs in a step without a"
            " round, as torch.cuda's sync debug mode tells.",
        ),
        ("loop", "ms per step", "peak MiB", "host syncs per step"),
        (_row("bare", bare), _row("EDiT, offload", edit)),
        (
            Bar(f"overhead {percent(overhead, 2)}, bar 2 %", None if quick else overhead <= MOST),
            Bar(f"{extra_syncs} host syncs in a step beyond those of the bare loop, bar 0", extra_syncs <= 0),
            Bar(memory, None if quick else extra_bytes <= allowed_bytes),
        ),
        {"bare": asdict(bare), "edit": asdict(edit)},
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Open a world of this process only: NCCL for tensors, Gloo for small rows."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ride(size: Size, *, with_edit: bool) -> Ride:
    """Train one model from the same start; nothing of it is left on the GPU afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = _model(size).cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    largest = max(p.numel() for p in model.parameters())
    if not with_edit:
        return _measured(size, model, inner, lambda: None, largest)
    transport = TorchTransport(timeout_s=60)
    exchange = MeanExchange(transport, offload=True)
    config = EditConfig(every=size.every, offload=True)
    sync = LayerSync.of(model, inner, exchange=exchange, config=config)
    try:
        with sync:
            return _measured(size, model, inner, sync.step, max(unit.numel for unit in sync.units))
    finally:
        transport.close()


def _measured(
    size: Size, model: nn.Module, inner: torch.optim.Optimizer, after: Callable[[], None], largest_unit: int
) -> Ride:
    """Measure a training loop.

    The first interval warms up; a step in the middle of the last one is watched for host synchronisations.
    """
    samples = torch.randint(0, VOCABULARY, (size.batch_size, size.seq_len + 1), device="cuda")

    def step() -> None:
        _step(model, inner, samples)
        after()

    def interval() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(size.every):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / size.every

    interval()
    step_s = tuple(interval() for _ in range(size.intervals))
    step()  # lands the round that the last interval opened
    syncs = host_syncs(step)
    return Ride(step_s, torch.cuda.max_memory_allocated(), syncs, num_parameters(model), largest_unit)


def host_syncs(act: Callable[[], None]) -> int:
    """Return how often `act` makes the host wait for the GPU, as far as PyTorch can tell."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _step(model: nn.Module, inner: torch.optim.Optimizer, samples: Tensor) -> None:
    loss(model, samples, "bf16").backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner.step()
    inner.zero_grad()


def _model(size: Size) -> nn.Module:
    sizes: dict[str, int | float | bool | str] = {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.hidden_size * 3,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // 64,
        "num_key_value_heads": size.hidden_size // 64,
        "tie_word_embeddings": True,
    }
    return build_model(ModelConfig(sizes=sizes), VOCABULARY, size.seq_len, seed=0, eos_id=0)


def _row(name: str, ride: Ride) -> tuple[str, ...]:
    return name, f"{1e3 * median(ride.step_s):.2f}", f"{ride.peak_bytes / MIB:.0f}", str(ride.host_syncs)


if __name__ == "__main__":
    main("offload_gpu", "Overhead, host syncs and memory of EDiT with offload on one GPU.", measure)
