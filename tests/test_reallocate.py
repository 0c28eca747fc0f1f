"""Tests moving samples between engines: earlier ends, nothing lost, no idle engine, no repeated moves."""

import math
from collections import Counter
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.simulated_engines import MOST, PACE, Simulated, World, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.engine import Engine, EngineSpeed, SpeedMeter
from aedit.spec_rollout.remote import LocalEngine, Reallocator
from aedit.spec_rollout.remote.dispatcher import RemoteEngine
from aedit.spec_rollout.remote.moving import HISTORY_ROLLOUTS
from aedit.spec_rollout.remote.reallocate import (
    EngineLoad,
    LengthDistribution,
    MigrationRule,
    UnfinishedSample,
    drain_s,
    group_scales,
    plan,
)
from aedit.spec_rollout.remote.workers import WorkerHandle
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling

PROMPT_OF_NONE = Prompt(tokens=(1,))
KNOWN = LengthDistribution.of([100])  # every sample has 100 tokens


def sample(name, emitted=0, context=None, **more):
    return UnfinishedSample((name, 0), emitted + 10 if context is None else context, emitted, 1000, **more)


def load(*samples, rows=4, **more):
    return EngineLoad(samples, rows, PACE, **more)


# --- the prediction


def test_samples_that_are_all_live_take_as_long_as_steps_of_ever_fewer_of_them():
    found = drain_s(load(sample(1, emitted=90), sample(2, emitted=60), sample(3)), KNOWN)
    assert found == pytest.approx(10 * PACE.token_s(3) + 30 * PACE.token_s(2) + 60 * PACE.token_s(1))


def test_those_that_wait_begin_as_rows_become_free():
    one_row = load(*map(sample, range(3)), rows=1)
    assert drain_s(one_row, KNOWN) == pytest.approx(300 * PACE.token_s(1))
    two_rows = load(*map(sample, range(4)), rows=2)
    # The fourth is thought to begin when half of the third is done on average: at 150 of 200 tokens.
    assert drain_s(two_rows, KNOWN) == pytest.approx(200 * PACE.token_s(2) + 50 * PACE.token_s(1))


def test_the_prediction_is_close_to_what_engines_do():
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.lognormal(4, 0.6, 96)).clip(1, MOST).astype(int).tolist()
    engine = Simulated(rows=8)
    took_s = World([engine], [prompts(lengths)]).run()
    fresh = Simulated(rows=8)
    World([fresh], [prompts(lengths)])
    assert drain_s(fresh.load(), LengthDistribution.of(lengths)) == pytest.approx(took_s, rel=0.1)


def test_a_group_whose_samples_are_long_is_expected_to_stay_so():
    ended = [(0, 100)] * 8 + [(1, 400)] * 8
    scales = group_scales(ended, [(2, 10)])
    assert 0.4 < scales[0] < 0.7 < scales[2] < 1.3 < scales[1] < 1.8
    assert group_scales([], [(0, 3)]) == {}


# --- the policy


def test_the_busiest_gives_to_the_idlest_what_waits_there():
    busy = load(*map(sample, range(8)))
    moves = plan({5: busy, 6: load(sample(10)), 9: load()}, KNOWN)
    assert {move.source for move in moves} == {5}
    assert moves[0].target == 9
    assert all(move.gain_s > 0 for move in moves)
    assert [move.key[0] for move in moves][:3] == [7, 6, 5]  # those that would have begun last


def test_nothing_moves_between_engines_that_finish_together():
    assert plan({0: load(*map(sample, range(3))), 1: load(*map(sample, range(10, 13)))}, KNOWN) == []


def test_a_donor_gives_its_last_sample_to_a_faster_engine_only():
    slow = EngineSpeed(PACE.fixed_s * 4, PACE.row_s * 4, 0.0)
    assert len(plan({0: replace(load(sample(1)), speed=slow), 1: load()}, KNOWN)) == 1
    assert plan({0: load(sample(1)), 1: load()}, KNOWN) == []
    assert plan({0: load(sample(1)), 1: replace(load(), speed=slow)}, KNOWN) == []
    moves = plan({0: load(sample(1), sample(2)), 1: load()}, KNOWN, MigrationRule(overhead_s=0.001))
    assert len(moves) == 1


def test_what_costs_more_than_it_gains_stays():
    far = replace(PACE, prefill_s=1.0)
    busy = load(*map(sample, range(4)))
    assert plan({0: busy, 1: load()}, KNOWN) != []
    assert plan({0: busy, 1: replace(load(), speed=far)}, KNOWN) == []
    assert plan({0: busy, 1: load()}, KNOWN, MigrationRule(overhead_s=5.0)) == []


def test_a_slow_engine_gives_to_a_fast_one_and_not_the_other_way_round():
    slow = replace(load(sample(0), sample(1)), speed=EngineSpeed(0.1, 0.01, 0.0))
    fast = replace(load(sample(2), sample(3)), speed=EngineSpeed(0.001, 0.0001, 0.0))
    assert {(move.source, move.target) for move in plan({0: slow, 1: fast}, KNOWN)} == {(0, 1)}


def test_engines_that_have_not_rested_stay_out_of_it():
    busy, idle = load(*map(sample, range(8))), load()
    for tired in (
        {0: replace(busy, since_move_s=0.05), 1: idle},
        {0: busy, 1: replace(idle, since_move_s=0.05)},
    ):
        assert plan(tired, KNOWN) == []


def test_a_sample_moves_twice_at_most_and_back_to_a_much_faster_engine_only():
    moved = [sample(i, visited=(7, 8)) for i in range(8)]
    assert plan({0: load(*moved), 1: load()}, KNOWN) == []
    left = [sample(i, visited=(1,)) for i in range(8)]
    assert plan({0: load(*left), 1: load()}, KNOWN) == []
    assert plan({0: load(*left), 2: load()}, KNOWN) != []
    slow = EngineSpeed(PACE.fixed_s * 4, PACE.row_s * 4, 0.0)
    assert plan({0: replace(load(*left), speed=slow), 1: load()}, KNOWN) != []


def test_one_engine_alone_has_nothing_to_plan():
    assert plan({0: load(*map(sample, range(8)))}, KNOWN) == []
    assert plan({}, KNOWN) == []


# --- what comes of it, in virtual time


def unequal(seed, engines=4, groups=2, size=16):
    """Return groups of samples with similar lengths within a group and unlike lengths between groups."""
    rng = np.random.default_rng(seed)
    work = []
    for engine in range(engines):
        mine = {}
        for group in range(groups):
            lengths = np.ceil(rng.lognormal(rng.normal(4.5, 1.0), 0.5, size)).clip(1, MOST).astype(int)
            mine |= prompts(lengths.tolist(), rollout=10 * engine + group, group=10 * engine + group)
        work.append(mine)
    return work


def world(seed, rule):
    return World([Simulated() for _ in range(4)], unequal(seed), rule)


def test_all_are_done_sooner_and_each_exactly_once():
    ratios = []
    for seed in range(8):
        alone, together = world(seed, None), world(seed, MigrationRule())
        ratios.append(together.run() / alone.run())
        for each in (alone, together):
            keys = Counter((one.prompt.rollout, one.prompt.sample) for one in each.ended)
            assert keys == dict.fromkeys(each.lengths, 1)
            assert all(len(one.tokens) == each.length_of(one) for one in each.ended)
        assert not any(engine.idle_after_giving for engine in together.engines)
        assert max(Counter(move.key for move in together.moves).values(), default=0) <= 2
        visits = {key: [move.target for move in together.moves if move.key == key] for key in each.lengths}
        assert all(len(set(targets)) == len(targets) for targets in visits.values())
    assert median(ratios) <= 0.85
    assert max(ratios) <= 1.05


def test_with_one_engine_full_and_three_idle_it_takes_little_more_than_half():
    full = prompts([300] * 64)
    alone = World([Simulated() for _ in range(4)], [full, {}, {}, {}]).run()
    together = World([Simulated() for _ in range(4)], [full, {}, {}, {}], MigrationRule())
    assert together.run() <= 0.6 * alone


# --- the mechanism


class Away(Simulated):
    """Engine that cannot be reached, or refuses samples."""

    refuses = OSError("no route")

    def add(self, prompt):
        if prompt.partial is not None and self.refuses:
            raise self.refuses
        super().add(prompt)


@pytest.mark.parametrize("refuses", [OSError("no route"), ValueError("too long")])
def test_a_sample_that_is_refused_goes_back(refuses):
    engines = [Simulated(), Away()]
    engines[1].refuses = refuses
    there = World(engines, [prompts([300] * 40), {}], MigrationRule())
    there.run()
    assert len(there.ended) == 40
    assert there.reallocator.num_refused > 0
    assert there.reallocator.num_moves == 0


def test_a_sample_that_can_go_nowhere_is_kept_until_it_can():
    engines = [Away(), Away()]
    there = World(engines, [prompts([300] * 40), {}], MigrationRule())
    engines[0].step()
    there.now = 1.0
    there.reallocator.rebalance()
    assert len(engines[0].samples) < 40
    for engine in engines:
        engine.refuses = None
    there.run()
    assert len(there.ended) == 40


def test_an_engine_that_cannot_be_asked_is_left_alone():
    class Gone(Simulated):
        def load(self):
            raise OSError("gone")

    there = World([Simulated(), Gone()], [prompts([300] * 20), {}], MigrationRule())
    there.run()
    assert there.moves == []
    assert len(there.ended) == 20


def test_a_sample_that_has_finished_meanwhile_does_not_move():
    class Late(Simulated):
        def remove(self, key):
            return None

    there = World([Late(), Simulated()], [prompts([300] * 20), {}], MigrationRule())
    there.run()
    assert there.moves == []
    assert len(there.ended) == 20


def test_the_pace_of_an_engine_is_what_its_steps_took():
    meter = SpeedMeter()
    assert meter.speed() is None
    rng = np.random.default_rng(0)
    for i in range(300):
        live = int(rng.integers(1, 17))
        meter.add(live, PACE.token_s(live) * (50 if i == 250 else rng.uniform(0.9, 1.1)))
    found = meter.speed()
    for live in (1, 8, 16):
        assert found.token_s(live) == pytest.approx(PACE.token_s(live), rel=0.1)


def test_an_engine_that_has_always_been_full_has_a_pace_too():
    meter = SpeedMeter()
    for _ in range(10):
        meter.add(4, 0.02)
    assert meter.speed().token_s(4) == pytest.approx(0.02)
    assert math.isfinite(meter.speed().token_s(1))


def test_lengths_of_long_ago_are_forgotten():
    """A long run keeps no more lengths than the estimate uses."""
    there = Reallocator({}, MigrationRule())
    for length in [10] * 5000 + [500] * HISTORY_ROLLOUTS:
        rollout = Rollout(PROMPT_OF_NONE, [0] * length, finish_reason="stop")
        there.record_finished(rollout)
    assert set(there._completed) == {(-1, 500)}


# --- with real engines


def tiny():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()


def asked():
    """Yield samples of very unequal lengths; each must keep its tokens."""
    for i in range(8):
        sampling = Sampling(max_new_tokens=60 if i < 3 else 6, temperature=0.9)
        yield Prompt(tokens=(1, 2, i), rollout=1, sample=i, sampling=sampling)


def test_samples_that_move_between_engines_get_the_same_tokens():
    model = tiny()
    alone = Engine.of(model, rows=8, max_tokens=96)
    expected = {r.prompt.sample: (r.tokens, r.logprobs) for r in alone.generate(asked())}
    engines = [LocalEngine(Engine.of(model, rows=4, max_tokens=96)) for _ in range(2)]
    for prompt in asked():
        engines[0].add(prompt)
    there = Reallocator(
        dict(enumerate(engines)), MigrationRule(overhead_s=0.0, margin=0.0), clock=iter(range(10**6)).__next__
    )
    # The pace is given, not measured: a timing must not decide what moves.
    for engine in engines:
        engine._meter.add(1, 0.011)
        engine._meter.add(4, 0.014)
        engine._meter.add = lambda *_: None
    found, moves = {}, []
    while any(engine.engine.running or engine.engine.waiting for engine in engines):
        for engine in engines:
            for rollout in engine.step().finished:
                found[rollout.prompt.sample] = rollout
                there.record_finished(rollout)
        moves += there.rebalance()
    assert len(moves) >= 2
    assert there.num_moves == len(moves)
    assert found.keys() == expected.keys()
    for i, rollout in found.items():
        assert rollout.tokens == expected[i][0]
        assert rollout.logprobs == pytest.approx(expected[i][1], abs=1e-9)


def test_an_engine_here_tells_what_it_has_to_do():
    engine = LocalEngine(Engine.of(tiny(), rows=4, max_tokens=96))
    assert engine.load() is None
    for prompt in asked():
        engine.add(prompt)
    engine.step()
    told = engine.load()
    assert told.rows == 4
    assert [one.key for one in told.samples] == [(1, i) for i in range(8)]
    assert [one.emitted for one in told.samples] == [1] * 4 + [0] * 4
    assert [one.context for one in told.samples] == [4] * 4 + [3] * 4
    assert engine.remove((9, 9)) is None
    assert isinstance(engine.remove((1, 0)).partial, Rollout)
    assert isinstance(engine.remove((1, 7)), Prompt)
    assert len(engine.load().samples) == 6


def test_a_server_that_refuses_samples_for_now_takes_no_part_though_it_still_has_some():
    server = WorkerHandle(0, "server", None, rows=4, room=0, is_ready=True, speed=PACE)
    server.samples[1, 0] = None
    samples = {(1, 0): SimpleNamespace(unfinished=lambda: sample(1))}
    pool = SimpleNamespace(workers={0: server})
    engine = RemoteEngine(SimpleNamespace(pool=pool, samples=samples, version=0, moving={}), 0)
    assert engine.load() is None
    server.room = 2
    assert engine.load() == load(sample(1), rows=2)
