"""Measure rollouts on one GPU: decoding against its memory bandwidth, and the gain of speculation.

    python -m benchmarks.rollout_gpu [--size 100m] [--minutes M] [--batches 1,2,4] [--quick]

Three parts: decoding one sample with a model of the shape of Qwen3-0.6B; what
`benchmarks.rollout` measures, for a policy and a drafter trained here, on the GPU; and the memory of the
recorded graphs. Needs a CUDA device.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.kit import tables
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report
from benchmarks.policies import ROOT, Kind, Policy, load
from benchmarks.policies import Size as PolicySize
from benchmarks.rollout import (
    FIXED,
    Cast,
    Contestant,
    Found,
    Size,
    Theirs,
    engine_of,
    line,
    measure_cell,
    random_layer,
    stream,
    whole_numbers,
    without_stop,
)

# -- Compare decoding of one sample with the device's memory bandwidth.


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


# -- the benchmark


ABOUT = "Decoding and speculation on one GPU."
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL = Size(repeats=5, turn_tokens=128, their_tokens=96, their_repeats=2, drains=1, drain_rows=64)
QUICK = Size(repeats=1, turn_tokens=16, their_tokens=16, their_repeats=1, drains=1, drain_rows=8)
FULL_LENGTH = Length()
QUICK_LENGTH = Length(prompt=16, new=24, repeats=2, copied_bytes=1 << 26)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement, with the device."""

    recipe: Recipe
    """Of the drafter, and so of its policy."""
    device: str = "cuda"
    root: Path = ROOT
    batches: tuple[int, ...] = BATCHES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    size: Size = FULL
    length: Length = FULL_LENGTH


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of an engine's graphs after a turn with all arms."""

    rows: int
    num_policy: int
    num_drafter: int
    graph_bytes: int
    kv_bytes: int


def cast_on(plan: Plan) -> Cast:
    """Return policy and drafter on the plan's device, in fp32; train them if they do not exist."""
    path = drafter_ready(plan.recipe, plan.root)
    model = load(plan.recipe.policy, plan.root)
    module: nn.Module = model
    module.to(plan.device)
    return Cast(plan.recipe.policy, model, DraftLayer.load(path, model), random_layer(model))


def speculate(plan: Plan, cast: Cast, say: Callable[[str], None]) -> Found:
    """Measure each temperature and batch, without assisted generation, for lack of a smaller policy."""
    found = Found()
    for temperature in plan.temperatures:
        model = without_stop(cast.model)
        theirs = Theirs(cast.policy, model, None, plan.size.their_tokens, temperature)
        for rows in plan.batches:
            found.cells.append(measure_cell(cast, theirs, rows, plan.size))
            say(line(found.cells[-1]))
    return found


def pools(cast: Cast, batches: Sequence[int], turn_tokens: int) -> list[Pool]:
    """Return the graph memory of an engine that chooses among all arms, for each batch."""
    return [_pool(cast, rows, turn_tokens) for rows in batches]


def memory(found: Sequence[Pool]) -> Report:
    """Return the table of graph memory."""
    rows = [
        (
            str(one.rows),
            str(one.num_policy),
            str(one.num_drafter),
            f"{one.graph_bytes / MIB:.0f}",
            f"{one.kv_bytes / MIB:.0f}",
        )
        for one in found
    ]
    columns = ("batch", "graphs of the policy", "of the drafter", "their MiB", "KV cache, MiB")
    return Report(
        "memory of recorded graphs", (), columns, tuple(rows), (), {"pools": [asdict(one) for one in found]}
    )


def _pool(cast: Cast, rows: int, turn_tokens: int) -> Pool:
    gc.collect()
    engine = engine_of(cast, rows, cast.layer, Goodput([parse_arm(name) for name in FIXED]))
    Contestant("adaptive", engine, stream(cast.policy, 1.0, seed=2)).turn(turn_tokens * rows)
    drafter = engine.drafters["layer"]
    assert isinstance(drafter, LayerDrafter)
    assert isinstance(engine.target, Target)
    both = [graphs for graphs in (engine.target.graphs, drafter.graphs) if graphs is not None]
    sizes = [len(graphs) for graphs in both] or [0, 0]
    num_bytes = sum(graphs.num_bytes for graphs in both)
    return Pool(rows, sizes[0], sizes[1], num_bytes, engine.target.kv_bytes_reserved)


def measure(plan: Plan, sizes: dict[str, Any], quick: bool) -> list[Report]:
    """Run all three parts. sizes: of the model that only decodes."""
    decoded = decode(random_model(sizes, torch.device(plan.device)), plan.length)
    gc.collect()
    cast = cast_on(plan)
    found = speculate(plan, cast, Console(stderr=True).print)
    held = memory(pools(cast, plan.batches, plan.size.turn_tokens))
    return [report(decoded, quick), *found.reports(quick), held]


def _plan(args: argparse.Namespace) -> Plan:
    if args.quick:
        policy = Policy(task=args.task, size="quick", minutes=0.2)
        recipe = Recipe(policy=policy, num_tokens=40_000, minutes=0.1)
        batches = args.batches or (1, 4)
        return Plan(recipe=recipe, root=args.root, batches=batches, size=QUICK, length=QUICK_LENGTH)
    policy = Policy(task=args.task, size=args.size, minutes=args.minutes)
    recipe = Recipe(policy=policy, minutes=args.drafter_minutes)
    return Plan(recipe=recipe, root=args.root, batches=args.batches or BATCHES)


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=get_args(Kind), default="scratchpad", help="of the policy that is trained")
    add("--size", choices=get_args(PolicySize), default="100m", help="of the policy that is trained")
    add("--minutes", type=float, default=15.0, help="of its training")
    add("--drafter-minutes", type=float, default=4.0, help="of its drafter's")
    add("--batches", type=whole_numbers, metavar="B,B,...", help=f"usually {','.join(map(str, BATCHES))}")
    add("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report] | str:
    if not torch.cuda.is_available():
        return "needs a CUDA device: not run"
    return measure(_plan(args), QWEN3_600M, args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("rollout_gpu", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
