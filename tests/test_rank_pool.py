"""Tests of the pool of rollouts: nodes of one world that generate for each other."""

import itertools
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit.rollouts import decode_plainly, prompts_of, tiny_policy

from aedit.spec_rollout.engine import Engine, EngineSource, EngineSpeed
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.remote import rank_links, rank_pool
from aedit.spec_rollout.remote.rank_pool import PooledSource, PoolEngine, PoolPlace, divide_groups
from aedit.spec_rollout.remote.reallocate import (
    EngineLoad,
    LengthDistribution,
    Migration,
    UnfinishedSample,
    batch_drain_s,
)

JOBS = "tests/dist_jobs/rl_jobs.py"
KEYS = {"rl__engine_dtype": "fp64", "drafter__kind": "off", "train__steps": 8, "rl__groups": 4}


def assert_equal(one, other):
    for ours, theirs in zip(one, other, strict=True):
        assert ours[0] == theirs[0]
        assert ours[1].keys() == theirs[1].keys()
        assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


def test_a_run_in_which_nodes_generate_for_each_other_is_that_without_it_bit_for_bit(world, tmp_path):
    """A node that asks is refused while the other is a step behind, so that not all batches are divided.

    In the pool all engines draft, those for other nodes too.
    """
    args = {"directory": tmp_path / "plain", "keys": KEYS}
    plain = world.run(JOBS, "pooled", size=2, args=args)
    args = {
        "directory": tmp_path / "pool",
        "keys": KEYS | {"rl__pool": True, "drafter__kind": "suffix"},
        "parts": (0.5, 1.0, 0.25, 0.75),
    }
    pool = world.run(JOBS, "pooled", size=2, args=args)
    assert len({str(tokens) for _, tokens, _ in plain[0][0]}) > 8, "the policy always answers the same"
    assert plain[0][0] != plain[1][0], "both nodes have the same prompts"
    assert [each[2] for each in plain] == [None, None]
    assert_equal(plain, pool)
    counts = [each[2] for each in pool]
    assert sum(each["given"] for each in counts) > 0
    for ours, theirs in (counts, counts[::-1]):
        assert ours["given"] == ours["received"] == theirs["helped"]
        assert ours["taken_back"] == 0


# -- division


SPEEDS = [((1.0, 0.1), (3.0, 0.3)), ((1.0, 0.0), (3.0, 0.0)), ((0.2, 1.0), (0.1, 0.5), (1.0, 2.0))]
SPEEDS += [((10.0, 0.1), (10.0, 0.1))]  # half of the rows save a tenth, but for a little


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("delays_s", [(0.0, 0.0, 0.0), (0.0, 40.0, 7.0)])
def test_groups_are_divided_so_that_the_last_engine_finishes_as_early_as_it_can(speeds, delays_s):
    """The oracle tries all divisions. Samples are alike, so that only their number counts.

    What saves less than a tenth is not worth it.
    """
    lengths = LengthDistribution.of([5, 10, 20])
    engines = [
        PoolEngine(EngineSpeed(fixed, row, 0.0), 64, delay_s)
        for (fixed, row), delay_s in zip(speeds, delays_s, strict=False)
    ]
    group = [UnfinishedSample((0, i), 9, 0, 30) for i in range(4)]

    def finish_s(engine, count):
        load = EngineLoad(tuple(group * count), engine.rows, engine.speed)
        return engine.delay_s + batch_drain_s(load, lengths) if count else 0.0

    ways = [each for each in itertools.product(range(7), repeat=len(engines)) if sum(each) == 6]
    best, alone_s = min(max(map(finish_s, engines, way)) for way in ways), finish_s(engines[0], 6)
    best = best if best <= 0.9 * alone_s else alone_s
    owners, predicted_s = divide_groups([group] * 6, engines, lengths)
    assert owners == sorted(owners)
    assert len(owners) == 6
    counts = [owners.count(i) for i in range(len(engines))]
    assert predicted_s == pytest.approx([finish_s(*each) for each in zip(engines, counts, strict=True)])
    assert max(predicted_s) == pytest.approx(best)


def test_many_groups_are_divided_in_lots():
    engines = [PoolEngine(EngineSpeed(1.0, 0.1, 0.0), 64)] * 2
    owners, _ = divide_groups(
        [[UnfinishedSample((0, 0), 9, 0, 30)]] * 101, engines, LengthDistribution.of([5])
    )
    assert len(owners) == 101
    assert 45 < owners.count(0) < 57


# -- two nodes in this process


class Wires:
    """Links that deliver at once, in the process; `lost` has ranks that get and send nothing."""

    def __init__(self):
        self.ends, self.lost = {}, set()

    def links(self, rank, receive):
        self.ends[rank] = receive
        return _End(self, rank)


class _End:
    error = ""
    bytes_sent = 0

    def __init__(self, wires, rank):
        self.wires, self.rank, self.sent = wires, rank, 0

    @property
    def peers(self):
        return [rank for rank in (0, 1) if rank != self.rank]

    def send(self, rank, message):
        self.sent += 1
        if not {rank, self.rank} & self.wires.lost:
            self.wires.ends[rank](self.rank, message)

    def close(self):
        pass


class Node:
    """A node of a pool of two, with clocks that the test sets."""

    def __init__(self, rank, seed, now_s):
        self.rounds, self.waited_s, self.steps, self.now_s = 0, 0.0, 0, now_s
        self.policy = tiny_policy(seed=seed)
        own = EngineSource(Engine(make_target(self.policy, rows=16, max_tokens=64)))
        place = PoolPlace(
            group=rank,
            steps=lambda: self.steps,
            rounds=lambda: self.rounds,
            waited_s=lambda: self.waited_s,
            window=lambda cause: nullcontext(),
            stretch=lambda seconds: seconds,
            note_wait=lambda seconds: None,
        )
        self.source = PooledSource(own, self.make_engine, place)
        self.version = 0

    def make_engine(self):
        return Engine(make_target(tiny_policy(seed=7), rows=16, max_tokens=64))

    def next_version(self, share=0.0):
        """Hand over weights after a round of which the node has waited this share."""
        self.rounds += 1
        self.waited_s += share * (self.now_s[0] - self.source._round_began)
        self.version += 1
        self.source.update_weights(None, self.version)

    def begin(self, prompts):
        self.now_s[0] += 1.0
        self.source.add(prompts)


@pytest.fixture
def pair(monkeypatch):
    """Return two nodes of different policies; the second has waited for the first, which knows its speed.

    The pool's clock advances as a batch begins, and not as long as a busy machine takes for it.
    """
    wires, now_s = Wires(), [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(rank_pool, "time", clock)
    monkeypatch.setattr(rank_pool, "PoolLinks", wires.links)
    nodes = [Node(rank, rank, now_s) for rank in (0, 1)]
    for node in nodes:
        node.next_version()
        node.begin(prompts_of(2, seed=3))
        node.warm = []
        while node.source.running:
            node.warm += [each.tokens for each in node.source.step()]
    nodes[1].next_version(share=0.5)
    return wires, *nodes


def give_all(monkeypatch):
    monkeypatch.setattr(
        rank_pool, "divide_groups", lambda groups, engines, lengths: ([1] * len(groups), [0.0, 1e6])
    )


def run(*nodes, most=200):
    """Step nodes in turn until the first has all its samples; return their tokens by key."""
    found = []
    for _ in range(most):
        for node in nodes:
            found += [each for each in node.source.step() if node is nodes[0]]
        if not nodes[0].source.running:
            return {each.prompt.key: tuple(each.tokens) for each in found}, found
    raise AssertionError("samples are missing")


def asked(count=8):
    return prompts_of(count, seed=5, group_size=2, max_new_tokens=6)


def expected(node, prompts):
    plain = decode_plainly(node.policy, prompts)
    return {prompt.key: tuple(tokens) for prompt, tokens in zip(prompts, plain, strict=True)}


def test_a_helper_generates_with_the_policy_of_the_node_that_asks(pair, monkeypatch):
    _, slow, fast = pair
    give_all(monkeypatch)
    prompts = asked()
    slow.begin(prompts)
    tokens, found = run(slow, fast)
    assert tokens == expected(slow, prompts) != expected(fast, prompts)
    assert slow.source.counts.received == fast.source.counts.helped == 8
    assert slow.source.counts.received_tokens == sum(map(len, tokens.values()))
    assert {version for each in found for version in each.versions} == {slow.version}
    assert all(len(each.logprobs) == len(each.tokens) and each.finish_reason for each in found)


def test_equal_nodes_send_nothing(pair):
    _, slow, fast = pair
    slow.next_version()
    fast.next_version(share=0.05)
    sent = [node.source.links.sent for node in (slow, fast)]
    for _ in range(3):
        for node in (slow, fast):
            node.next_version(share=0.05)
            node.begin(asked())
            run(node)
    assert [node.source.links.sent for node in (slow, fast)] == sent
    assert sent == [0, 2]  # a helper, and no helper any longer
    assert slow.source.counts.asked == slow.source.counts.given == 0


def test_a_node_that_is_behind_does_not_help(pair, monkeypatch):
    _, slow, _fast = pair
    give_all(monkeypatch)
    slow.steps = 2
    prompts = asked()
    slow.begin(prompts)
    assert run(slow)[0] == expected(slow, prompts)
    assert (slow.source.counts.asked, slow.source.counts.given) == (1, 0)


@pytest.mark.parametrize("begun", [0, 3])
def test_samples_of_a_late_helper_are_generated_here_and_the_first_result_counts(pair, monkeypatch, begun):
    _, slow, fast = pair
    give_all(monkeypatch)
    monkeypatch.setattr(rank_pool, "STEP_WAIT_S", 0.0)
    prompts = asked()
    slow.begin(prompts)
    slow.source.step()
    for _ in range(begun):
        assert fast.source.work()
    for given in slow.source._given.values():
        given.late_at = 0.0
    assert run(slow)[0] == expected(slow, prompts)
    assert slow.source.counts.taken_back == 8
    while fast.source.work():
        pass
    assert not fast.source.has_work
    slow.next_version()
    slow.begin(prompts_of(4, seed=6, group_size=2))
    run(slow)
    assert slow.source.counts.asked == 1, "it is asked again at once"


def test_results_that_come_while_they_are_generated_here_end_that(pair, monkeypatch):
    _wires, slow, fast = pair
    give_all(monkeypatch)
    monkeypatch.setattr(rank_pool, "STEP_WAIT_S", 0.0)
    monkeypatch.setattr(PooledSource, "_forget", lambda *_: None)  # what it has sent is under way already
    prompts = asked()
    slow.begin(prompts)
    slow.source.step()
    for given in slow.source._given.values():
        given.late_at = 0.0
    slow.source.step()
    assert slow.source.running == 8 == slow.source.inner.running
    while fast.source.work():
        pass
    assert run(slow)[0] == expected(slow, prompts)
    assert slow.source.counts.received == 8


@pytest.mark.parametrize("how", ["before the answer", "after the answer", "leaves"])
def test_a_lost_helper_costs_time_only(pair, monkeypatch, how):
    wires, slow, _fast = pair
    give_all(monkeypatch)
    monkeypatch.setattr(rank_pool, "STEP_WAIT_S", 0.0)
    monkeypatch.setattr(rank_pool, "ANSWER_WITHIN_S", 0.001)
    prompts = asked()
    if how == "before the answer":
        wires.lost.add(1)
    slow.begin(prompts)
    finished = slow.source.step()
    wires.lost.add(1)
    if how == "leaves":
        slow.source._receive(1, rank_links.Message(rank_links.BYE))
    for given in slow.source._given.values():
        given.late_at = 0.0 if how == "after the answer" else given.late_at
    assert run(slow)[0] | {each.prompt.key: tuple(each.tokens) for each in finished} == expected(
        slow, prompts
    )
    before = slow.source.counts.asked
    slow.begin(prompts_of(4, seed=6, group_size=2))
    run(slow)
    assert slow.source.counts.asked == before, "it is asked again at once"


def move_all(monkeypatch):
    """Move each sample to the other node at each look for a helper."""

    def plan(loads, lengths, rule):
        away = [target for target in loads if target >= 0]
        return [Migration(each.key, -1, target, 1.0) for target in away for each in loads[-1].samples]

    monkeypatch.setattr(rank_pool, "MOVE_LEAST_S", 0.0)
    monkeypatch.setattr(rank_pool, "plan", plan)


def behind(slow, fast, prompts, steps=3):
    """Begin samples at the slow node while the other is two steps behind, and take a few steps."""
    slow.steps = 2
    slow.begin(prompts)
    found = [each for _ in range(steps) for each in slow.source.step()]
    assert slow.source.counts.given == 0
    fast.steps = 2
    return found


@pytest.mark.parametrize("every", [1, 2, 4])
def test_samples_that_have_begun_move_to_a_helper_that_is_free(pair, monkeypatch, every):
    _, slow, fast = pair
    monkeypatch.setattr(rank_pool, "MOVE_EVERY", every)
    move_all(monkeypatch)
    prompts = asked()
    first = behind(slow, fast, prompts)
    tokens, found = run(slow, fast)
    tokens |= {each.prompt.key: tuple(each.tokens) for each in first}
    assert tokens == expected(slow, prompts)
    counts, status = slow.source.counts, slow.source.status()
    assert counts.moved == counts.given == counts.received == fast.source.counts.helped > 0
    own = slow.source.engine.meters.num_tokens
    assert counts.received_tokens == fast.source.counts.helped_tokens
    assert own + counts.received_tokens == status["rollout_tokens"]
    assert status["rollout_tokens"] == sum(map(len, tokens.values())) + sum(map(len, slow.warm))
    assert all(each.prompt.partial is None for each in found)
    assert all(len(each.logprobs) == len(each.versions) == len(each.tokens) for each in found)


def test_a_helper_that_takes_longer_than_predicted_is_given_less(pair, monkeypatch):
    """The lag is the seconds beside the prediction; a helper that is late has one, too."""
    _, slow, fast = pair
    give_all(monkeypatch)
    slow.begin(asked())
    slow.source.step()
    slow.now_s[0] += 7.0
    while fast.source.work():
        pass
    run(slow)
    predicted_s = 1e6  # of `give_all`
    assert slow.source._lag_s == {1: pytest.approx(7.0 - predicted_s)}
    assert slow.source._lag_of(1) == 0.0
    engines = []

    def divide(groups, given, lengths):
        engines.extend(given)
        return [0] * len(groups), [1.0, 1.0]

    monkeypatch.setattr(rank_pool, "divide_groups", divide)
    slow.source._lag_s[1] = 3.0
    slow.begin(prompts_of(4, seed=6, group_size=2))
    slow.source.step()
    assert engines[1].delay_s == pytest.approx(3.0)
    assert not slow.source._parts


def test_the_first_samples_of_a_helper_may_take_longer_as_it_makes_its_engine(pair, monkeypatch):
    _, slow, fast = pair
    monkeypatch.setattr(rank_pool, "divide_groups", lambda groups, *_: ([1] * len(groups), [0.0, 10.0]))
    for spare_s in (rank_pool.FIRST_S, rank_pool.LATE_S):
        slow.begin(asked())
        slow.source.step()
        late_s = [each.late_at - slow.now_s[0] for each in slow.source._given.values()]
        assert late_s == pytest.approx([2 * 10.0 + spare_s] * len(late_s))
        run(slow, fast)


def test_a_helper_says_how_long_its_work_after_a_batch_takes_without_its_waits(pair):
    _, _, fast = pair
    source = fast.source
    usual_s = source._apart_s
    for work_s, waited_s in ((3.0, 0.0), (3.0, 40.0), (5.0, 9.0)):
        fast.begin(prompts_of(1, seed=4))
        while source.running:
            source.step()
        fast.now_s[0] += 1.0
        assert source._answer(0, 0)["delay_s"] == pytest.approx(max(0.0, usual_s - 1.0))
        fast.now_s[0] += work_s - 1.0 + waited_s
        fast.waited_s += waited_s
        if waited_s:
            source.work()
        else:
            source.update_weights(None, source.version + 1)
        usual_s = (usual_s + work_s) / 2 if usual_s else work_s
        assert source._apart_s == pytest.approx(usual_s)
        assert source._answer(0, 0)["delay_s"] == 0.0


def test_a_helper_that_leaves_a_round_a_moment_later_helps(pair):
    """In the midst of a batch a node that is a step behind does not help: it is the slower one now."""
    _, _, fast = pair
    assert [fast.source._answer(0, steps)["helps"] for steps in (0, 1, 2)] == [True, True, False]
    fast.begin(prompts_of(1, seed=4))
    fast.source.step()
    assert [fast.source._answer(0, steps)["helps"] for steps in (0, 1, 2)] == [True, False, False]


@pytest.mark.parametrize("predicted_s", [2.0, 40.0])
def test_a_node_that_takes_longer_than_predicted_expects_that_of_its_next_batch(
    pair, monkeypatch, predicted_s
):
    """Each step takes one second here."""
    _, slow, _ = pair
    slow.source._place = replace(slow.source._place, stretch=lambda seconds: 1.0)
    engines, given = [], [0]

    def divide(groups, those, lengths):
        engines.append(those[0])
        return given * len(groups), [predicted_s, 0.0]

    monkeypatch.setattr(rank_pool, "divide_groups", divide)
    for _ in range(2):
        before = slow.source.engine.meters.num_steps
        slow.begin(asked())
        run(slow)
        steps = slow.source.engine.meters.num_steps - before
    speed = slow.source._meter.speed()
    pace = (1.0 + steps / predicted_s) / 2
    assert engines[0].speed.fixed_s > 0
    assert slow.source._pace == pytest.approx((pace + steps / (predicted_s / pace)) / 2)
    slow.begin(asked())
    slow.source.step()
    assert engines[2].speed.token_s(3) == pytest.approx(speed.token_s(3) * slow.source._pace)


def test_weights_are_sent_once_for_a_version(pair, monkeypatch):
    wires, slow, fast = pair
    monkeypatch.setattr(rank_pool, "MOVE_EVERY", 1)
    give_all(monkeypatch)
    sent = []
    receive = wires.ends[1]
    wires.ends[1] = lambda rank, message: (sent.append(message), receive(rank, message))
    for version in (1, 2):
        for seed in (5, 6):
            prompts = prompts_of(4, seed=seed, group_size=2, max_new_tokens=6)
            slow.begin(prompts)
            assert run(slow, fast)[0] == expected(slow, prompts)
        if version == 1:
            slow.source.update_weights(None, slow.version + 1)
    given = [message for message in sent if message.kind == rank_links.GIVE]
    assert [message.weights is not None for message in given] == [True, False, True, False]


def test_samples_whose_weights_another_rank_has_replaced_are_given_back(pair, monkeypatch, capsys):
    _, slow, fast = pair
    give_all(monkeypatch)
    monkeypatch.setattr(rank_pool, "STEP_WAIT_S", 0.0)
    slow.begin(asked())
    run(slow, fast)
    prompts = prompts_of(4, seed=6, group_size=2, max_new_tokens=6)
    slow.begin(prompts)
    slow.source.step()
    fast.source._loaded_weights = (2, 9)
    assert fast.source.work()
    assert "were replaced by those of another rank" in capsys.readouterr().err
    lag_s = dict(slow.source._lag_s)
    assert run(slow)[0] == expected(slow, prompts)
    assert slow.source.counts.taken_back == 4
    assert slow.source._lag_s == lag_s, "it was not late"
    assert slow.source._sent == {}, "the next samples come with weights"


def test_what_does_not_fit_the_helper_is_given_back(pair, monkeypatch, capsys):
    _, slow, fast = pair
    give_all(monkeypatch)
    monkeypatch.setattr(rank_pool, "weights_bytes", lambda model: torch.zeros(12, dtype=torch.uint8))
    slow.begin(asked())
    slow.source.step()
    assert fast.source.work()
    assert not fast.source.has_work
    assert "weights of 12 bytes: expected the" in capsys.readouterr().err


def test_a_cancelled_batch_leaves_nothing_behind(pair, monkeypatch):
    _, slow, fast = pair
    give_all(monkeypatch)
    slow.begin(asked())
    slow.source.step()
    fast.source.work()
    assert len(slow.source.pending()) == slow.source.running == 8
    slow.source.cancel()
    assert slow.source.running == 0
    assert slow.source.pending() == []
    while fast.source.work():
        pass
    assert slow.source.step() == []


# -- links


def test_links_are_closed_without_the_other_rank(world):
    received, left, printed = world.run(JOBS, "lose_a_link", size=2)[0]
    assert received[0] == "hello"
    assert left == []
    assert printed == ""


def test_an_error_of_the_group_is_printed_once_as_the_pool_is_off_from_then_on(world):
    error, printed = world.run(JOBS, "break_a_link", size=2)[0]
    assert error == "rank 1 sent something that is no message of the pool"
    assert printed == (
        f"aedit: rl.pool is off until the next start, nodes generate their own rollouts: {error}\n"
    )
