"""Tests engines in virtual time: declared step times, earlier ends with moves, equal tokens."""

from collections import Counter

import pytest
import torch
from benchmarks.rollout import Same
from benchmarks.tail import WAYS, Batch, Node, PacedTarget, Plan, Times, Way, World, deal, measure, report
from kit.rollouts import Stubborn, tiny_policy

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.remote import Reallocator
from aedit.spec_rollout.remote.reallocate import Migration
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling

TIMES = Times(
    rows=(1, 4),
    nodes=(0, 2),
    pass_s=((0.010, 0.012), (0.013, 0.021)),
    draft_s={"layer:1": (0.001, 0.002), "layer:2": (0.002, 0.003)},
    prefill_s=(0.032, 0.512),
    copy_s=0.0001,
)


@pytest.fixture(scope="module")
def targets():
    model = tiny_policy()
    return [PacedTarget(model, rows=4, max_tokens=100, times=TIMES) for _ in range(3)]


def samples(count, length, rollout=0):
    sampling = Sampling(max_new_tokens=length)
    return [Prompt(tokens=(7, 8, 9), rollout=rollout, sample=i, sampling=sampling) for i in range(count)]


def world_of(targets, dealt, arm=None):
    nodes = [
        Node(target, {"layer": Stubborn()}, Fixed.of(arm)) if arm else Node(target, {}, None)
        for target in targets
    ]
    for node, mine in zip(nodes, dealt, strict=True):
        for prompt in mine:
            node.add(prompt)
    return World(nodes)


def test_an_engine_takes_what_was_declared(targets):
    way = world_of(targets[:1], [samples(4, 20)]).run(None)
    assert way.seconds == pytest.approx(4 * 0.002 + 20 * 0.013)  # four texts of two tokens, and steps
    way = world_of(targets[:1], [samples(1, 20)]).run(None)
    assert way.seconds == pytest.approx(0.002 + 20 * 0.010)
    assert way.busy_share == pytest.approx(1.0)


def test_drafting_and_verifying_take_their_time_too(targets):
    world = world_of(targets[:1], [samples(1, 20)], "layer:2")
    way = world.run(None)
    drafted = way.arms["layer:2"]
    assert drafted >= 18
    # One that is drafted when two tokens are left is shorter.
    least_s = (drafted - 1) * 0.014 + 0.012
    assert least_s <= way.seconds - 0.002 - 0.010 * way.arms["off"] <= drafted * 0.014 + 1e-9


def test_moving_ends_sooner_with_the_same_tokens_the_same_each_time(targets):
    dealt = [samples(8, 60), samples(2, 8, 1), samples(1, 4, 2)]
    alone = world_of(targets, dealt).run(None)
    ways = []
    for _ in range(2):
        world = world_of(targets, dealt)
        ways.append(
            world.run(Reallocator(dict(enumerate(world.nodes)), clock=lambda world=world: world.now_s))
        )
    for way in ways:
        assert way.seconds == ways[0].seconds < 0.8 * alone.seconds
        assert way.moves == ways[0].moves
        assert {key: r.tokens for key, r in way.rollouts.items()} == {
            key: r.tokens for key, r in alone.rollouts.items()
        }
        assert way.num_emptied == 0
        assert max(way.moves.values()) <= 2
    assert ways[0].copies_s
    assert alone.moves.total() == 0


def test_what_moves_is_there_when_it_has_left_and_been_copied(targets):
    """The receiver was idle: its clock has stood since it finished."""
    world = world_of(targets[:2], [samples(2, 60), samples(1, 2, 1)])
    nodes = world.nodes
    for _ in range(30):
        nodes[0].step()
    nodes[1].step()
    left_s, old_s = nodes[0].clock.now_s, nodes[1].clock.now_s
    assert old_s < left_s

    class Once:
        def rebalance(self):
            nodes[1].add(nodes[0].remove((0, 1)))
            return [Migration((0, 1), 0, 1, 0.0)]

    world._look(Once())
    nodes[1].step()
    num_tokens = 3 + 30 - 1
    assert nodes[1].clock.now_s == pytest.approx(left_s + num_tokens * 0.0001 + 0.011)


def test_each_prompt_goes_to_one_engine_with_all_its_samples():
    plan = Plan(quick=True, groups=2, group_size=3)
    dealt = deal(plan, 1)
    assert [len(mine) for mine in dealt] == [6] * 4
    groups = [{prompt.group for prompt in mine} for mine in dealt]
    assert [len(mine) for mine in groups] == [2] * 4
    assert len(set.union(*groups)) == 8
    assert len({(p.rollout, p.sample) for mine in dealt for p in mine}) == 24
    assert not {p.group for mine in deal(plan, 2) for p in mine} & set.union(*groups)


def test_bars_are_those_of_the_issue_and_are_missed_aloud():
    def way(seconds, *copies_s, most=0):
        rollouts = {(0, 0): Rollout(samples(1, 9)[0], [1] * 9, finish_reason="length")}
        return Way(seconds, rollouts, Counter({(0, 0): most}), int(most > 2), 0.5, list(copies_s))

    seconds = {"plain": way(1.0), "plain, moving": way(0.8, 0.004, most=2)}
    seconds |= {"speculating": way(0.7), "speculating, moving": way(0.63, 0.011, most=3)}
    told = report([Batch(seconds, Same(9, 1))], TIMES, Plan())
    assert [bar.passed for bar in told.bars] == [True, False, True, False, False, False, True]
    assert told.bars[0].text == "moving over staying: 0.80 [0.80, 0.80], bar 0.85"
    assert told.bars[1].text == "moving over staying, speculating: 0.90 [0.90, 0.90], bar 0.85"
    assert told.bars[5].text == "longest copy: 11.00 ms, bar a step of 10.00 ms"


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_tells_of_all_ways_and_that_their_tokens_are_equal(tmp_path, one_thread):
    small = {"batches": 1, "rows": 4, "groups": 2, "group_size": 3}
    told = measure(Plan(quick=True, root=tmp_path, **small), print)
    assert [row[0] for row in told.rows] == list(WAYS)
    assert told.rows[0][2] == "1.00 [1.00, 1.00]"
    assert all(bar.passed is None for bar in told.bars)
    assert len(told.figures["lengths"]) == 2 * 4 * 2 * 3
    assert told.bars[-1].text.endswith("other differences: 0, bar 0")
    assert any(way["moves"] for batch in told.figures["batches"] for way in batch.values())
