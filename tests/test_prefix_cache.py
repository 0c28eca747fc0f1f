"""Tests the prefix cache: what it saves, what it keeps and drops, and that it changes no token or feature."""

import random
from dataclasses import replace

import pytest
import torch
from kit.prefill import Recorder, features_of, long_prompts
from kit.rollouts import FLIPS, VOCABULARY, Flips, Insider, decode_plainly, perturbed, tiny_policy

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.engine.prefill import BLOCK_TOKENS, KEY_BYTES, PrefixCache
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import FeatureRing, RingShape, RowFeatures

BLOCK_BYTES = KEY_BYTES + 2 * 2 * 2 * BLOCK_TOKENS * 8 * 8
"""Two layers, keys and values, two heads of size 8, float64."""
FEATURE_BYTES = BLOCK_TOKENS * 32 * 8
SHAPE = RingShape.within(400_000, 32, torch.float64)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(seed=1)


def engine_of(policy, rows=3, drafter=None, arms=("off",), max_tokens=160, num_bytes=2**20, **limits):
    path = limits.pop("path", "fast")
    target = make_target(policy, rows=rows, max_tokens=max_tokens, nodes=12, path=path)
    drafters = {} if drafter is None else {"layer": drafter}
    limits = EngineLimits(prefix_cache_bytes=num_bytes, **limits)
    return Engine(target, drafters=drafters, chooser=Flips(*arms), limits=limits)


def computed(engine, prompts):
    """Return the rollouts in the order of the prompts, and the number of tokens computed before they ran."""
    before = engine.status()["prefilled_tokens"]
    rollouts = [engine.add(prompt) for prompt in prompts]
    list(engine.generate([]))
    return rollouts, engine.status()["prefilled_tokens"] - before


def next_turn(rollout, tokens, **changes):
    prompt = rollout.prompt
    text = (*prompt.tokens, *rollout.tokens, *tokens)
    return replace(prompt, tokens=text, sample=prompt.sample + 100, **changes)


# --- what it saves


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_a_repeated_prompt_and_the_second_turn_of_a_dialogue_recompute_less_than_a_block(policy, path):
    """Nothing of the 400 tokens, nor of the answer, is computed again but the rest of the last block."""
    (prompt,) = long_prompts([400], max_new_tokens=37)
    engine = engine_of(policy, max_tokens=600, path=path)
    (first,), num_computed = computed(engine, [prompt])
    assert num_computed == 399
    again, num_computed = computed(engine, [replace(prompt, sample=1), replace(prompt, sample=2)])
    assert num_computed == 2 * (399 % BLOCK_TOKENS)
    new = (5, 6, 7)
    turn = next_turn(first, new)
    (second,), num_computed = computed(engine, [turn])
    num_known = len(prompt.tokens) + len(first.tokens) - 1  # the last token has not been through the policy
    assert num_computed - len(new) == num_known % BLOCK_TOKENS
    assert num_known % BLOCK_TOKENS > 0
    status = engine.status()["prefix_cache"]
    assert (status["lookups"], status["hits"]) == (4, 3)
    assert status["hit_tokens"] == 2 * 384 + num_known // BLOCK_TOKENS * BLOCK_TOKENS
    for rollout in (first, *again, second):
        assert rollout.tokens == best_tokens({0: policy}, rollout)


def test_a_prompt_can_be_used_while_its_sample_still_runs(policy):
    first, second = (replace(prompt, group=-1) for prompt in long_prompts([64, 64], group=0))
    engine = engine_of(policy)
    engine.add(first)
    engine.step()
    _, num_computed = computed(engine, [second])
    assert num_computed == 63 % BLOCK_TOKENS


def test_equal_beginnings_are_stored_once(policy):
    engine = engine_of(policy)
    beginning = long_prompts([64])[0].tokens
    prompts = [
        Prompt(tokens=(*beginning, i, *([0] * 20)), sample=i, sampling=Sampling(max_new_tokens=1))
        for i in range(3)
    ]
    for prompt in prompts:
        computed(engine, [prompt])
    status = engine.status()["prefix_cache"]
    assert status["blocks"] == 4 + 3  # 64 shared tokens; 16 of the other 20
    assert status["bytes"] == 7 * BLOCK_BYTES


def test_off_means_off(policy):
    engine = engine_of(policy, num_bytes=0)
    (prompt,) = long_prompts([64])
    computed(engine, [prompt])
    assert computed(engine, [replace(prompt, sample=1)])[1] == 63
    status = engine.status()["prefix_cache"]
    assert {key: value for key, value in status.items() if value} == {}
    # Only prompts' features are kept then, for the group.
    engine = engine_of(policy, num_bytes=0, drafter=Insider([]))
    engine.add(prompt)
    engine.step()
    before = engine.status()["feature_bytes"]
    engine.step()
    assert engine.status()["feature_bytes"] == before == 63 * 32 * 8


# --- what it keeps and drops


def blocks_of(engine, prompt):
    tokens = prompt.tokens[:-1]
    return len(engine._rows.prefix_cache.find(tokens, engine.target.version))


def test_the_least_recently_used_text_is_evicted_from_its_end(policy):
    a, b, c = (
        replace(prompt, sampling=Sampling(max_new_tokens=1))
        for i in range(3)
        for prompt in long_prompts([65], seed=i)
    )
    engine = engine_of(policy, num_bytes=9 * BLOCK_BYTES)
    for prompt in (a, b, replace(a, sample=1)):
        computed(engine, [prompt])
    assert engine.status()["prefix_cache"]["bytes"] == 8 * BLOCK_BYTES
    computed(engine, [c])
    assert [blocks_of(engine, prompt) for prompt in (a, b, c)] == [4, 1, 4]
    status = engine.status()["prefix_cache"]
    assert (status["evicted_blocks"], status["bytes"]) == (3, 9 * BLOCK_BYTES)
    # What is left of a text is its beginning.
    assert computed(engine, [replace(b, sample=1)])[1] == 64 - BLOCK_TOKENS


def test_a_text_that_is_longer_than_the_limit_is_stored_in_part(policy):
    (prompt,) = long_prompts([100])
    engine = engine_of(policy, num_bytes=3 * BLOCK_BYTES + 5)
    computed(engine, [prompt])
    assert (blocks_of(engine, prompt), engine.status()["prefix_cache"]["bytes"]) == (3, 3 * BLOCK_BYTES)


def test_new_weights_drop_everything(policy):
    engine = engine_of(tiny_policy(seed=1))
    (prompt,) = long_prompts([64])
    computed(engine, [prompt])
    engine.add(long_prompts([32], seed=1)[0])
    engine.step()
    new = tiny_policy(seed=4)
    assert engine.status()["prefix_cache"]["blocks"] == 4 + 1
    engine.update_weights(new.state_dict(), 1)
    assert engine.status()["prefix_cache"]["blocks"] == 2  # of the running sample, computed again
    (rollout,), num_computed = computed(engine, [replace(prompt, sample=1)])
    assert num_computed == 63
    assert rollout.tokens == decode_plainly(new, [rollout.prompt])[0]


def test_blocks_of_another_version_or_after_other_tokens_are_not_found():
    cache = PrefixCache(2**20)
    a, b, c = ([i] * BLOCK_TOKENS for i in range(3))

    def store(tokens, version):
        kv = torch.tensor(tokens)
        cache.insert(cache.find(tokens, version), tokens, version, lambda start, end: (kv[start:end], None))

    store([*a, *b, *c, 7], 1)
    store([*b, *c], 1)
    store([*a, *c], 2)
    for tokens, version, found in (
        ([*a, *b, *c, 7], 1, 3),
        ([*a, *b, *c[:-1], 9], 1, 2),
        ([*a, *b], 2, 1),
        ([*a, *c], 1, 1),
        ([*b, *c], 1, 2),
        ([*b, *c], 2, 0),
        ([*c], 1, 0),
        (a[:-1], 1, 0),
        (a, 3, 0),
    ):
        blocks = cache.find(tokens, version)
        assert torch.cat([torch.empty(0), *(block.kv for block in blocks)]).tolist() == tokens[: 16 * found]


def test_the_memory_is_that_of_the_tensors_and_within_the_limit_at_all_times(policy):
    prompts = [prompt for i in range(12) for prompt in long_prompts([20 + 11 * (i % 5)], seed=i)]
    limit = 6 * (BLOCK_BYTES + FEATURE_BYTES)
    engine = engine_of(policy, num_bytes=limit, drafter=Insider([]))
    for prompt in prompts:
        engine.add(prompt)
    while engine.running or engine.waiting:
        engine.step()
        cache = engine._rows.prefix_cache
        tensors = [x for block in cache._blocks.values() for x in (block.kv, block.features_Tf)]
        num_bytes = sum(x.untyped_storage().nbytes() for x in tensors) + KEY_BYTES * len(cache._blocks)
        assert cache.status()["bytes"] == num_bytes <= limit
    assert cache.status()["evicted_blocks"] > 6
    assert engine.status()["feature_bytes"] == 0


def test_a_sink_that_is_set_later_gets_all_features(policy):
    engine = engine_of(policy)
    (prompt,) = long_prompts([64])
    computed(engine, [prompt])
    engine.sink = sink = Recorder()
    computed(engine, [replace(prompt, sample=1)])
    ((tokens, features, *_),) = sink.ended
    assert torch.allclose(torch.cat(features), features_of(policy, tokens)[:-1], atol=1e-9)


def test_features_of_a_sample_are_not_kept_in_tensors_of_all_rows(policy):
    """After some steps they are copied out, so that a long sample does not hold those of all others."""
    asked = long_prompts([5, 5, 5, 5], max_new_tokens=150)
    engine = engine_of(policy, rows=4, drafter=Insider([]))
    for prompt in asked:
        engine.add(prompt)
    for _ in range(140):
        engine.step()
    for rollout in list(engine.running[1:]):
        engine.remove(rollout)
    assert engine.status()["feature_bytes"] < 32 * 8 * (145 + 4 * 64)


# --- it changes nothing


def key(prompt):
    return prompt.rollout, prompt.sample


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 0), (1, 5), (2, 5), (2, 1000)])
def test_dialogues_get_the_same_tokens_and_features_with_and_without_it(policy, seed, num_blocks):
    """Turns of dialogues in groups, evictions, moves and new versions, drafters and a sink, in any order."""
    draw = random.Random(seed)
    other, models = tiny_policy(seed=4), {}
    num_bytes = num_blocks * (BLOCK_BYTES + FEATURE_BYTES)
    here, there = (
        engine_of(tiny_policy(seed=1), rows, Insider([]), FLIPS, num_bytes=num_bytes, prefill_tokens=24)
        for rows in (4, 2)
    )
    here.sink = sink = Recorder()
    weights = {0: policy, 1: other}
    system = [long_prompts([40], seed=i)[0].tokens for i in range(2)]
    for i in range(14):
        sampling = Sampling(max_new_tokens=draw.randint(1, 24), temperature=draw.choice([0.0, 1.0]))
        tokens = (*system[i % 2], *(draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 3, 20]))))
        group = i % 2 if len(tokens) == 40 else -1
        here.add(Prompt(tokens=tokens, rollout=seed, sample=i, group=group, sampling=sampling))
    ended, version = [], 0
    models[0] = weights[0]
    while here.running or here.waiting or there.running or there.waiting:
        for engine in (here, there):
            for rollout in engine.step().finished:
                ended.append(rollout)
                text = len(rollout.prompt.tokens) + len(rollout.tokens)
                if text < 110 and draw.random() < 0.8:
                    new = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
                    here.add(next_turn(rollout, new, group=-1))
        some = [*here.running, *here.waiting]
        if some and draw.random() < 0.1:
            there.add(here.remove(draw.choice(some)))
        if there.running and draw.random() < 0.2:
            here.add(there.remove(draw.choice(there.running)))
        if draw.random() < 0.04:
            version += 1
            models[version] = weights[version % 2]
            for engine in (here, there):
                engine.update_weights(weights[version % 2].state_dict(), version)
    assert len(ended) > 25
    assert version > 0
    for rollout in ended:
        assert rollout.tokens == best_tokens(models, rollout)
    for tokens, features, _, begun, _ in sink.ended:
        expected = features_of(models[begun], tokens)[:-1]
        assert torch.allclose(torch.cat(features), expected, atol=1e-9)
    status = here.status()["prefix_cache"]
    assert (status["hits"] > 5, status["evicted_blocks"] > 5) == (num_blocks > 0, num_blocks == 5)


def best_tokens(models, rollout):
    """Return the tokens that the policy versions of a rollout would draw after the text before each."""
    text = [*rollout.prompt.tokens, *rollout.tokens]
    logits = {
        version: models[version](input_ids=torch.tensor([text]), use_cache=False).logits[0].detach()
        for version in set(rollout.versions)
    }
    positions = range(len(rollout.prompt.tokens), len(text))
    return [
        int(perturbed(logits[version][position - 1], rollout.prompt, position).argmax())
        for version, position in zip(rollout.versions, positions, strict=True)
    ]


def test_a_sample_that_came_without_its_first_features_harms_nobody(policy):
    """Its keys and values cannot be stored where features are needed."""
    (prompt,) = long_prompts([100], max_new_tokens=30)
    here, there = engine_of(policy), engine_of(policy)
    there.sink = RowFeatures(FeatureRing(bytearray(SHAPE.num_bytes), SHAPE))
    here.add(prompt)
    for _ in range(5):
        here.step()
    moved = there.add(here.remove(here.running[0], kv=True))
    list(there.generate([]))
    assert there.status()["prefix_cache"]["blocks"] == 0
    assert moved.tokens == decode_plainly(policy, [prompt])[0]
