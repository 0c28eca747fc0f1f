"""Training runs of unequal nodes in virtual time: real gradients, exchanges and hub, no network.

One thread runs the node whose next step ends first. The same setting gives the same bits on every run of a
machine.
"""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from aedit.async_sgd.inprocess import HubDecisions, InProcessHub, Tamper
from aedit.async_sgd.rules import Average, HubConfig, HubPlan, Nesterov, OuterConfig, Vector
from aedit.clock import VirtualClock
from aedit.edit import EditConfig, HubExchange, HubPace, LayerSync, PenaltyConfig, make_pace
from aedit.launch.config import TrainConfig
from aedit.launch.node import lr_at, make_inners, set_lr
from aedit.proto.agent import Link
from aedit.proto.codecs import codec
from aedit.types import Round
from benchmarks.kit.paced import layout_of
from benchmarks.kit.small_llama import inner_step, llama
from benchmarks.kit.two_domains import Shard, held_out_loss

STEP_S = (0.58, 0.75, 1.51, 3.33)
"""Seconds per step of the four nodes of arXiv:2401.09135."""


Trained = tuple[nn.Module, Sequence[torch.optim.Optimizer]]
"""A model and the optimizers that train it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings common to all methods."""

    seed: int = 0
    iid: bool = True
    step_s: tuple[float, ...] = STEP_S
    warmup_steps: int = 128
    """Inner steps of one model on the batches of all nodes, before the nodes part."""
    steps: int = 320
    """Local inner steps per node, on average."""
    every: int = 16
    in_turn: bool = False
    """Nodes begin one after the other, so that nodes of one speed push at equal distances."""
    lr: float = 3e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    hidden_size: int = 32
    num_layers: int = 1
    seq_len: int = 64
    batch_size: int = 4
    held_out: int = 512
    """Samples of each domain's held-out text."""

    @property
    def nodes(self) -> int:
        return len(self.step_s)

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(lr=self.lr, optimizer=self.optimizer)

    def lr_after(self, local_steps: int) -> float:
        """Return the inner learning rate after `local_steps` local steps of all nodes together."""
        done = self.warmup_steps + local_steps / self.nodes
        return lr_at(done / (self.warmup_steps + self.steps), self.train)

    def shard(self, node: int, *, seed: int = 0) -> Shard:
        return Shard(self.seq_len, 10 * self.seed + seed, node, self.nodes, mixed=self.iid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Method of the nodes of a hub. penalty: of the nodes and of the hub. pace: when a node pushes."""

    hub: HubConfig
    outer: OuterConfig
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    pace: Literal["steps", "dylu", "seconds"] = "dylu"
    tamper: Mapping[int, Tamper] = field(default_factory=dict)
    """Changes of the pushes of some nodes, by node."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """loss: of the last anchors, on held-out text of both domains, nats per byte. seconds: virtual."""

    loss: float
    seconds: float
    rounds: int
    tally: HubDecisions


def warm_up(setting: Setting) -> bytes:
    """Return the model and its optimizer after the warm-up, where all methods start."""
    model = llama(setting.hidden_size, setting.num_layers, setting.seq_len, setting.seed)
    inners = make_inners(model, setting.train)
    shard = Shard(setting.seq_len, 10 * setting.seed + 1, 0, 1, mixed=True)
    for step in range(setting.warmup_steps):
        lr = setting.lr_after((step - setting.warmup_steps) * setting.nodes)
        train_step(model, inners, lr, shard.take(setting.batch_size * setting.nodes))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "inners": [inner.state_dict() for inner in inners]}, buffer)
    return buffer.getvalue()


def train_step(model: nn.Module, inners: Sequence[torch.optim.Optimizer], lr: float, samples: Tensor) -> None:
    """Take one step of all optimizers."""
    for inner in inners:
        set_lr(inner, lr)
    inner_step(model, inners, samples)


def start_model(setting: Setting, start: bytes) -> Trained:
    """Return the model and its optimizers as `warm_up` has left them."""
    saved: dict[str, Any] = torch.load(io.BytesIO(start), weights_only=True)
    model = llama(setting.hidden_size, setting.num_layers, setting.seq_len, setting.seed)
    model.load_state_dict(saved["model"])
    inners = make_inners(model, setting.train)
    for inner, state in zip(inners, saved["inners"], strict=True):
        inner.load_state_dict(state)
    return model, inners


# --- synchronous


def train_together(setting: Setting, start: bytes, outer: Nesterov) -> Outcome:
    """Train with plain DiLoCo (arXiv:2311.08105, algorithm 1), the reference."""
    nodes = [start_model(setting, start) for _ in range(setting.nodes)]
    shards = [setting.shard(node) for node in range(setting.nodes)]
    anchor = _flat(nodes[0][0])
    state = outer.init(anchor)
    rounds = -(-setting.steps // setting.every)
    for number in range(rounds):
        begin = number * setting.every
        end = min(begin + setting.every, setting.steps)
        for (model, inners), shard in zip(nodes, shards, strict=True):
            _adopt(model, anchor)
            for step in range(begin, end):
                lr = setting.lr_after(step * setting.nodes)
                train_step(model, inners, lr, shard.take(setting.batch_size))
        D = anchor - torch.stack([_flat(model) for model, _ in nodes]).mean(0)
        move, state = (Average() if end == setting.steps else outer).update(D, state)
        anchor = anchor - move
    _adopt(nodes[0][0], anchor)
    loss = held_out_loss(nodes[0][0], setting.seq_len, setting.held_out)
    return Outcome(loss, setting.steps * max(setting.step_s), rounds, HubDecisions())


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _adopt(model: nn.Module, flat: torch.Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())  # whose storage they become


# --- asynchronous, with a hub


class VirtualLink(Link, Protocol):
    """The link of a node that lives in virtual time."""

    @property
    def is_member(self) -> bool:
        """Return whether the node is a member."""

    def heartbeat(self, steps_per_s: float) -> None:
        """Say that the node is there and how fast it is."""


@dataclass(slots=True)
class Node:
    """One node. `next_s`: when its step under way ends."""

    sync: LayerSync
    link: VirtualLink
    shard: Shard
    step_s: float
    next_s: float


def train_apart(setting: Setting, start: bytes, method: Method) -> Outcome:
    """Train every node at its own speed, until all together have done the steps."""
    clock = VirtualClock()
    models = [start_model(setting, start) for _ in range(setting.nodes)]
    hub = make_hub(setting, method, models[0][0], clock)
    nodes = [make_node(hub, setting, method, index, pair) for index, pair in enumerate(models)]
    done = 0
    for node in nodes:
        node.sync.__enter__()
    while done < setting.steps * setting.nodes:
        nodes = [node for node in nodes if node.link.is_member]
        node = min(nodes, key=lambda node: node.next_s)
        clock.advance_to(node.next_s)
        for other in nodes:  # a node reports far more often than it steps
            other.link.heartbeat(1 / other.step_s)
        hub.tick()
        sync, samples = node.sync, node.shard.take(setting.batch_size)
        train_step(sync.model, sync.optimizers.outermost, setting.lr_after(done), samples)
        done += 1
        node.sync.step()
        node.next_s += node.step_s
    nodes = [node for node in nodes if node.link.is_member]
    ended_s = clock()
    finish(hub.tick, clock, nodes)
    model = copy.deepcopy(nodes[0].sync.model)
    adopt_anchors(model, hub.hub.anchor, nodes[0].sync)
    loss = held_out_loss(model, setting.seq_len, setting.held_out)
    return Outcome(loss, ended_s, max(node.sync.schedule.last_id for node in nodes), hub.tally)


def make_hub(
    setting: Setting, method: Method, model: nn.Module, clock: VirtualClock, part: tuple[int, int] = (0, 1)
) -> InProcessHub:
    """Return a hub for nodes that train `model`, or the owner of part k of n."""
    plan = HubPlan(
        hub=method.hub,
        outer=method.outer,
        penalty=method.penalty,
        every=interval(setting, method),
        pace=method.pace,
        steps=setting.steps,
        part=part,
    )
    quantiser = None if plan.hub.codec_down == "fp32" else codec(plan.hub.codec_down)
    return InProcessHub(plan, layout_of(model), quantiser=quantiser, clock=clock)


def make_node(
    hub: InProcessHub,
    setting: Setting,
    method: Method,
    index: int,
    trained: Trained,
    shard: Shard | None = None,
) -> Node:
    """Return node number `index` of the setting as a new member; its first step begins now.

    trained: its model and optimizers. shard: its data, by default as the setting says.
    """
    link = hub.link(f"node-{index}", tamper=method.tamper.get(index))
    node = node_of(link, setting, method, index, trained, hub.clock)
    node.shard = shard or node.shard
    return node


def node_of(
    link: VirtualLink,
    setting: Setting,
    method: Method,
    index: int,
    trained: Trained,
    clock: Callable[[], float],
) -> Node:
    """Return node number `index`, which exchanges over `link`."""
    model, inners = trained
    exchange = HubExchange(link, tokens_per_step=setting.batch_size * setting.seq_len, penalty=method.penalty)
    every = interval(setting, method)
    config = EditConfig(every=every, landing="arrival", schedule=method.pace)
    schedule = make_pace(config, link.news)
    if isinstance(schedule, HubPace):
        schedule = HubPace(every, link.news, clock=clock)
    sync = LayerSync.of(model, inners, exchange=exchange, schedule=schedule, config=config)
    step_s = setting.step_s[index]
    late_s = step_s * setting.every * index / setting.nodes if setting.in_turn else 0.0
    return Node(sync, link, setting.shard(index), step_s, clock() + late_s + step_s)


def interval(setting: Setting, method: Method) -> float:
    """Return the interval in steps, or in the seconds in which the nodes take as many on average."""
    if method.pace != "seconds":
        return setting.every
    return setting.nodes * setting.every / sum(1 / step_s for step_s in setting.step_s)


def finish(tick: Callable[[], None], clock: VirtualClock, nodes: list[Node]) -> None:
    """Merge the pushes under way, then the steps taken since. tick: lets the hub do what is due."""
    for _ in range(2):
        for node in nodes:
            sync = node.sync
            if not sync.in_flight:
                sync.begin(Round(sync.schedule.last_id + 1, sync.local_steps - sync.schedule.last_step))
                sync.schedule.last_id, sync.schedule.last_step = sync.schedule.last_id + 1, sync.local_steps
        clock.advance(1000.0)  # longer than the wait for any quorum; heartbeats follow at once
        for node in nodes:
            node.link.heartbeat(1 / node.step_s)
        tick()
        for node in nodes:
            if node.link.is_member:  # a node excluded for its last push gets no answer
                node.sync.finish()


def adopt_anchors(model: nn.Module, anchor_of: Callable[[int], tuple[int, Vector]], sync: LayerSync) -> None:
    """Copy current anchors into `model`. anchor_of: of the hub, by unit. sync: of any of its nodes."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for index, unit in enumerate(sync.units):
            anchor = torch.from_numpy(anchor_of(index)[1].copy())
            for (_, part), name in zip(unit.split(anchor), unit.names, strict=True):
                named[name].copy_(part.view_as(named[name]))
