"""Tests the prefill of samples that start: batched, in parts between passes, without effect on any token."""

import random
from dataclasses import replace

import pytest
import torch
from kit.prefill import Recorder, features_of, long_prompts, watched
from kit.rollouts import FLIPS, Flips, Insider, decode_plainly, prompts_of, tiny_policy

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.model import KVMemory, KVMemoryError, Target
from aedit.spec_rollout.sampling import Sampling


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(seed=1)


def engine_of(policy, rows=4, drafter=None, arms=("off",), **limits):
    target = Target.of(policy, rows=rows, max_tokens=160, nodes=12)
    drafters = {} if drafter is None else {"layer": drafter}
    limits = EngineLimits(**{"prefix_cache_bytes": 0, **limits})
    return Engine(target, drafters=drafters, chooser=Flips(*arms), limits=limits)


def finish(engine, made):
    list(engine.generate([]))
    return [rollout.tokens for rollout in made]


def test_all_samples_that_start_in_a_step_are_computed_in_one_call(policy, monkeypatch):
    asked = long_prompts([30, 1, 7, 12])
    engine = engine_of(policy)
    events = watched(engine, monkeypatch)
    made = [engine.add(prompt) for prompt in asked]
    engine.step()
    assert events == [[(0, 0, 29), (2, 0, 6), (3, 0, 11)], "pass"]  # a prompt of one token needs nothing
    assert finish(engine, made) == decode_plainly(policy, asked)


def test_the_members_of_a_group_need_their_prompt_once(policy, monkeypatch):
    asked = [*long_prompts([30] * 3, group=5), *long_prompts([30], seed=1), *long_prompts([30], group=5)]
    engine = engine_of(policy, rows=4)
    events = watched(engine, monkeypatch)
    made = [engine.add(replace(prompt, sample=i)) for i, prompt in enumerate(asked)]
    tokens = finish(engine, made)
    assert [event for event in events if event != "pass"] == [[(0, 0, 30), (3, 0, 30)]]
    assert tokens == decode_plainly(policy, [rollout.prompt for rollout in made])


@pytest.mark.parametrize("others", ["none", "a drafter", "a running sample", "a prompt of one token"])
def test_the_first_tokens_of_samples_that_start_together_need_no_pass_of_their_own(
    policy, monkeypatch, others
):
    """They are drawn from the features of the prompts' last tokens, which a sink gets as those of a pass."""
    asked = long_prompts([30, 7, 12], group=2)
    if others == "a prompt of one token":
        asked[1] = replace(asked[1], tokens=asked[1].tokens[:1])
    drafters = {"drafter": Insider([[]], 0)} if others == "a drafter" else {"drafter": None}
    engine = engine_of(policy, **drafters)
    engine.sink = sink = Recorder()
    made = []
    if others == "a running sample":
        made.append(engine.add(replace(long_prompts([5])[0], sample=9)))
        engine.step()
    made += [engine.add(prompt) for prompt in asked]
    events = watched(engine, monkeypatch)
    engine.step()
    counts = [len(prompt.tokens) - (others != "none") for prompt in asked if len(prompt.tokens) > 1]
    assert [count for _, _, count in events[0]] == counts
    assert events.count("pass") == (others != "none")
    assert all(len(rollout.tokens) == 1 for rollout in made[-3:])
    engine.step()
    assert events.count("pass") == 1 + (others != "none")
    assert finish(engine, made) == decode_plainly(policy, [rollout.prompt for rollout in made])
    for tokens, features, *_ in sink.ended:
        torch.testing.assert_close(torch.cat(features), features_of(policy, tokens)[:-1], rtol=0, atol=1e-9)


def test_a_continued_sample_and_its_group_begin_with_their_own_last_tokens(policy, monkeypatch):
    first, second = (replace(each, sample=i) for i, each in enumerate(long_prompts([20] * 2, group=1)))
    other = engine_of(policy)
    moved = other.add(first)
    other.step()
    other.step()
    engine = engine_of(policy)
    events = watched(engine, monkeypatch)
    made = [engine.add(other.remove(moved)), engine.add(second)]
    assert finish(engine, made) == decode_plainly(policy, [first, second])
    assert events[:2] == [[(0, 0, 21)], "pass"], "the second one has its whole prompt from the first"


def test_new_weights_compute_all_running_samples_together(policy, monkeypatch):
    """The first member of a group is computed whole; the others continue after the prompt."""
    asked = [*long_prompts([20] * 3, group=1), *long_prompts([9, 14], seed=1)]
    asked = [replace(prompt, sample=i) for i, prompt in enumerate(asked)]
    engine = engine_of(tiny_policy(seed=1), rows=6, prefill_tokens=4)
    made = [engine.add(prompt) for prompt in asked]
    for _ in range(3):
        engine.step()
    events = watched(engine, monkeypatch)
    engine.update_weights(policy.state_dict(), 1)
    assert events == [
        [(0, 0, 20 + 3), (3, 0, 9 + 3), (4, 0, 14 + 3)],
        [(1, 19, 4), (2, 19, 4)],
    ]
    assert finish(engine, made) == decode_plainly(policy, asked)


def test_a_long_prompt_does_not_hold_up_the_running_samples(policy, monkeypatch):
    short, long, last = long_prompts([5, 101, 3], max_new_tokens=20)
    engine = engine_of(policy, prefill_tokens=16)
    made = [engine.add(short)]
    engine.step()
    events = watched(engine, monkeypatch)
    made += [engine.add(long), engine.add(last)]
    for number in range(1, 7):
        step = engine.step()
        assert len(step.counts) == 1
        assert len(made[0].tokens) == number + 1
        assert (engine.running, engine.waiting) == (made[:1], made[1:])
    step = engine.step()
    assert len(step.counts) == 3
    parts = [[(1, start, 16)] for start in range(0, 96, 16)]
    assert events == [x for part in parts for x in (part, "pass")] + [[(1, 96, 4), (2, 0, 2)], "pass"]
    assert finish(engine, made) == decode_plainly(policy, [short, long, last])


def test_nothing_is_held_back_while_no_sample_is_running(policy, monkeypatch):
    asked = long_prompts([101, 50, 60])
    engine = engine_of(policy, rows=2, prefill_tokens=8)
    events = watched(engine, monkeypatch)
    made = [engine.add(prompt) for prompt in asked]
    tokens = finish(engine, made)
    assert [event for event in events if event != "pass"] == [[(0, 0, 101), (1, 0, 50)], [(0, 0, 60)]]
    assert tokens == decode_plainly(policy, asked)


def test_between_two_passes_no_more_is_computed_than_the_limit(policy, monkeypatch):
    """Samples end and start in all steps, at the end of one step and at the beginning of the next."""
    draw = random.Random(3)
    asked = long_prompts([draw.randint(1, 60) for _ in range(30)])
    asked = [
        replace(prompt, sampling=Sampling(max_new_tokens=draw.randint(1, 6)), group=-1) for prompt in asked
    ]
    engine = engine_of(policy, rows=3, prefill_tokens=10)
    events = watched(engine, monkeypatch)
    made = []
    never_idle = engine.add(replace(long_prompts([2], max_new_tokens=150)[0], sample=99))
    engine.step()
    for prompt in asked:
        made.append(engine.add(prompt))
        engine.step()
    assert list(engine.generate([]))[-1] is never_idle
    between, most = 0, 0
    for event in events[1:]:
        between = 0 if event == "pass" else between + sum(count for _, _, count in event)
        most = max(most, between)
    assert most == 10
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, asked)


@pytest.mark.parametrize("ends", ["removed", "closed"])
def test_a_sample_that_leaves_before_its_prompt_is_computed_leaves_nothing(policy, monkeypatch, ends):
    short, long, last = long_prompts([5, 101, 40], max_new_tokens=20)
    engine = engine_of(policy, rows=2, prefill_tokens=16)
    made = [engine.add(short)]
    engine.step()
    made += [engine.add(long), engine.add(last)]
    engine.step()
    assert engine.waiting == made[1:]
    released = []
    monkeypatch.setattr(engine.target, "release_row", released.append)
    if ends == "closed":
        engine.close()
        assert sorted(released) == [0, 1]
        return
    moving = engine.remove(made[1])
    assert (moving.partial.tokens, moving.partial.kv) == ([], None)
    engine.step()
    assert released[0] == 1
    elsewhere = engine_of(policy).add(moving)
    assert elsewhere.prompt == long
    assert finish(engine, [made[0], made[2]]) == decode_plainly(policy, [short, last])


def test_new_weights_in_the_middle_of_a_prefill_are_those_of_the_whole_prompt(policy):
    old, new = tiny_policy(seed=1), tiny_policy(seed=4)
    short, long = long_prompts([5, 101], max_new_tokens=20)
    engine = engine_of(old, prefill_tokens=16)
    engine.sink = sink = Recorder()
    made = [engine.add(short)]
    engine.step()
    made.append(engine.add(long))
    for _ in range(3):
        engine.step()
    assert engine.waiting == made[1:]
    engine.update_weights(new.state_dict(), 1)
    list(engine.generate([]))
    assert made[1].tokens == decode_plainly(new, [long])[0]
    assert set(made[1].versions) == {1}
    tokens, features, *_ = sink.ended[-1]
    torch.testing.assert_close(torch.cat(features), features_of(new, tokens)[:-1], rtol=0, atol=1e-9)


def test_a_row_that_was_filled_in_parts_moves_down_when_others_have_ended(policy, monkeypatch):
    asked = long_prompts([5, 6, 7, 80], max_new_tokens=12)
    asked[1:3] = [replace(prompt, sampling=Sampling(max_new_tokens=3)) for prompt in asked[1:3]]
    engine = engine_of(policy, prefill_tokens=16)
    events = watched(engine, monkeypatch)
    made = [engine.add(prompt) for prompt in asked[:3]]
    engine.step()
    made.append(engine.add(asked[3]))
    tokens = finish(engine, made)
    parts = [(3, 0, 16), (3, 16, 16), (3, 32, 16), (3, 48, 16), (1, 64, 15)]
    assert [event for event in events if event != "pass"][1:] == [[part] for part in parts]
    assert tokens == decode_plainly(policy, asked)


@pytest.mark.parametrize("seed", range(4))
def test_no_limit_changes_a_token_or_a_feature(policy, seed):
    """Samples come, leave, come back and end, in random order; drafters and sink follow."""
    draw = random.Random(seed)
    asked = [
        replace(prompt, sample=i, group=i % 3 if i % 4 else -1)
        for i, prompt in enumerate(random_groups(draw, 24))
    ]
    plain = dict(zip(map(key, asked), decode_plainly(policy, asked), strict=True))
    texts = [[*prompt.tokens, *plain[key(prompt)]] for prompt in asked]
    here, there = (
        engine_of(
            tiny_policy(seed=1), rows, Insider(texts, seed), FLIPS, prefill_tokens=draw.choice([1, 3, 11, 40])
        )
        for rows in (3, 2)
    )
    here.sink = sink = Recorder()
    made, queue = [], list(asked)
    while queue or here.running or here.waiting:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if queue:
                made.append(here.add(queue.pop()))
        here.step()
        there.step()
        some = [*here.running, *here.waiting]
        if some and draw.random() < 0.15:
            made.append(there.add(here.remove(draw.choice(some))))
        if there.running and draw.random() < 0.2:
            made.append(here.add(there.remove(draw.choice(there.running + there.waiting))))
        if draw.random() < 0.05:
            here.update_weights(policy.state_dict(), here.target.version + 1)
    list(there.generate([]))
    ended = {key(rollout.prompt): rollout.tokens for rollout in made if rollout.finish_reason}
    assert ended == plain
    assert not here.running
    for tokens, features, *_ in sink.ended:
        assert torch.allclose(torch.cat(features), features_of(policy, tokens)[:-1], atol=1e-9)


def random_groups(draw, count):
    by_group = [long_prompts([draw.randint(20, 90)], seed=100 + i)[0] for i in range(3)]
    for i in range(count):
        sampling = Sampling(max_new_tokens=draw.randint(1, 14), temperature=draw.choice([0.0, 1.0]))
        prompt = by_group[i % 3] if i % 4 else long_prompts([draw.randint(1, 70)], seed=i)[0]
        yield replace(prompt, sampling=sampling)


def key(prompt):
    return prompt.rollout, prompt.sample


# --- memory


def scarce_engine(policy, num_blocks, texts, sink=None, **limits):
    target = Target.of(policy, rows=6, max_tokens=90, nodes=4, kv=KVMemory("blocks", num_blocks))
    limits = EngineLimits(**limits)
    engine = Engine(target, drafters={"layer": Insider(texts)}, chooser=Flips(*SHORT_ARMS), limits=limits)
    engine.sink = sink
    return engine


SHORT_ARMS = ["off", "layer:4", "layer:2x2x4", "layer:1"]


@pytest.mark.parametrize("seed", range(2))
def test_samples_wait_for_memory_and_lose_no_token(policy, seed):
    """The pool holds two of the six rows at their greatest length; samples leave and come back."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(12)]
    asked = [
        replace(prompt, sampling=Sampling(max_new_tokens=draw.randint(1, 40)), group=-1)
        for prompt in long_prompts(lengths, seed=seed)
    ]
    plain = decode_plainly(policy, asked)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(asked, plain, strict=True)]
    sink = Recorder()
    caches = {"prefix_cache_bytes": 2**20 * (seed % 2)}
    engine = scarce_engine(tiny_policy(seed=1), 12, texts, sink, prefill_tokens=20, **caches)
    made = [engine.add(prompt) for prompt in asked]
    while engine.running or engine.waiting:
        engine.step()
        if draw.random() < 0.05:
            engine.update_weights(policy.state_dict(), engine.target.version + 1)
    assert [rollout.tokens for rollout in made] == plain
    assert engine.status()["kv_bytes"] == 0
    assert sum(not finished for *_, finished in sink.ended) > 2
    for tokens, features, *_ in sink.ended:
        assert torch.allclose(torch.cat(features), features_of(policy, tokens)[:-1], atol=1e-9)


def test_as_many_samples_start_as_memory_holds(policy):
    engine = scarce_engine(policy, 12, [])
    for prompt in long_prompts([48] * 5):
        engine.add(prompt)
    engine.step()
    assert len(engine.running) == 2  # half of a half of five: what fits without a trial of each number
    assert len(list(engine.generate([]))) == 5


def test_a_start_that_failed_takes_nothing_from_the_rows_it_has_filled(policy):
    """A member of a group would start in the row of one that has ended, but memory is short for the next."""
    (running, other, large), (ended, member) = (
        long_prompts([75, 3, 80]),
        long_prompts([30, 30], seed=1, group=1, max_new_tokens=3),
    )
    asked = [running, ended, replace(other, sampling=ended.sampling), member, large]
    target = Target.of(policy, rows=3, max_tokens=90, nodes=4, kv=KVMemory("blocks", 11))
    engine = Engine(target, limits=EngineLimits(prefix_cache_bytes=0))
    made = [engine.add(prompt) for prompt in asked]
    for _ in range(3):
        engine.step()
    assert (engine.running, engine.waiting) == ([made[0], made[3]], [made[4]])
    assert engine.status()["prefilled_tokens"] == 74 + 29 + 2 + 29  # the member's prompt once more
    assert finish(engine, made) == decode_plainly(policy, asked)


def test_a_sample_that_does_not_fit_alone_is_an_error_with_the_remedy_and_stays(policy, monkeypatch):
    engine = scarce_engine(policy, 6, [])  # one row of 90 tokens and a draft
    rollout = engine.add(long_prompts([50], max_new_tokens=40)[0])

    def refuse(spans):
        raise KVMemoryError("lower rows")

    with monkeypatch.context() as patch:
        patch.setattr(engine.target.cache.storage, "reserve", refuse)
        with pytest.raises(KVMemoryError, match="lower rows"):
            engine.step()
        assert (engine.running, engine.waiting) == ([], [rollout])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.target.cache.storage, "reserve", refuse)
        with pytest.raises(KVMemoryError, match="lower rows"):
            engine.step()
    list(engine.generate([]))
    assert rollout.tokens == decode_plainly(policy, [rollout.prompt])[0]


def test_rows_without_a_sample_take_no_memory(policy):
    engine = engine_of(policy, rows=4, prefill_tokens=16)
    short, long = long_prompts([5, 101], max_new_tokens=20)
    engine.add(short)
    engine.step()
    one = engine.status()["kv_bytes"]
    rollout = engine.add(long)
    engine.step()
    engine.step()
    assert engine.status()["kv_bytes"] > one
    engine.remove(rollout)
    engine.step()
    assert engine.status()["kv_bytes"] == one
    list(engine.generate([]))
    assert engine.status()["kv_bytes"] == 0


@pytest.mark.parametrize("limit", [{"prefill_tokens": 0}, {"prefix_cache_bytes": -1}])
def test_a_limit_that_makes_no_sense_is_refused(limit):
    with pytest.raises(ValueError, match=next(iter(limit))):
        EngineLimits(**limit)


def test_an_engine_takes_its_options_with_the_model(policy):
    engine = Engine.of(
        policy, rows=2, max_tokens=32, limits=EngineLimits(prefix_cache_bytes=0), mode="coupled"
    )
    assert engine.status()["prefix_cache"]["limit_bytes"] == 0
    with pytest.raises(TypeError, match="prefix"):
        Engine.of(policy, rows=2, max_tokens=32, prefix=1)
    assert len(list(engine.generate(prompts_of(2)))) == 2
