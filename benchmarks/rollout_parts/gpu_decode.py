"""Compare decoding of one sample with the device's memory bandwidth.

Every weight, and every key and value, is read once for each token. The model has the shape of Qwen3-0.6B and
random weights in bf16: speed does not depend on their values.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report

WANTED_SHARE = 0.6
GRAPHS, AGAIN, EAGER, WARM, PASS = "graphs", "graphs again", "no graphs", "graphs, T = 1", "the pass alone"
QWEN3_600M = {
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
}
MIB = 2**20
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Number of tokens decoded and bytes copied."""

    prompt: int = 128
    new: int = 256
    """Tokens of one turn."""
    repeats: int = 11
    """Turns of each contestant that count."""
    copied_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """Results of the measurement."""

    device: str
    parameters: int
    token_bytes: float
    """Weights, and keys and values of a text of the mean length."""
    copy_bytes_per_s: float
    """Read and written."""
    rates: dict[str, tuple[float, ...]]
    """Tokens per second by contestant and turn."""
    num_graphs: int
    graph_bytes: int
    kv_bytes: int

    @property
    def most(self) -> float:
        """Return the tokens per second that the memory bandwidth allows."""
        return self.copy_bytes_per_s / self.token_bytes

    def share(self, name: str) -> float:
        return median(self.rates[name]) / self.most

    def over(self, name: str, other: str) -> Interval:
        """Return the ratio of two contestants within each turn."""
        return Interval.of([a / b for a, b in zip(self.rates[name], self.rates[other], strict=True)])


def random_model(sizes: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """Return a model in bf16, created on the device."""
    with torch.device(device):
        model: PreTrainedModel = _auto.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.train(False)
    return model


def decode(model: PreTrainedModel, length: Length) -> Decoded:
    """Run all contestants in turns of random order, after one-time work is done."""
    turns = _contestants(model, length)
    for turn in turns.values():
        turn.rate()
    rng = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(length.repeats):
        for name in rng.sample(list(turns), len(turns)):
            rates[name].append(turns[name].rate())
    target = turns[GRAPHS].target
    slots = length.prompt + length.new / 2
    weights = {parameter.data_ptr(): parameter for parameter in model.parameters()}.values()
    return Decoded(
        device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
        parameters=sum(parameter.numel() for parameter in weights),
        token_bytes=sum(p.numel() * p.element_size() for p in weights) + slots * target.read_kv(0, 1).nbytes,
        copy_bytes_per_s=copy_speed(model.device, length.copied_bytes),
        rates={name: tuple(values) for name, values in rates.items()},
        num_graphs=len(target.graphs) if target.graphs is not None else 0,
        graph_bytes=target.graphs.num_bytes if target.graphs is not None else 0,
        kv_bytes=target.kv_bytes_reserved,
    )


def copy_speed(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """Return the bytes read and written per second by a copy within the device, the best of `repeats`."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        with _timed(device) as took_s:
            target.copy_(source)
        seconds += took_s
    return 2 * num_bytes / min(seconds[1:])


def report(found: Decoded, quick: bool) -> Report:
    """Return the table and bars."""
    share, again = found.share(GRAPHS), found.over(AGAIN, GRAPHS)
    noise = max(abs(again.high - 1), abs(again.low - 1))
    return Report(
        "decoding one sample, bf16",
        (
            f"{found.device}, {found.parameters:,} random parameters; {found.token_bytes / 1e9:.3f} GB per"
            f" token; a copy moves {found.copy_bytes_per_s / 1e9:,.0f} GB/s: at most {found.most:,.0f}/s.",
            f"{found.num_graphs} graphs in {found.graph_bytes / MIB:.0f} MiB, keys and values in"
            f" {found.kv_bytes / MIB:.0f} MiB. Medians; ratios within a turn [95 % by bootstrap].",
        ),
        ("how", "tokens/s", "of the bound", "over no graphs"),
        tuple(_row(found, name) for name in found.rates),
        (
            Bar(
                f"captured graphs: {percent(share)} of the bandwidth bound, bar {percent(WANTED_SHARE, 0)}",
                None if quick else share >= WANTED_SHARE,
            ),
            Bar(
                f"graphs over graphs within {percent(noise)} of 1, bar 3 %", None if quick else noise <= 0.03
            ),
        ),
        asdict(found),
    )


def _row(found: Decoded, name: str) -> tuple[str, ...]:
    rate = f"{median(found.rates[name]):,.0f}"
    return name, rate, percent(found.share(name)), str(found.over(name, EAGER))


def _contestants(model: PreTrainedModel, length: Length) -> dict[str, "_Engine | _Pass"]:
    return {
        GRAPHS: _Engine(_target(model, length), length, 0.0),
        AGAIN: _Engine(_target(model, length), length, 0.0),
        EAGER: _Engine(_target(model, length, graphs=False), length, 0.0),
        WARM: _Engine(_target(model, length), length, 1.0),
        PASS: _Pass(_target(model, length), length),
    }


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
        with _timed(self.target.device) as took_s:
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
        with _timed(self.target.device) as took_s:
            for past in range(first, first + self._length.new):
                self.target.step(self._token, [past])
        return self._length.new / took_s[0]


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that afterwards holds the seconds until the device had done all its work."""
    took_s: list[float] = []
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began_s = time.perf_counter()
    yield took_s
    wait()
    took_s.append(time.perf_counter() - began_s)
