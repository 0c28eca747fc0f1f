"""Tests that the journal of a run with every kind of record reproduces the anchors that nodes had."""

import random
import zlib

import numpy as np
import pytest

from aedit.async_sgd.hub import Joiner, NodeReport, parent_hub
from aedit.async_sgd.journal import Ledger, Store
from aedit.async_sgd.rules import (
    Agreed,
    Banned,
    Configured,
    HubConfig,
    Led,
    Merged,
    Mixed,
    OuterConfig,
    Push,
    PushFilterConfig,
    Record,
)
from aedit.edit import EditConfig
from aedit.launch.config import RunConfig
from aedit.launch.hub import anchors_of, records_of, replayed
from aedit.launch.hub.folder import claim, make_hub
from aedit.proto.codecs import codec
from aedit.types import Layout, TensorLayout, UnitLayout, UserError

SHAPES = (((60, 50), (50,)), ((7, 11),))
LAYOUT = Layout(
    tuple(
        UnitLayout(f"u{i}", tuple(TensorLayout(f"w{j}", shape) for j, shape in enumerate(shapes)))
        for i, shapes in enumerate(SHAPES)
    )
)
NODES = ("a", "b", "c", "d")
RULES = {
    "every arrival": (
        HubConfig(address="h:1", quorum=1, weights="steps"),
        OuterConfig(kind="delayed-nesterov", delay=2, activation=0.1, look_ahead=True),
    ),
    "mean": (
        HubConfig(address="h:1", quorum="all", weights="penalty", codec_down="e3m0"),
        OuterConfig(),
    ),
    "topk": (
        HubConfig(address="h:1", quorum="all", weights="uniform", codec="topk", codec_down="topk"),
        OuterConfig(kind="average", lr=1.0),
    ),
    "ternary": (
        HubConfig(address="h:1", quorum="all", weights="uniform", codec="ternary", codec_down="ternary"),
        OuterConfig(),
    ),
    "rda": (
        HubConfig(address="h:1", quorum=2, merge="rda", weights="tokens", codec_down="int8"),
        OuterConfig(),
    ),
    **{
        merge: (
            HubConfig(address="h:1", quorum=3, merge=merge, weights="steps", codec_down="bf16"),
            OuterConfig(kind="average", lr=1.0),
        )
        for merge in ("median", "geometric-median", "multi-krum", "centered-clip")
    },
    "trimmed": (
        HubConfig(address="h:1", quorum=3, merge="trimmed", weights="uniform", codec_down="bf16"),
        OuterConfig(kind="average", lr=1.0),
    ),
}


def run_config(rule):
    hub, outer = RULES[rule]
    settings = {name: getattr(hub, name) for name in hub.__dataclass_fields__}
    settings |= {"parent": "h:2", "parent_every": 3, "lease_samples": 64, "expire_s": 8.0, "codec": "int8"}
    settings |= {"push_filter": PushFilterConfig(violations=2)}
    timed = {"schedule": "seconds", "every": 2.0} if rule == "mean" else {"every": 10}
    edit = EditConfig(landing="arrival", **timed)
    return RunConfig(hub=HubConfig(**settings), outer=outer, edit=edit)


class Life:
    """Random actions of a hub over a folder, its nodes and its parent, from one seed."""

    def __init__(self, folder, rule):
        self.folder, self.config, self.chance = folder, run_config(rule), random.Random(rule)
        folder.mkdir()
        claim(folder, self.config, (0, 1))
        self.now, self.draws = 0.0, 0
        self.start()

    def start(self):
        """Recover the hub from its folder, also after a kill, and start a new term."""
        self.hub = make_hub(self.config, (0, 1))
        store = Store(self.folder, fsync=False)
        self.ledger = Ledger(self.hub, store.recover(self.hub), store, clock=lambda: self.now)
        self.commit([Led(self.hub.state.term + 1)])

    def commit(self, decided):
        for record in decided:
            computed = self.hub.compute(record) if isinstance(record, Merged | Mixed) else None
            self.ledger.durable(self.ledger.commit([record], computed))

    def payload(self, unit, name):
        self.draws += 1
        values = np.random.default_rng(self.draws).standard_normal(LAYOUT.units[unit].numel, dtype=np.float32)
        data = codec(name).encode(values)
        return values, self.ledger.store_payload(name, values.size, zlib.crc32(data), data)

    def join(self, name):
        state = self.hub.state
        if name not in state.names or not state.members[state.names[name]].excluded:
            joiner = Joiner(name=name, layout=LAYOUT, facts=(("seed", "0"),), num_samples=99)
            self.commit(self.hub.join(joiner, self.now))

    def found(self):
        for name in NODES:
            self.join(name)
        for unit in range(len(SHAPES)):
            self.push(0, unit, base=0)
            self.tick()

    def push(self, node, unit, base=None, wrong=False):
        member, version = self.hub.state.members[node], self.hub.state.units[unit].version
        if not member.live:
            return
        values, payload = self.payload(unit, "fp32" if base == 0 else "int8")
        ends = np.cumsum([tensor.numel for tensor in LAYOUT.units[unit].tensors])[:-1]
        norms = tuple(float(np.linalg.norm(part.astype(np.float64))) for part in np.split(values, ends))
        push = Push(
            node=node,
            unit=unit,
            seq=member.received.get(unit, 0) + 1,
            base=max(1, version - self.chance.randrange(3)) if base is None else base,
            steps=0 if base == 0 else self.chance.randrange(1, 9),
            tokens=100,
            values=payload,
            norms=(float("nan"),) * len(norms) if wrong else norms,
        )
        self.commit(self.hub.offer(push, self.now))

    def tick(self):
        while decided := self.hub.tick(self.now):
            self.commit(decided)

    def draw(self, node):
        if self.hub.state.members[node].live:
            self.commit(self.hub.lease(node, 32, self.now))
            for start, end in self.hub.state.pool.outstanding(node)[:1]:
                self.commit(self.hub.use(node, [(start, (start + end) // 2)]))

    def speak_up(self):
        """Send due records to the parent; at random it mixes them in or they are withdrawn."""
        for unit in parent_hub.due(self.hub):
            self.commit([parent_hub.send(self.hub, unit)])
            if self.chance.random() < 0.3:
                self.commit([parent_hub.withdraw(unit)])
            else:
                self.commit([parent_hub.mix(self.hub, unit, self.payload(unit, "fp32")[1])])

    def go_on(self, turns):
        """Take `turns` turns of all nodes; node 3 sends no heartbeat after 12 s."""
        for turn in range(turns):
            self.now += 0.5
            for node, member in enumerate(self.hub.state.members):
                if member.live and (node != 3 or self.now < 12):
                    self.hub.heartbeat(node, NodeReport(state="training", steps_per_s=1.0 + node), self.now)
            for node in range(len(NODES)):
                self.draw(node)
                self.push(node, self.chance.randrange(len(SHAPES)), wrong=node == 2 and turn % 8 == 7)
            if turn == 5:
                self.commit([Banned(f"server-{self.now}", "ab" * 32, "other tokens", self.now)])
            if turn in (2, 9):
                decided = Configured(self.hub.state.term, turn, 7, (7, 8), (9,))
                self.commit([decided, Agreed(*decided.ballot)][: 2 if turn == 2 else 1])
            if turn == 3 and self.hub.state.members[2].live:
                self.commit(self.hub.garbled(2, 0, "damaged: chunk at byte 0"))
            if turn % 10 == 9:
                self.commit(self.hub.leave(1))
                self.join(NODES[1])
            self.tick()
            self.speak_up()

    @property
    def anchors(self):
        return {unit: self.hub.anchor(unit)[1].copy() for unit in self.hub.state.units}


def lived(folder, rule):
    life = Life(folder, rule)
    life.found()
    life.go_on(15)
    life.start()
    life.go_on(10)
    life.ledger.snapshot()
    life.go_on(10)
    life.start()
    life.go_on(20)
    return life


@pytest.mark.parametrize("rule", RULES)
def test_a_journal_with_every_kind_of_record_gives_the_same_anchors_bit_for_bit(tmp_path, rule):
    life = lived(tmp_path / "hub", rule)
    kinds = {type(record).__name__ for record in records_of(life.folder)}
    wanted = {kind.__name__ for kind in Record.__args__}
    # Without rounds none is opened, and merges tell the time, too.
    assert wanted - kinds <= (set() if rule == "mean" else {"RoundOpened", "Ticked"})
    assert any(member.excluded for member in life.hub.state.members)
    assert all(unit.version > 10 for unit in life.hub.state.units.values())
    for anchors in (anchors_of(life.folder), anchors_of(life.folder, from_the_beginning=True)):
        for unit, anchor in life.anchors.items():
            assert anchors[unit].tobytes() == anchor.tobytes()
    again = replayed(life.folder, from_the_beginning=True)
    assert again.state.members == life.hub.state.members
    assert again.state.pool == life.hub.state.pool


def test_a_journal_whose_beginning_is_gone_says_so(tmp_path):
    life = lived(tmp_path / "hub", "mean")
    life.ledger.snapshot()
    with pytest.raises(UserError, match="are not all from 1 on"):
        anchors_of(life.folder, from_the_beginning=True)


def test_a_snapshot_is_due_after_so_much_journal_and_a_restart_does_not_count_anew(tmp_path):
    life = Life(tmp_path / "hub", "mean")
    life.found()
    life.go_on(5)
    for _ in range(2):
        size = life.ledger.journal.position[1]
        assert life.ledger.snapshot_is_due(size)
        assert not life.ledger.snapshot_is_due(size + 1)
        life.start()


def test_a_snapshot_is_not_due_for_less_journal_than_twice_itself(tmp_path):
    life = Life(tmp_path / "hub", "mean")
    life.found()
    saved = life.ledger.snapshot()
    assert saved == life.ledger.store.saved_bytes() > 0
    began = life.ledger.journal.position[1]
    for restarts in range(40):
        grown = life.ledger.journal.position[1] - (0 if restarts else began)
        assert life.ledger.snapshot_is_due(1) == (grown >= 2 * saved)
        life.go_on(1)
        life.start()
    assert life.ledger.snapshot_is_due(1)
