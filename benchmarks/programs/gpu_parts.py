"""Parts of `benchmarks.gpu`, each run in a process of its own.

    python -m benchmarks.programs.gpu_parts '{"part": "decode", "device": "cuda", "small": false, ...}'

The last line of its output is JSON: the rows of the table.
"""

import gc
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from aedit.async_sgd.rules import OuterState
from aedit.edit import EditConfig, LayerSync, MeanExchange
from aedit.edit.anchor_store import PinnedStore
from aedit.launch.config import ModelConfig
from aedit.launch.node import build_model, loss, num_parameters
from aedit.proto.transports import TorchTransport
from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import DraftLayer, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import DraftTrainingConfig, LearningConfig, OnlineConfig, OnlineDrafter
from benchmarks.decode import (
    GENERATE,
    OURS,
    VLLM,
    Generate,
    Ours,
    Race,
    Shape,
    System,
    Turns,
    race_systems,
    rivals,
)
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.random_policy import saved_policy
from benchmarks.kit.statistics import Interval, median, percent, quantile
from benchmarks.policies import Policy, load
from benchmarks.rollout import FIXED, Cast, Contestant, Watched, engine_of, race, random_layer, stream

MIB = 2**20
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One part, and what it may use."""

    part: str
    device: str = "cuda"
    small: bool = False
    """Sizes of a trial, whose figures mean nothing."""
    seconds: float = 60.0
    """Time for the part, from the start of its process."""
    root: str = "runs"
    """Directory of trained and saved policies."""
    vllm_python: str = ""
    """Interpreter with vLLM."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. passed: None without a bar, or if this run was too short to decide."""

    what: str
    value: str
    beside: str = ""
    wanted: str = ""
    passed: bool | None = None
    figure: float | None = None


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that afterwards holds the seconds until the device had done all its work."""
    took_s: list[float] = []
    wait_for(device)
    began_s = time.perf_counter()
    yield took_s
    wait_for(device)
    took_s.append(time.perf_counter() - began_s)


def fastest(device: torch.device, act: Callable[[], object], repeats: int = 10) -> float:
    """Return the least seconds of `act`, after a first call that does one-time work."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        with timed(device) as took_s:
            act()
        seconds += took_s
    return min(seconds[1:])


# -- the device: what its memory, its link to the host and its arithmetic allow


def copy_speed(device: torch.device, num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy within the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / fastest(device, lambda: target.copy_(source))


def copied_bytes(job: Job) -> int:
    return 1 << (24 if job.small else 30)


def device_part(job: Job) -> Iterator[Row]:
    """Yield the speeds that bound all others."""
    device, num_bytes = torch.device(job.device), copied_bytes(job)
    within = copy_speed(device, num_bytes)
    yield Row("copy within the device", f"{within / 1e9:,.0f} GB/s", "read and written", figure=within)
    there = torch.zeros(num_bytes // 4, dtype=torch.uint8, device=device)
    pinned = torch.zeros(num_bytes // 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, target, source in (("to", there, pinned), ("from", pinned, there)):
        seconds = fastest(device, lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        speed = len(there) / seconds
        yield Row(f"copy {name} the device, pinned memory", f"{speed / 1e9:,.1f} GB/s", figure=speed)
    size = 256 if job.small else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    flops = 2 * size**3 / fastest(device, lambda: a @ a)
    yield Row(f"bf16 product of {size} x {size}", f"{flops / 1e12:,.1f} TFLOP/s", figure=flops)


# -- decode: one row beside the memory bandwidth; more rows and prompts beside `generate` and vLLM


WANTED_SHARE, WANTED_VLLM = 0.6, 0.9
GRAPHS, AGAIN, EAGER, WARM, PASS = "graphs", "graphs again", "no graphs", "graphs, T = 1", "the pass alone"
QWEN3_600M: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY: Mapping[str, Any] = {
    **QWEN3_600M,
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Tokens of the measurement of one row."""

    prompt: int = 128
    new: int = 128
    """Tokens of one turn."""
    repeats: int = 7
    """Turns of each contestant that count."""
    copied_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """Measurement of one row."""

    parameters: int
    token_bytes: float
    """Weights, and keys and values of a text of the mean length."""
    copy_bytes_per_s: float
    """Read and written."""
    rates: dict[str, tuple[float, ...]]
    """Tokens per second by contestant and turn."""
    num_graphs: int
    graph_bytes: int

    @property
    def most(self) -> float:
        """Return the tokens per second that the memory bandwidth allows."""
        return self.copy_bytes_per_s / self.token_bytes

    def share(self, name: str) -> float:
        return median(self.rates[name]) / self.most

    def over(self, name: str, other: str) -> Interval:
        """Return the ratio of two contestants within each turn."""
        return Interval.of([a / b for a, b in zip(self.rates[name], self.rates[other], strict=True)])

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the table."""
        for name in self.rates:
            rate, share = median(self.rates[name]), self.share(name)
            beside = f"{percent(share)} of {self.most:,.0f}/s, {self.over(name, EAGER)} of no graphs"
            has_bar = name == GRAPHS
            yield Row(
                f"decode 1 row, {name}",
                f"{rate:,.0f} tokens/s",
                beside,
                f"{percent(WANTED_SHARE, 0)} of the bound" if has_bar else "",
                share >= WANTED_SHARE if has_bar else None,
                rate,
            )
        again = self.over(AGAIN, GRAPHS)
        noise = max(abs(again.high - 1), abs(again.low - 1))
        yield Row("graphs beside graphs", percent(noise), "off 1", "3 %", noise <= 0.03, noise)
        graphs = f"{self.graph_bytes / MIB:.0f} MiB"
        yield Row("captured graphs of 1 row", graphs, f"{self.num_graphs} graphs", figure=self.graph_bytes)


def random_model(sizes: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """Return a model in bf16, created on the device."""
    with torch.device(device):
        model: PreTrainedModel = _auto.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.train(False)
    model.requires_grad_(False)
    return model


def decode_one(model: PreTrainedModel, length: Length) -> Decoded:
    """Run all contestants in turns of random order, after one-time work is done."""
    turns: dict[str, _Engine | _Pass] = {
        GRAPHS: _Engine(_target(model, length), length, 0.0),
        AGAIN: _Engine(_target(model, length), length, 0.0),
        EAGER: _Engine(_target(model, length, graphs=False), length, 0.0),
        WARM: _Engine(_target(model, length), length, 1.0),
        PASS: _Pass(_target(model, length), length),
    }
    for turn in turns.values():
        turn.rate()
    rng = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(length.repeats):
        for name in rng.sample(list(turns), len(turns)):
            rates[name].append(turns[name].rate())
    target = turns[GRAPHS].target
    weights = {parameter.data_ptr(): parameter for parameter in model.parameters()}.values()
    kv_bytes = (length.prompt + length.new / 2) * target.read_kv(0, 1).nbytes
    return Decoded(
        parameters=sum(parameter.numel() for parameter in weights),
        token_bytes=sum(p.numel() * p.element_size() for p in weights) + kv_bytes,
        copy_bytes_per_s=copy_speed(model.device, length.copied_bytes),
        rates={name: tuple(values) for name, values in rates.items()},
        num_graphs=len(target.graphs) if target.graphs is not None else 0,
        graph_bytes=target.graphs.num_bytes if target.graphs is not None else 0,
    )


def _target(model: nn.Module, length: Length, *, graphs: bool = True) -> Target:
    target = Target.of(model, rows=1, max_tokens=length.prompt + length.new, nodes=0)
    if not graphs:
        target.graphs = None
    return target


class _Engine:
    """Tokens through the engine, as a user gets them."""

    def __init__(self, target: Target, length: Length, temperature: float) -> None:
        self.target, self._length = target, length
        self._engine, self._samples = Engine(target), count()
        self._sampling = Sampling(temperature=temperature, max_new_tokens=length.new)

    def rate(self) -> float:
        """Return the tokens per second of one text, without its prompt."""
        tokens = tuple(range(1, 1 + self._length.prompt))
        self._engine.add(Prompt(tokens=tokens, sample=next(self._samples), sampling=self._sampling))
        self._engine.step()
        with timed(self.target.device) as took_s:
            while self._engine.running:
                self._engine.step()
        return (self._length.new - 1) / took_s[0]


class _Pass:
    """Passes of the policy one after the other, without reading their results."""

    def __init__(self, target: Target, length: Length) -> None:
        self.target, self._length = target, length
        self._token = torch.ones(1, 1, dtype=torch.int64, device=target.device)

    def rate(self) -> float:
        """Return the passes per second."""
        first = self._length.prompt
        with timed(self.target.device) as took_s:
            for past in range(first, first + self._length.new):
                self.target.step(self._token, [past])
        return self._length.new / took_s[0]


def decode_part(job: Job) -> Iterator[Row]:
    """Yield one row beside the bandwidth, then more rows and prompts beside `generate`."""
    model = random_model(TINY if job.small else QWEN3_600M, torch.device(job.device))
    length = Length(prompt=8, new=6, repeats=2, copied_bytes=copied_bytes(job)) if job.small else Length()
    yield from decode_one(model, length).rows()
    systems: dict[str, System] = {OURS: Ours(model), GENERATE: Generate(model)}
    for found in _races(job, model, systems):
        yield _race_row(found, GENERATE)


def vllm_part(job: Job) -> Iterator[Row]:
    """Yield rows and prompts beside vLLM, which runs in an environment of its own."""
    model = random_model(TINY if job.small else QWEN3_600M, torch.device(job.device))
    saved = saved_policy(model, Path(job.root) / "gpu" / "policy")
    shapes = race_shapes(job)
    max_tokens, rows = 1 + max(s.prompt + s.new for s in shapes), max(s.rows for s in shapes)
    pythons = {VLLM: Path(job.vllm_python)}
    with rivals(pythons, saved, "bf16", max_tokens, rows, job.device) as (others, reasons):
        for reason in reasons:
            yield Row("vLLM", "not run", reason)
        if not others:
            return
        yield Row("vLLM", others[VLLM].version, "in an environment of its own")
        for found in _races(job, model, {OURS: Ours(model), **others}):
            has_bar = found.shape.rows == 16 and bool(found.shape.new)
            yield _race_row(found, VLLM, WANTED_VLLM if has_bar else None)


def race_shapes(job: Job) -> tuple[Shape, ...]:
    """Return the batches: decoding of 1 and 16 rows, and prompts alone."""
    if job.small:
        return Shape(1, 4, 3), Shape(16, 4, 3), Shape(2, 9)
    return Shape(1, 128, 96), Shape(16, 128, 96), Shape(16, 512)


def _races(job: Job, model: PreTrainedModel, systems: Mapping[str, System]) -> Iterator[Race]:
    config: Any = model.config
    turns = Turns(repeats=2 if job.small else 4, vocabulary=config.vocab_size, limit_s=job.seconds / 6)
    for shape in race_shapes(job):
        yield race_systems(systems, "bf16", shape, turns)


def _race_row(found: Race, other: str, bar: float | None = None) -> Row:
    is_prefill = not found.shape.new
    what = f"{'prefill' if is_prefill else 'decode'} {found.shape} tokens"
    over = found.speedup(OURS, other, prompts=is_prefill)
    if is_prefill:
        rate = found.shape.rows * found.shape.prompt / median(found.first_s[OURS])
    else:
        rate = median(found.rates[OURS])
    wanted = "" if bar is None else f"{bar:g} of {other}"
    passed = None if bar is None else over.middle >= bar
    return Row(what, f"{rate:,.0f} tokens/s", f"{over} of {other}", wanted, passed, rate)


# -- EDiT: step time, waits of the host and memory beside a bare loop, anchors on the device and offloaded


MOST_OVERHEAD, LEAST_HIDDEN = 0.02, 0.9
VOCABULARY = 32_000
BARE, EDIT, OFFLOAD = "bare loop", "EDiT", "EDiT, offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Sizes of the training loops."""

    hidden_size: int = 768
    num_layers: int = 14
    vocabulary: int = VOCABULARY
    seq_len: int = 1024
    batch_size: int = 8
    every: int = 16
    intervals: int = 4
    turns: int = 2


SMALL_TRAINING = Training(
    hidden_size=64, num_layers=2, vocabulary=300, seq_len=16, batch_size=2, every=2, intervals=2
)


@dataclass(frozen=True, slots=True)
class Loop:
    """Measurements of one training loop."""

    step_s: tuple[float, ...]
    """Seconds per step, one value per interval, its round included."""
    peak_bytes: int
    host_syncs: int
    """Times the host waited for the GPU in one step without a round."""
    params: int
    largest_unit: int
    """Parameters of the largest unit."""

    def __add__(self, other: "Loop") -> "Loop":
        """Return the measurements of both turns of a loop."""
        peak, syncs = max(self.peak_bytes, other.peak_bytes), max(self.host_syncs, other.host_syncs)
        return Loop(self.step_s + other.step_s, peak, syncs, self.params, self.largest_unit)


def edit_part(job: Job) -> Iterator[Row]:
    """Yield the loops in turns whose order is reversed, so that a drift of the clock rate cancels out."""
    device, size = torch.device(job.device), SMALL_TRAINING if job.small else Training()
    names = [BARE, EDIT, OFFLOAD] if device.type == "cuda" else [BARE, EDIT]
    loops: dict[str, Loop] = {}
    with _alone(device):
        for turn in range(size.turns):
            for name in reversed(names) if turn % 2 else names:
                made = _loop(size, device, name)
                loops[name] = loops[name] + made if name in loops else made
    bare = loops[BARE]
    for name, found in loops.items():
        overhead = median(found.step_s) / median(bare.step_s) - 1
        step = f"{1e3 * median(found.step_s):.2f} ms"
        beside = "" if name == BARE else f"{percent(overhead, 2)} above the bare loop"
        wanted, passed = (
            ("", None) if name == BARE else (percent(MOST_OVERHEAD, 0), overhead <= MOST_OVERHEAD)
        )
        yield Row(f"{name}, a step", step, beside, wanted, passed, median(found.step_s))
    parameters = f"{bare.params:,} parameters, bf16 autocast, {size.batch_size} x {size.seq_len} tokens"
    yield Row("the loops train", parameters, f"a round every {size.every} steps")
    if device.type == "cuda":
        yield from _cuda_rows(size, loops)


def _cuda_rows(size: Training, loops: Mapping[str, Loop]) -> Iterator[Row]:
    """Yield what only a GPU has: waits of the host, peaks of its memory, copies beside the computation."""
    bare, edit, offload = loops[BARE], loops[EDIT], loops[OFFLOAD]
    for name in (EDIT, OFFLOAD):
        extra = loops[name].host_syncs - bare.host_syncs
        beside = "beyond those of the bare loop, a step without a round"
        yield Row(f"{name}, host syncs", str(extra), beside, "0", extra <= 0, extra)
    extra_bytes, allowed = offload.peak_bytes - bare.peak_bytes, 2 * 4 * offload.largest_unit
    extra_mib, allowed_mib = f"{extra_bytes / MIB:.0f} MiB", f"{allowed / MIB:.0f} MiB, one unit"
    yield Row(f"{OFFLOAD}, peak", extra_mib, "above the bare loop", allowed_mib, extra_bytes <= allowed)
    alone_s = copies_s(offload.params)
    exposed_s = max(0.0, size.every * (median(offload.step_s) - median(edit.step_s)))
    hidden = 1 - exposed_s / alone_s
    beside = f"{1e3 * exposed_s:.1f} of {1e3 * alone_s:.1f} ms per round are not"
    wanted = percent(LEAST_HIDDEN, 0)
    yield Row("copies hidden under compute", percent(hidden), beside, wanted, hidden >= LEAST_HIDDEN, hidden)


def copies_s(num_params: int, num_units: int = 15) -> float:
    """Return the seconds of a round's copies alone: each unit is read twice and written once."""
    device, size = torch.device("cuda"), num_params // num_units
    kept = [
        (torch.zeros(size, device=device), OuterState(torch.zeros(size, device=device)))
        for _ in range(num_units)
    ]
    store = PinnedStore(kept)
    del kept

    def a_round() -> None:
        for _ in range(2):
            for i in range(num_units):
                store.ahead(i + 1)
                anchor, state = store.read(i)
        for i in range(num_units):
            store.write(i, anchor, state)

    return fastest(device, a_round, repeats=3)


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Open a world of this process only: NCCL for tensors on a GPU, Gloo for small rows."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _loop(size: Training, device: torch.device, name: str) -> Loop:
    """Train one model from the same start; nothing of it is left on the device afterwards."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = _trained_model(size).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if name == BARE:
        return _measured(size, device, model, inner, lambda: None, max(p.numel() for p in model.parameters()))
    transport = TorchTransport(timeout_s=60)
    exchange = MeanExchange(transport, offload=name == OFFLOAD)
    config = EditConfig(every=size.every, offload=name == OFFLOAD)
    sync = LayerSync.of(model, inner, exchange=exchange, config=config)
    try:
        with sync:
            return _measured(size, device, model, inner, sync.step, max(unit.numel for unit in sync.units))
    finally:
        transport.close()


def _measured(
    size: Training,
    device: torch.device,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    after: Callable[[], None],
    largest_unit: int,
) -> Loop:
    """Measure a loop.

    The first interval warms up; a step after the last one is watched for host synchronisations.
    """
    samples = torch.randint(0, size.vocabulary, (size.batch_size, size.seq_len + 1), device=device)

    def step() -> None:
        _inner_step(model, inner, samples)
        after()

    def interval() -> float:
        with timed(device) as took_s:
            for _ in range(size.every):
                step()
        return took_s[0] / size.every

    interval()
    step_s = tuple(interval() for _ in range(size.intervals))
    step()  # lands the round that the last interval opened
    is_cuda = device.type == "cuda"
    syncs = host_syncs(step) if is_cuda else 0
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    return Loop(step_s, peak_bytes, syncs, num_parameters(model), largest_unit)


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


def _inner_step(model: nn.Module, inner: torch.optim.Optimizer, samples: Tensor) -> None:
    loss(model, samples, "bf16").backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner.step()
    inner.zero_grad()


def _trained_model(size: Training) -> nn.Module:
    sizes: dict[str, int | float | bool | str] = {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.hidden_size * 3,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // 64,
        "num_key_value_heads": size.hidden_size // 64,
        "tie_word_embeddings": True,
    }
    return build_model(ModelConfig(sizes=sizes), size.vocabulary, size.seq_len, seed=0, eos_id=0)


# -- idle windows: what the node's own work suffers right after a window in which a drafter was trained


MOST_CLOSING_S = 0.005


def windows_part(job: Job) -> Iterator[Row]:
    """Yield how much later work of the node ends that begins as a window closes."""
    device = torch.device(job.device)
    model = random_model(TINY if job.small else QWEN3_600M, device)
    target = Target.of(model, rows=8, max_tokens=128)
    learning = LearningConfig(training=DraftTrainingConfig(warmup_steps=2))
    config = OnlineConfig(learning=learning, memory_bytes=2**22 if job.small else 2**28, max_share=1.0)
    num_windows, open_s, size = (6, 0.05, 128) if job.small else (60, 0.1, 4096)
    with OnlineDrafter.of(target, config=config) as online:
        assert online.drafter is not None
        engine = Engine(target, drafters={"layer": online.drafter})
        engine.sink = online.sink
        sampling = Sampling(temperature=1.0, max_new_tokens=24 if job.small else 64)
        asked = [Prompt(tokens=(i, i + 1, i + 2), rollout=i, sampling=sampling) for i in range(32)]
        for _ in engine.generate(asked):
            pass
        a = torch.randn(size, size, device=device)

        def own_work() -> float:
            with timed(device) as took_s:
                for _ in range(4):
                    a @ a
            return took_s[0]

        alone_s = median([own_work() for _ in range(10)])
        until_s = time.monotonic() + job.seconds / 3
        while not online.status()["steps"] and time.monotonic() < until_s:
            with online.window("round"):
                time.sleep(open_s)
        late_s: list[float] = []
        for _ in range(num_windows):
            with online.window("round"):
                time.sleep(open_s)
            began_s = time.perf_counter()
            own_work()
            late_s.append(time.perf_counter() - began_s - alone_s)
        steps = int(online.status()["steps"])
    if not steps:
        yield Row("idle windows", "not run", "the training of the drafter did not start in time")
        return
    most_s = quantile(late_s, 0.95)
    beside = f"median {1e3 * median(late_s):.2f} ms, {steps} microbatches in {num_windows} windows"
    passed = most_s <= MOST_CLOSING_S
    wanted = f"{1e3 * MOST_CLOSING_S:.0f} ms"
    yield Row("a window closed, 95 of 100", f"{1e3 * most_s:.2f} ms later", beside, wanted, passed, most_s)


# -- speculation: a policy and its drafter trained here; plain decoding beside the choice among all arms


PLAIN, AGAIN_PLAIN, ADAPTIVE = "plain", "plain again", "adaptive"
WANTED_SPEED_UP, FEW_ROWS = 1.5, 4
TRAINING_SHARE, DRAFTER_SHARE = 0.3, 0.15
"""Of the time of the part. Rollouts for the drafter come on top."""


def speculation_part(job: Job) -> Iterator[Row]:
    """Yield acceptance and speed-up by batch size, as many as there is time for."""
    ends_s = time.monotonic() + job.seconds
    recipe = recipe_of(job)
    path = drafter_ready(recipe, Path(job.root) / "policies")
    model = load(recipe.policy, Path(job.root) / "policies")
    module: nn.Module = model
    module.to(job.device)
    cast = Cast(recipe.policy, model, DraftLayer.load(path, model), random_layer(model))
    took_s = 0.0
    for rows in (1, 3) if job.small else (1, 4, 16, 64):
        if time.monotonic() + took_s > ends_s:
            yield Row(f"speculation, {rows} rows", "not run", "no time was left")
            continue
        began_s = time.monotonic()
        yield _speculation(cast, rows, job.small)
        took_s = time.monotonic() - began_s


def recipe_of(job: Job) -> Recipe:
    """Return the policy and the drafter that fit into the time of the part."""
    if job.small:
        return Recipe(policy=Policy(size="quick", minutes=0.05), num_tokens=20_000, minutes=0.05)
    minutes = job.seconds / 60
    policy = Policy(size="25m", minutes=round(TRAINING_SHARE * minutes, 2))
    return Recipe(policy=policy, num_tokens=65_536, minutes=round(DRAFTER_SHARE * minutes, 2))


def _speculation(cast: Cast, rows: int, small: bool) -> Row:
    gc.collect()
    arms = [parse_arm(name) for name in FIXED]
    racers = [
        Contestant(name, engine_of(cast, rows, layer, chooser), stream(cast.policy, 1.0, seed=1))
        for name, layer, chooser in (
            (PLAIN, None, None),
            (AGAIN_PLAIN, None, None),
            (ADAPTIVE, cast.layer, Watched(Goodput(arms))),
        )
    ]
    turn_tokens = 8 if small else 64 * max(1, 8 // rows)
    rates = race(racers, turn_tokens, 3 if small else 5, random.Random(rows))

    def over_plain(name: str) -> Interval:
        return Interval.of([a / b for a, b in zip(rates[name][1:], rates[PLAIN][1:], strict=True)])

    status: Mapping[str, Any] = racers[2].engine.status()
    graphs: Any = racers[2].engine.target
    kept = f", {len(graphs.graphs)} graphs" if graphs.graphs is not None else ""
    beside = f"{status['accepted_length']:.2f} tokens per pass, plain again {over_plain(AGAIN_PLAIN)}{kept}"
    found, has_bar = over_plain(ADAPTIVE), rows <= FEW_ROWS
    wanted = f"{WANTED_SPEED_UP:g} times plain" if has_bar else ""
    passed = found.middle >= WANTED_SPEED_UP if has_bar else None
    return Row(f"speculation, {rows} rows", f"{found} times plain", beside, wanted, passed, found.middle)


# -- the process


PARTS: Mapping[str, Callable[[Job], Iterator[Row]]] = {
    "device": device_part,
    "decode": decode_part,
    "edit": edit_part,
    "windows": windows_part,
    "vllm": vllm_part,
    "speculation": speculation_part,
}


def main(words: Sequence[str]) -> None:
    """Run one part and print each row as JSON as soon as it is known."""
    logging: Any = transformers.logging  # it carries no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    job = Job(**json.loads(words[0]))
    for row in PARTS[job.part](job):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
