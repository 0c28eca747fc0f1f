"""A hub in memory that answers when a test lets it, links to it, and merging by plain addition."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from aedit.edit import EditConfig, HubExchange, LayerSync, PenaltyConfig, find_units
from aedit.proto.agent import Answer, mailbox
from aedit.types import News, Verdict

OFF = PenaltyConfig(detector="off")


@dataclass
class Push:
    node: int
    unit: int
    seq: int
    base: int
    steps: int
    tokens: int
    values: np.ndarray


@dataclass
class Hub:
    """Hub in memory: anchor - D for every merged push, exact where fp32 is."""

    anchors: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    nodes: int = 0
    pushes: list = field(default_factory=list)
    judge: object = lambda push: Verdict.MERGED

    def decide(self, push):
        if not push.steps:  # nothing is sent
            return Verdict.NONE
        self.pushes.append(push)
        verdict = self.judge(push)
        if verdict == Verdict.MERGED:
            self.versions[push.unit] += 1
            self.anchors[push.unit] = self.anchors[push.unit] - push.values
        return verdict


class SharedLink:
    """Link of one of several ranks; `box` is the memory they share, and the first rank decides on its own."""

    def __init__(self, box, rank, hub):
        self.box, self.rank, self.hub = box, rank, hub
        self.anchors, self.outbox, self.bytes_sent = box.anchors, box.outbox, 0
        self.away = False

    def join(self, timeout_s):
        assert self.rank == 0
        self.hub.anchors = [anchor.copy() for anchor in self.anchors]
        self.hub.versions = [1] * len(self.anchors)
        return self.hub.versions

    def written(self, unit, seq):
        self.box.written(unit, self.rank, seq)

    def send(self, unit, seq, *, base, steps, tokens, used=0):
        assert self.rank == 0
        self.box.order(unit, seq, (base, steps, tokens, used))

    def answer(self, unit, seq):
        if self.rank == 0 and not self.away and self.box.all_written(unit, seq):
            self.work(unit, seq)
        return self.box.answered(unit, seq)

    def work(self, unit, seq):
        ordered, base, steps, tokens, *_ = self.box.orders()[unit].tolist()
        if ordered != seq or self.box.answered(unit, seq):
            return
        verdict = self.hub.decide(Push(0, unit, seq, base, steps, tokens, self.outbox[unit].copy()))
        self.anchors[unit][:] = self.hub.anchors[unit]
        self.box.answer(unit, Answer(seq, self.hub.versions[unit], verdict))

    def news(self):
        return News(nodes=1 + self.rank, total_steps=self.rank)  # the first rank's word is all ranks'

    def leave(self, timeout_s):
        assert self.rank == 0


class HubLink:
    """Trainer's end of a node agent that takes no time.

    `work` decides on what was sent; it runs whenever an answer is asked for, unless `away`. The owners of the
    units in `lost` cannot be reached.
    """

    def __init__(self, hub, model, units="auto"):
        numels = [unit.numel for unit in find_units(model, units)]
        self.hub, self.node = hub, hub.nodes
        hub.nodes += 1
        self.anchors = [np.full(n, np.nan, np.float32) for n in numels]
        self.outbox = [np.full(n, np.nan, np.float32) for n in numels]
        self.bytes_sent = 0
        self.away, self.lost = False, set()
        self.told = News(pace_steps=0, nodes=1)
        self.blocks = []
        self.rest = {}
        self.left = False
        self._there = Counter()
        self._sent, self._answers = {}, {}

    def join(self, timeout_s):
        if not self.hub.anchors:
            self.hub.anchors = [anchor.copy() for anchor in self.anchors]
            self.hub.versions = [1] * len(self.anchors)
        for mine, newest in zip(self.anchors, self.hub.anchors, strict=True):
            mine[:] = newest
        return tuple(self.hub.versions)

    def written(self, unit, seq):
        self._there[unit] = seq

    def send(self, unit, seq, *, base, steps, tokens, used=0):
        assert unit not in self._sent, "one exchange of a unit at a time"
        self._sent[unit] = Push(self.node, unit, seq, base, steps, tokens, self.outbox[unit].copy())

    def work(self):
        """Let the hub decide on all that was sent, and take the newest anchors of those units."""
        for unit, push in list(self._sent.items()):
            assert self._there[unit] == push.seq
            if unit in self.lost:
                continue
            del self._sent[unit]
            verdict = self.hub.decide(push)
            self.anchors[unit][:] = self.hub.anchors[unit]
            self._answers[unit, push.seq] = Answer(push.seq, self.hub.versions[unit], verdict)

    def answer(self, unit, seq):
        if not self.away:
            self.work()
        return self._answers.get((unit, seq))

    def news(self):
        return self.told

    def tell(self, progress):
        pass

    def leases(self, upto=0):
        return self.blocks

    def residuals(self):
        return self.rest

    def leave(self, timeout_s):
        assert not self._sent
        self.left = True


def hub_node(model, link, *, inner=None, schedule=None, max_steps_ahead=1000, penalty=OFF, **config):
    """Return `model` as a node of `link`'s hub that lands on arrival, and its inner optimizer."""
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = HubExchange(link, max_steps_ahead=max_steps_ahead, tokens_per_step=10, penalty=penalty)
    config = EditConfig(**{"every": 10_000, "landing": "arrival", "timeout_s": 5, **config})
    return LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config), inner


def anchors_of(hub, sync):
    """Return the hub's anchors by parameter name."""
    found = {}
    for unit, anchor in zip(sync.units, hub.anchors, strict=True):
        parts = torch.from_numpy(anchor.copy()).split([p.numel() for p in unit.params])
        found |= {n: x.view(p.shape) for n, x, p in zip(unit.names, parts, unit.params, strict=True)}
    return found


def move_sharded(model, rng):
    """Take an inner step by numbers that fp32 adds without rounding, every rank its part.

    Returns the whole step, by name.
    """
    moved = {}
    for name, p in model.named_parameters():
        moved[name] = torch.randint(-512, 512, p.shape, generator=rng) / 1024
        part = moved[name]
        if isinstance(p, DTensor):
            part = distribute_tensor(part, p.device_mesh, p.placements, src_data_rank=None)
        with torch.no_grad():
            p.add_(part)
    return moved


def box_of(model, rank, size):
    """Return the memory that the ranks of a node share, for `SharedLink`."""
    path = [None]
    if rank == 0:
        box = mailbox.create_mailbox([unit.numel for unit in find_units(model)], size, False)
        path = [box.path]
    dist.broadcast_object_list(path)
    box = box if rank == 0 else mailbox.attach_mailbox(path[0])
    dist.barrier()
    return box
