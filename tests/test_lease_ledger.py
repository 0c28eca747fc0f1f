"""Tests the ledger of leases of the fault tests: it holds for the hub, and breaks with each broken hub.

And how far nodes lease ahead: the hub's state machine and the stocks of nodes run on one virtual clock.
"""

import random
from collections import Counter

import numpy as np
import pytest
from kit.hub_journal import check_leases
from kit.hub_machine import World, config, plan

from aedit.async_sgd.hub.pool import Pool
from aedit.async_sgd.rules import Accepted, Used
from aedit.launch.data.order import samples_at
from aedit.proto.agent import Progress
from aedit.proto.agent.leases import Stock

LEASE = 7
lease, use = Pool.lease, Pool.use


def run_of(seed):
    """Return world and trained positions of a run whose nodes lease, train, report, leave and die."""
    chance, world = random.Random(seed), World(plan(config(lease_samples=LEASE, expire_s=5.0)))
    held, kept = {}, []
    for _ in range(150):
        name = chance.choice("abc")
        if name not in held:
            node = world.join(name)
            held[name] = (node, [])
            continue
        node, blocks = held[name]
        act = chance.random()
        if act < 0.3:
            blocks += [[start, start, end] for start, end in world.lease(node, chance.randrange(1, LEASE))]
        elif act < 0.85 and blocks:
            block = blocks[0]
            upto = chance.randrange(block[1], block[2] + 1)
            kept += range(block[1], upto)
            world.do(world.hub.use(node, [(block[0], upto)]))
            block[1] = upto
            if upto == block[2]:
                del blocks[0]
        elif act > 0.95:
            world.do(world.hub.leave(node))
            del held[name]
    return world, kept


def check(runs):
    for world, kept in runs:
        check_leases(world.journal, world.hub.state.pool, kept)


def test_the_ledger_of_the_hub_holds():
    runs = [run_of(seed) for seed in range(10)]
    check(runs)
    assert min(len(kept) for _, kept in runs) > 50


def forgets_what_comes_back(pool, node):
    pool.leases.pop(node, {})


def gives_back_what_is_used(pool, node):
    blocks = [(start, end) for start, (_, end) in pool.leases.pop(node, {}).items()]
    pool.returned = sorted([*pool.returned, *blocks])


def leaves_on_offer_what_it_leases(pool, node, start, end):
    pool.watermark = max(pool.watermark, end)
    pool.leases.setdefault(node, {})[start] = (start, end)


def leaves_one_out(pool, node, start, end):
    lease(pool, node, start, end)
    pool.watermark += end == pool.watermark


def uses_one_more(pool, node, start, upto):
    use(pool, node, start, upto + 1)


def uses_the_whole_lease(pool, node, start, upto):
    pool.leases.get(node, {}).pop(start, None)


def does_not_note_use(pool, node, start, upto):
    pass


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("give_back", forgets_what_comes_back),
        ("give_back", gives_back_what_is_used),
        ("lease", leaves_on_offer_what_it_leases),
        ("lease", leaves_one_out),
        ("use", uses_one_more),
        ("use", uses_the_whole_lease),
        ("use", does_not_note_use),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_hub_with_broken_leases_breaks_the_ledger(method, broken, monkeypatch):
    monkeypatch.setattr(Pool, method, broken)
    runs = [run_of(seed) for seed in range(10)]
    with pytest.raises(AssertionError):
        check(runs)


@pytest.mark.parametrize("change", ["twice", "lost", "foreign"])
def test_trained_positions_that_differ_from_the_journal_break_the_ledger(change):
    world, kept = run_of(0)
    changed = {"twice": [*kept, kept[0]], "lost": kept[1:], "foreign": [*kept, 10**6]}[change]
    with pytest.raises(AssertionError, match="trained twice"):
        check_leases(world.journal, world.hub.state.pool, changed)


# -- how far nodes lease ahead

GROUPS, BEAT_S, LASTS_S = 8, 0.5, 30.0


class Trainer:
    """Draws `GROUPS` positions per step, and reports them as used at the end of each round of 10 steps."""

    def __init__(self, run, name, steps_per_s):
        self.run, self.node, self.steps_per_s = run, run.world.join(name), steps_per_s
        self.stock = Stock(samples_per_step=GROUPS, lasts_s=LASTS_S, most_steps=1024)
        self.given, self.trained, self.used, self.steps, self.due_s, self.busy_s = [], [], 0, 0, 0.0, 0.0
        self.starved_s = 0.0

    def turn(self, now_s):
        """Train the steps that are due by now, as far as there are samples."""
        while self.due_s <= now_s:
            self.give()
            if len(self.given) < len(self.trained) + GROUPS:
                self.starved_s += BEAT_S
                self.due_s = now_s + BEAT_S
                return
            self.trained += self.given[len(self.trained) : len(self.trained) + GROUPS]
            self.steps, self.busy_s = self.steps + 1, self.busy_s + 1 / self.steps_per_s
            self.due_s += 1 / self.steps_per_s
            if self.steps % 10 == 0:
                self.used = len(self.trained)

    def give(self):
        progress = Progress(self.steps, busy_s=self.busy_s, used=self.used, drawn=len(self.trained))
        self.stock.see(progress, len(self.trained) + GROUPS)
        self.given += [position for block in self.stock.give() for position in range(*block)]

    def beat(self, now_s):
        hub, consumed = self.run.world.hub, self.stock.leases.consumed(self.used)
        self.run.world.do(hub.use(self.node, consumed))
        self.stock.settle(self.stock.leases.known(consumed))
        self.stock.hub_answered(now_s)
        if missing := self.stock.missing():
            self.stock.more(self.run.world.lease(self.node, missing))
        self.give()


class Run:
    """Trainers of one hub, on a clock that advances by half a second."""

    def __init__(self, *speeds):
        self.world, self.now_s = World(plan(config(lease_samples=4096, expire_s=15.0))), 0.0
        self.trainers = [Trainer(self, f"n{i}", speed) for i, speed in enumerate(speeds)]
        self.gone = []

    def go(self, seconds=float("inf"), groups=float("inf"), hub=True):
        until_s = self.now_s + seconds
        while self.now_s < until_s and len(self.trained) < groups:
            for trainer in self.trainers:
                if hub:
                    trainer.beat(self.now_s)
                trainer.turn(self.now_s)
            self.now_s += BEAT_S

    def kill(self, trainer):
        """End a trainer: the hub notices it, and what it has not reported goes back."""
        self.trainers.remove(trainer)
        trainer.trained = trainer.trained[: trainer.used]
        self.gone.append(trainer)
        before = set(self.returned)
        self.world.do(self.world.hub.leave(trainer.node))
        return sorted(set(self.returned) - before)

    @property
    def returned(self):
        return [p for block in self.world.hub.state.pool.returned for p in range(*block)]

    @property
    def trained(self):
        return [position for trainer in [*self.trainers, *self.gone] for position in trainer.trained]


@pytest.mark.parametrize("speeds", [(0.5, 0.5), (1.0, 0.25), (0.4, 0.1, 0.02)])
def test_nodes_of_unequal_pace_stay_close_and_a_short_run_sees_no_problem_twice(speeds):
    run = Run(*speeds)
    run.go(groups=2500)
    problems = Counter(samples_at(np.array(run.trained), 2600, seed=3).tolist())
    assert max(problems.values()) == 1
    assert run.world.hub.state.pool.watermark <= 2500 + GROUPS * sum(max(5 + 40 * s, 10) for s in speeds)
    assert [trainer.starved_s for trainer in run.trainers] == [0.0] * len(speeds)


@pytest.mark.parametrize("problems", [300, 500, 1000])
def test_a_run_of_several_epochs_sees_each_problem_as_often_but_for_what_nodes_hold(problems):
    run = Run(0.5, 0.125)
    run.go(groups=2500)
    counts = Counter(samples_at(np.array(run.trained), problems, seed=3).tolist())
    held = {p for t in run.trainers for block in t.stock.leases.held for p in range(*block)} - {*run.trained}
    for position in samples_at(np.array(sorted(held)), problems, seed=3).tolist():
        counts[position] += 1
    assert len(held) <= 8 * GROUPS * 5
    assert len(counts) == problems
    assert max(counts.values()) - min(counts.values()) <= 1


def test_what_a_killed_node_gives_back_is_trained_next():
    run = Run(0.5, 0.5, 0.25)
    run.go(seconds=600)
    back = run.kill(run.trainers[1])
    assert back
    begun = {trainer.node: len(trainer.trained) for trainer in run.trainers}
    run.go(seconds=60)
    order = [t.trained[begun[t.node] :] for t in run.trainers]
    behind = [
        next(i for i, p in enumerate(positions) if p in back) for positions in order if {*positions} & {*back}
    ]
    assert {*back} <= {*run.trained}
    assert min(behind) <= GROUPS * LASTS_S * 0.5 / 2, "it came before half of the stock"
    for trainer in [*run.trainers]:
        run.kill(trainer)
    check_leases(run.world.journal, run.world.hub.state.pool, run.trained)


def test_a_node_leases_more_while_a_hub_is_away_for_longer_than_its_stock_lasts():
    run = Run(1.0, 0.25)
    run.go(seconds=120)

    def ahead():
        return [t.stock.leases.num_samples - len(t.trained) for t in run.trainers]

    usual = ahead()
    assert max(usual) <= GROUPS * 41
    run.go(seconds=25, hub=False)
    assert [t.starved_s for t in run.trainers] == [0.0, 0.0], "a restart or a takeover stops nobody"
    run.go(seconds=20)
    run.go(seconds=120, hub=False)
    starved = [t.starved_s for t in run.trainers]
    assert 50 < starved[0] < 72, "it had twice the 25 s"
    run.go(seconds=60)
    assert GROUPS * 200 < ahead()[0] < GROUPS * 350
    run.go(seconds=120, hub=False)
    assert [t.starved_s for t in run.trainers] == starved, "the second time they have enough"
    run.go(seconds=20 * 120 + 600)
    assert max(ahead()) <= GROUPS * 41, "it is forgotten"
    for trainer in [*run.trainers]:
        run.kill(trainer)
    check_leases(run.world.journal, run.world.hub.state.pool, run.trained)


def test_rounds_of_any_length_need_few_leases():
    stock, leased = Stock(samples_per_step=2, lasts_s=1.0, most_steps=8), 0
    for step in range(1, 20_000):
        stock.see(Progress(step, busy_s=step * 1.0, drawn=2 * step), 0)
        if missing := stock.missing():
            stock.more([(leased, leased + missing)])
            leased += missing
        stock.give()
    assert len(stock.leases.held) < 1024 / 2


# -- a push carries what it has used


def two_nodes():
    world = World(plan(config(lease_samples=64, expire_s=5.0)))
    for name in "ab":
        world.join(name)
    world.found()
    return world


def offered(world, node, used, **changes):
    push = world.make(node, 0.1, **changes)
    return world.do(world.hub.offer(push, world.now, used)), push


def kinds(records):
    return [type(record).__name__ for record in records]


def test_an_accepted_push_and_the_use_of_its_samples_are_decided_together_and_once():
    world = two_nodes()
    (start, end), *_ = world.lease(0, 20)
    decided, push = offered(world, 0, [(start, start + 12)])
    assert decided == [Accepted(push), Used(0, start, start + 12)]
    assert world.hub.offer(push, world.now, [(start, end)]) == [], "it is known"
    assert world.hub.state.pool.outstanding(0) == [(start + 12, end)]
    decided, push = offered(world, 0, [(start, start + 12)], unit=1)
    assert decided == [Accepted(push)], "the first unit has said it"
    world.do(world.hub.leave(0))
    assert world.lease(1, 100)[0] == (start + 12, end), "what was not pushed goes to another node"


def test_a_push_that_is_not_accepted_uses_nothing():
    world = two_nodes()
    ((start, end),) = world.lease(0, 20)
    for changes in ({"base": 9}, {"norms": (float("nan"),) * 2}, {"steps": 10**9}):
        decided, _ = offered(world, 0, [(start, end)], **changes)
        assert kinds(decided) == ["Refused"]
    assert world.hub.state.pool.outstanding(0) == [(start, end)]


def test_a_push_uses_no_sample_of_another_node():
    world = two_nodes()
    ((start, end),) = world.lease(0, 20)
    for used in ([(0, 2**63)], [(start, end)], [(start + 1, end), (end, 2**64)]):
        decided, _ = offered(world, 1, used, unit=0)
        assert kinds(decided) == ["Accepted"]
        world.settle()
    assert world.hub.state.pool.outstanding(0) == [(start, end)]


def test_a_node_that_is_killed_after_any_accepted_push_has_no_sample_trained_twice():
    """Nodes lease, train, push and die at random; nothing but their pushes says what they have used."""
    num_twice = 0
    for seed in range(20):
        chance, world, kept = random.Random(seed), two_nodes(), Counter()
        mine = {node: [] for node in (0, 1)}
        for _ in range(80):
            node, act = chance.choice((0, 1)), chance.random()
            if not mine[node]:
                mine[node] += [
                    [start, start, end] for start, end in world.lease(node, chance.randrange(1, 9))
                ]
            if act < 0.7:
                blocks = [block for block in mine[node] if block[1] < block[2]]
                for block in blocks[: chance.randrange(1, 3)]:
                    block[1] = chance.randrange(block[1] + 1, block[2] + 1)
                decided, _ = offered(world, node, [(start, upto) for start, upto, _ in mine[node]])
                assert "Accepted" in kinds(decided)
                world.settle()
                kept.update(p for block in mine[node] for p in range(block[0], block[1]))
                mine[node] = [[upto, upto, end] for _, upto, end in mine[node] if upto < end]
            else:
                world.do(world.hub.leave(node))
                world.join("ab"[node])
                mine[node] = []
        num_twice += sum(count > 1 for count in kept.values())
        check_leases(world.journal, world.hub.state.pool, kept)
    assert num_twice == 0


def test_nodes_that_fall_silent_and_train_on_have_no_sample_trained_twice_if_they_come_back_in_time():
    """Cut off or stopped for longer than `expire_s`: they train on, and push that when they are back."""
    num_back, expire_s = 0, 5.0
    for seed in range(10):
        chance, world = random.Random(seed), World(plan(config(lease_samples=64, expire_s=expire_s)))
        nodes = [world.join(name, process=number) for number, name in enumerate("abc", 1)]
        world.found()
        held, unsaid = {node: [] for node in nodes}, {node: [] for node in nodes}
        back_s, trained = dict.fromkeys(nodes, 0.0), []
        for second in range(400):
            world.tick(1.0)
            for node in nodes:
                if second == 399 or world.now >= back_s[node]:
                    if node not in world.hub.state.live:
                        num_back += 1
                        assert world.join("abc"[node], process=1 + node) == node
                    world.heartbeat(node)
                    world.do(world.hub.use(node, unsaid[node]))
                    unsaid[node] = []
                    if sum(end - upto for _, upto, end in held[node]) < 20:
                        held[node] += [[start, start, end] for start, end in world.lease(node, 12)]
                    if chance.random() < 0.02:
                        back_s[node] = world.now + chance.uniform(1.0, 19 * expire_s)
                if held[node] and second < 399:
                    start, upto, end = held[node][0]
                    held[node][0][1] = min(end, upto + 2)
                    trained += range(upto, held[node][0][1])
                    unsaid[node].append((start, held[node][0][1]))
                    held[node] = held[node][held[node][0][1] == end :]
        check_leases(world.journal, world.hub.state.pool, trained)
    assert num_back > 50
