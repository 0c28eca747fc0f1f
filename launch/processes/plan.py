"""`aedit run --dry-run`: sizes of a run, computed before anything is downloaded or started."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import nn

from aedit.edit import find_units
from aedit.launch.config import (
    FP32_BYTES,
    Placement,
    RunConfig,
    check_memory,
    machine_bytes,
    ranks_per_node,
    state_bytes,
    trains_on_cpu,
)
from aedit.launch.data import load_tokenizer
from aedit.launch.node import check_text_drafter, draft_form, outline
from aedit.launch.processes.run_local import nodes_here
from aedit.proto.agent import STREAMS
from aedit.proto.codecs import codec
from aedit.spec_rollout.drafters import layer_of
from aedit.spec_rollout.engine import EngineLimits
from aedit.types import UserError
from aedit.weights import gather_bytes

WIRES_MBIT = (10, 100, 1000)

MIB = 2**20
SLOTS = "two versions of the policy"
"""Need of a rank and its workers; what else is shared is once per node."""
PROGRAM_BYTES = {
    "node": 500 * MIB,
    "worker": 440 * MIB,
    "drafter's trainer": 440 * MIB,
    "agent": 92 * MIB,
    "hub": 97 * MIB,
    "torchrun": 225 * MIB,
    "aedit run": 140 * MIB,
}
"""Resident memory of each process without anything of the model, with torch for CPUs: benchmarks.memory."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of the processes of one kind on this machine, for the whole run, in bytes."""

    name: str
    number: int
    own: Mapping[str, int]
    """By need."""
    shared: Mapping[str, int]
    """By need, of the memory that each maps and that another process has too."""

    @property
    def resident_bytes(self) -> int:
        """Return the resident memory of one of the processes."""
        return sum(self.own.values()) + sum(self.shared.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run. `units`: name and number of parameters of each, in landing order."""

    config: RunConfig
    nodes: int
    ranks: int
    num_params: int
    units: tuple[tuple[str, int], ...]
    here: int = 1
    """Number of nodes on this machine."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of all parameters."""
    kv_values_per_token: int = 0
    """Numbers that an engine keeps per token of a sample: keys and values of all layers. 0: unknown."""
    drafter_params: int = 0
    """Number of parameters of the drafter that a process beside each rank trains; 0: none does."""

    @property
    def synchronous(self) -> bool:
        """Return whether the warm-up never ends, so that each step is an exchange."""
        return self.config.edit.warmup_steps == "all"

    @property
    def num_trained(self) -> int:
        """Return the number of trained parameters."""
        return sum(numel for _, numel in self.units)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step of one node; with rewards, at most so many answers' tokens."""
        train, rl = self.config.train, self.config.rl
        if self.config.prompts.source:
            return rl.groups * rl.group_size * rl.sampling.max_new_tokens // rl.batches
        return train.batch_size * train.accumulate * self.config.data.seq_len

    @property
    def num_rounds(self) -> int | None:
        """Return the rounds of the run; None if they depend on the nodes' speed.

        They include those at its end, in which each unit takes part once more.
        """
        edit, train = self.config.edit, self.config.train
        if edit.warmup_steps == "all":
            return train.steps
        if edit.schedule == "steps":
            local_steps = max(train.steps - edit.warmup_steps, 0)
            return int(local_steps * edit.fragments // edit.every) + (edit.fragments if local_steps else 0)
        if train.seconds is None:
            return None
        return int(train.seconds * edit.fragments // edit.every) + edit.fragments

    @property
    def round_bytes(self) -> int:
        """Return the mean bytes of the fp32 pseudo-gradients that one node contributes to a round."""
        return self.num_trained * FP32_BYTES // self.config.edit.fragments

    @property
    def wire_bytes(self) -> int:
        """Return the bytes that a node sends per round.

        A ring all-reduce sends 2 (N - 1) / N of the payload; a hub receives the payload as encoded by its
        codec.
        """
        if self.config.has_hub:
            return self._coded_bytes(self.config.hub.codec)
        return 2 * (self.nodes - 1) * self.round_bytes // self.nodes

    @property
    def down_bytes(self) -> int:
        """Return the bytes that a node receives from a hub per round, one new version per unit."""
        return self._coded_bytes(self.config.hub.codec_down)

    def _coded_bytes(self, name: str) -> int:
        coded = sum(codec(name).num_bytes(numel) for _, numel in self.units)
        return coded // self.config.edit.fragments

    def memory(self) -> dict[str, int]:
        """Return the bytes per rank needed for the whole run, without activations and transfer buffers."""
        node = state_bytes(self.config, self.num_params, self.num_trained)
        return {name: size // self.ranks for name, size in node.items()}

    def processes(self) -> list[ProcessMemory]:
        """Return the memory of each kind of process on this machine, without activations.

        Needs that two processes share are in both; a caller that adds them up counts them once per node.
        """
        config, held = self.config, self.num_trained * FP32_BYTES
        hub, ranks, largest = config.hub, self.here * self.ranks, max(numel for _, numel in self.units)
        node, mailbox, slots = self.memory(), dict[str, int](), dict[str, int]()
        others: list[ProcessMemory] = []
        if config.has_hub:
            names = [name for name in ("anchors", "outbox", "error feedback") if node.pop(name, 0)]
            mailbox = dict.fromkeys(names, held)
            if config.edit.landing == "arrival":
                node["values at the last push"] = held // self.ranks
            sent = {"encoded pushes": self.wire_bytes, "units under way": STREAMS * largest * FP32_BYTES}
            others.append(_process("agent", self.here, sent, mailbox))
        if hub.address:
            parts = len(hub.addresses)
            arrays = {"average": 0, "delayed-nesterov": 2}.get(config.outer.kind, 1)
            kept = {"anchors": held // parts, "outer optimizer": arrays * held // parts}
            kept["a unit in merge"] = 3 * largest * FP32_BYTES
            if hub.codec_down != "fp32":
                kept["deltas, at most"] = held // parts
            others.append(_process("hub", parts + len(hub.standbys_of(0)), kept))
        if config.prompts.source and config.rl.engine == "aedit" and config.rl.num_workers:
            weights = self.num_params * _engine_dtype(config).itemsize
            slots = {SLOTS: 2 * weights}
            engine = {"weights": weights, "a version that arrives": weights}
            if weights <= EngineLimits().packed_bytes:
                engine["packed weights"] = weights
            engine["prefix cache, at most"] = EngineLimits().prefix_cache_bytes
            others.append(_process("worker", ranks * config.rl.num_workers, engine, slots))
        if self.drafter_params:
            # Parameters, gradients, two moments, the best so far, and what is published.
            layer = {"features": config.drafter.memory_bytes, "layer": 6 * self.drafter_params * FP32_BYTES}
            others.append(_process("drafter's trainer", ranks, layer))
        torchruns = self.here if config.has_hub else 1
        return [
            _process("node", ranks, node, mailbox | slots),
            *others,
            _process("torchrun", torchruns, {}),
            _process("aedit run", 1, {}),
        ]


def measure(config: RunConfig, placement: Placement) -> Plan:
    """Return the sizes of the run that `config` describes on the machines of `placement`.

    Builds the model without memory for it. Raises UserError if it cannot.
    """
    ranks = ranks_per_node(config, placement)
    model = outline(config, load_tokenizer(config.data))
    if not config.prompts.source:
        check_text_drafter(config.drafter, model)
    try:
        units = find_units(model, config.edit.units)
    except ValueError as error:
        raise UserError(str(error)) from None
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    num_params = sum(map(prod, shapes))
    sizes = tuple((unit.name, unit.numel) for unit in units)
    here, kv = nodes_here(placement), _kv_values(model)
    trained = _drafter_params(config, model)
    return Plan(config, placement.nodes, ranks, num_params, sizes, here, shapes, kv, trained)


def _drafter_params(config: RunConfig, model: Any) -> int:
    """Return the number of parameters of the drafter that a process trains in waits, on a CPU; 0: none."""
    drafter, rl = config.drafter, config.prompts.source and config.rl.engine == "aedit"
    if not (rl and drafter.kind in ("layer", "auto") and drafter.idle_training and trains_on_cpu(config)):
        return 0
    try:
        shape = draft_form(drafter).shape(model.config)
    except ValueError:
        return 0
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in layer_of(shape).state_dict().values())


def _process(
    name: str, number: int, own: Mapping[str, int], shared: Mapping[str, int] | None = None
) -> ProcessMemory:
    return ProcessMemory(name, number, {"program": PROGRAM_BYTES[name], **own}, dict(shared or {}))


def _engine_dtype(config: RunConfig) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp64": torch.float64}.get(config.rl.engine_dtype, torch.float32)


def _kv_values(model: nn.Module) -> int:
    """Return the numbers of a token's keys and values over all layers; 0 for families that name them else."""
    shape: Any = model.config
    heads, layers = getattr(shape, "num_attention_heads", 0), getattr(shape, "num_hidden_layers", 0)
    if not (heads and layers):
        return 0
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return int(2 * layers * (getattr(shape, "num_key_value_heads", None) or heads) * width)


def check_plan_fits(plan: Plan) -> None:
    """Raise UserError if the nodes of this machine cannot fit into its memory."""
    if trains_on_cpu(plan.config):
        check_memory(plan.config, plan.num_params, nodes=plan.here)


def render(plan: Plan) -> str:
    """Return the plan as text, one property per line."""
    config = plan.config
    data, source = config.data, config.model.pretrained or config.model.family
    times = (f"{plan.wire_bytes * 8 / (mbit * 1e6):.3g} s at {mbit} Mbit/s" for mbit in WIRES_MBIT)
    memory = plan.memory()
    rank_bytes = sum(memory.values())
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in memory.items())
    rows = [
        ("run", f"{config.dir}/{config.name}: nodes {plan.nodes}, processes per node {plan.ranks}"),
        ("model", f"{source}, {plan.num_params:,} parameters, {plan.num_trained:,} of them trained"),
        ("units", f"{len(plan.units)}: {_units(plan)}"),
        ("data", f"{data.source}, tokenizer {data.tokenizer}, {data.seq_len} tokens per sample")
        if not config.prompts.source
        else ("prompts", _prompts_line(plan)),
        ("length", _length(plan)),
        ("rounds", _rounds(plan)),
        ("bytes per round", _bytes_line(plan)),
        ("wire time", f"{', '.join(times)}, per {'step' if plan.synchronous else 'round'}"),
        ("memory per rank", f"{_bytes(rank_bytes)} without activations: {parts}"),
        ("rollout engine", _engine_line(plan)),
    ]
    if trains_on_cpu(config):
        rows += _memory_rows(plan)
    return "\n".join(f"{name:<16} {text}" for name, text in rows)


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return a row per kind of process on this machine, and one with the sum: shared memory counts once."""
    rows, whole, regions = list[tuple[str, str]](), 0, dict[str, int]()
    for each in plan.processes():
        whole += each.number * sum(each.own.values())
        regions |= each.shared
        times = f"{each.number} x " if each.number > 1 else ""
        needs = [f"{need} {_bytes(size)}" for need, size in each.own.items() if size]
        needs += [f"shared {need} {_bytes(size)}" for need, size in each.shared.items()]
        rows.append((f"  {each.name}", f"{times}{_bytes(each.resident_bytes)}: {', '.join(needs)}"))
    whole += plan.here * sum(size * (plan.ranks if need == SLOTS else 1) for need, size in regions.items())
    peers = " and peers" if plan.config.swarm.on else ""
    text = f"{_bytes(whole)} of {_bytes(machine_bytes())}, without activations{peers}; by process"
    return [("memory here", text), *rows]


def _units(plan: Plan) -> str:
    """Return the units as text, neighbours of one size together, such as `layers.0 .. layers.5 (6 x 196)`."""
    runs = []
    for numel, units in groupby(plan.units, key=lambda unit: unit[1]):
        first, *others = (name for name, _ in units)
        runs.append(
            f"{first} .. {others[-1]} ({1 + len(others)} x {numel:,})" if others else f"{first} ({numel:,})"
        )
    return ", ".join(runs)


def _length(plan: Plan) -> str:
    train = plan.config.train
    if train.seconds is not None:
        return f"{train.seconds:g} s, {plan.tokens_per_step:,} tokens per step and node"
    mean = " on average" if plan.config.edit.schedule == "seconds" else ""
    most = "at most " if plan.config.prompts.source else ""
    steps = f"{train.steps:,} steps per node{mean}, {most}{plan.tokens_per_step:,} tokens each"
    return f"{steps}: {train.steps * plan.nodes * plan.tokens_per_step:,} tokens in all"


def _rounds(plan: Plan) -> str:
    edit = plan.config.edit
    if plan.synchronous:
        return f"{plan.num_rounds:,}: gradients are averaged at every step"
    number = "as many as fit" if plan.num_rounds is None else f"{plan.num_rounds:,}"
    warmup = f" after {edit.warmup_steps} synchronous steps" if edit.warmup_steps else ""
    group = f", each moves one of {edit.fragments} groups of units" if edit.fragments > 1 else ""
    last = "" if plan.num_rounds is None else f", {edit.fragments} of them at the end"
    return f"{number}: every {edit.every / edit.fragments:g} {edit.schedule}{warmup}{group}{last}"


def _bytes_line(plan: Plan) -> str:
    if plan.config.has_hub:
        hub = plan.config.hub
        up = f"{_bytes(plan.wire_bytes)} up ({hub.codec})"
        return f"{up}, {_bytes(plan.down_bytes)} down ({hub.codec_down}) per new version"
    return f"{_bytes(plan.round_bytes)} per node; a ring all-reduce sends {_bytes(plan.wire_bytes)}"


def _prompts_line(plan: Plan) -> str:
    config, rl = plan.config, plan.config.rl
    rollouts = f"{rl.groups} groups of {rl.group_size} rollouts per batch"
    longest = f"up to {rl.sampling.max_new_tokens} of {config.data.seq_len} tokens each"
    return f"{config.prompts.source}, tokenizer {config.data.tokenizer}, {rollouts}, {longest}"


def _engine_line(plan: Plan) -> str:
    """Return what an engine on a rank of a node takes for weights, as text."""
    if plan.config.prompts.source:
        return _rollouts_line(plan)
    if plan.ranks == 1:
        return "shares the parameters of the trainer"
    parts = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        held, more = plan.num_params * dtype.itemsize, gather_bytes(plan.shapes, plan.ranks, dtype)
        parts.append(f"{_bytes(held)} of weights in {name} and {_bytes(more)} during a hand-over")
    return f"{', or '.join(parts)}, on each rank that has one"


def _rollouts_line(plan: Plan) -> str:
    """Return the memory of a rank for rollouts, as text: weights besides the trainer's, keys and values."""
    rl = plan.config.rl
    dtype = _engine_dtype(plan.config)
    rows = rl.rows or rl.groups // plan.ranks * rl.group_size
    size = rows * plan.config.data.seq_len * plan.kv_values_per_token * dtype.itemsize
    kv = f"{rows} rows with {_bytes(size)} of keys and values"
    weights = _bytes(plan.num_params * dtype.itemsize)
    if rl.num_workers:
        servers = ", which do all work when no server is there" if rl.has_servers else ""
        return f"{rl.num_workers} worker processes with {weights} of weights each, {kv} in all{servers}"
    if plan.ranks == 1 and rl.engine_dtype == "same":
        return f"shares the parameters of the trainer; {kv}"
    more = gather_bytes(plan.shapes, plan.ranks, dtype) if plan.ranks > 1 else 0
    held = f"{weights} of weights and {_bytes(more)} during a hand-over"
    return f"{held}; {kv}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
