"""Tests that speculation changes no token, for any drafter, draft length and movement of samples.

The reference makes each token by a full forward pass of transformers' own model, with the same noise.
"""

from collections import Counter

import pytest
import torch
from kit.distributed import FORKS
from kit.own_draws import Judge
from kit.rollouts import (
    FLIPS,
    KINDS,
    VOCABULARY,
    Flips,
    Insider,
    Stubborn,
    decode_plainly,
    engine_of,
    go_on_elsewhere,
    logprobs_of,
    next_logits,
    perturbed,
    samples,
    tiny_policy,
    tokens_of,
)

from aedit.spec_rollout.model import cache
from aedit.spec_rollout.model.kv_storage import KVBlocks
from aedit.spec_rollout.sampling import LARGE_VOCABULARY

ARMS = ["off", "layer:1", "layer:2", "layer:4", "layer:8", "layer:3x2x6", "layer:4x3x12"]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def mixed():
    """Return twenty samples with different sampling settings."""
    return samples(KINDS)


@pytest.fixture(scope="module")
def plain(policy, mixed):
    return decode_plainly(policy, mixed)


@pytest.fixture(scope="module")
def texts(mixed, plain):
    return [[*prompt.tokens, *tokens] for prompt, tokens in zip(mixed, plain, strict=True)]


def test_the_reference_shows_what_it_should(mixed, plain):
    ends = {len(tokens) < prompt.sampling.max_new_tokens for prompt, tokens in zip(mixed, plain, strict=True)}
    assert ends == {True, False}
    assert len({token for tokens in plain for token in tokens}) > VOCABULARY / 2


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("arm", ARMS)
def test_no_arm_changes_a_token_at_any_batch_size(policy, mixed, plain, texts, arm, rows):
    some = slice(None, None, 4 if rows == 1 else 1)
    insider = Insider(texts)
    engine = engine_of(policy, rows, insider, arm)
    assert tokens_of(engine, mixed[some]) == plain[some]
    if arm != "off":
        assert insider.num_proposed
        assert engine.status()["accepted_length"] > 1.3
    assert engine.status()["tokens"] == sum(map(len, plain[some]))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_flip_of_the_arm_changes_no_token(policy, mixed, plain, texts, rows):
    some = slice(None, None, 4 if rows == 1 else 1)
    engine = engine_of(policy, rows, Insider(texts, seed=1), *FLIPS)
    assert tokens_of(engine, mixed[some]) == plain[some]
    assert set(engine.status()["arms"]) == set(FLIPS)


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_drafts_that_are_cut_row_by_row_change_no_token(policy, mixed, plain, texts, layout, monkeypatch):
    monkeypatch.setattr(cache, "default_layout", lambda device: layout)
    engine = engine_of(policy, 4, Insider(texts), *FLIPS)
    engine.chooser = Flips(*FLIPS, cuts=True)
    computed, layers = [], engine.target._layers

    def counted(tokens_T, positions_T, attend):
        computed.append(len(tokens_T))
        return layers(tokens_T, positions_T, attend)

    monkeypatch.setattr(engine.target, "_layers", counted)
    assert tokens_of(engine, mixed) == plain
    seen = [observed for observed in engine.chooser.seen if observed.nodes]
    assert any(len(set(observed.verified_B)) > 1 for observed in seen)
    for observed in seen:
        assert all(map(int.__le__, observed.accepted_B, observed.verified_B))
        assert observed.nodes == -(-sum(observed.verified_B) // observed.view.rows)
    passes = [observed.view.rows + sum(observed.verified_B) for observed in seen]
    assert not Counter(passes) - Counter(computed), "tokens that are cut are not computed"
    assert engine.status()["accepted_length"] > 1.3


def test_keys_and_values_in_blocks_change_no_token(policy, mixed, plain, texts, monkeypatch):
    monkeypatch.setattr(cache, "default_layout", lambda device: "blocks")
    engine = engine_of(policy, 4, Insider(texts), *FLIPS)
    assert tokens_of(engine, mixed) == plain
    assert isinstance(engine.target.cache.storage, KVBlocks)
    assert engine.status()["kv_bytes"] == 0, "all blocks are free again"


@pytest.mark.parametrize("vocabulary", [LARGE_VOCABULARY - 1, LARGE_VOCABULARY + 3])
def test_in_a_large_vocabulary_every_token_is_that_of_an_independent_oracle(mixed, vocabulary):
    policy, some = tiny_policy(vocabulary=vocabulary), mixed[1::2]
    made = {each.prompt.key: each for each in engine_of(policy, 4).generate(some)}
    plain = [made[prompt.key] for prompt in some]
    assert not any(each.any() for each in Judge(policy).shortfalls(plain))
    assert len({token for each in plain for token in each.tokens}) > 100
    texts = [[*each.prompt.tokens, *each.tokens] for each in plain]
    engine = engine_of(policy, 4, Insider(texts, seed=1), *FLIPS)
    assert tokens_of(engine, some) == [each.tokens for each in plain]
    assert set(engine.status()["arms"]) == set(FLIPS)
    assert bool(engine.status()["noise_bytes"]) == (vocabulary < LARGE_VOCABULARY)


@pytest.mark.parametrize("drafter", [lambda texts: Stubborn(), lambda texts: Insider(texts, honesty=0.0)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_malicious_drafter_changes_no_token(policy, mixed, plain, texts, drafter, rows):
    some = slice(None, None, 4 if rows == 1 else 1)
    assert tokens_of(engine_of(policy, rows, drafter(texts), *FLIPS), mixed[some]) == plain[some]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_all_want_the_same_get_it(policy, kind):
    prompts = samples([kind])
    plain = decode_plainly(policy, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    assert tokens_of(engine_of(policy, 3, Insider(texts), *FLIPS), prompts) == plain


@pytest.mark.parametrize("rows", [4, 16])
def test_in_float32_every_token_that_differs_was_a_draw_between_two(mixed, rows):
    policy = tiny_policy(dtype=torch.float32)
    plain = decode_plainly(policy, mixed)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(mixed, plain, strict=True)]
    made = tokens_of(engine_of(policy, rows, Insider(texts), *FLIPS), mixed)
    num_others = 0
    for prompt, tokens, expected in zip(mixed, made, plain, strict=True):
        if tokens != expected:
            same = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
            text = [*prompt.tokens, *tokens[:same]]
            best = perturbed(next_logits(policy, [text])[0], prompt, len(text)).topk(2).values
            assert best[0] - best[1] < 1e-4
            num_others += 1
    assert num_others <= sum(map(len, plain)) / 1000


def test_a_flip_costs_no_computation_of_what_is_there(policy, mixed, plain, texts, monkeypatch):
    """Defect 15 of fastrl.

    Turning speculation on recomputed every live context, and it was never turned off.
    """
    engine = engine_of(policy, 4, Insider(texts), "off", "layer:4", "off", "off", "layer:4x3x12")
    prefill, begun = engine.target.prefill, []
    monkeypatch.setattr(
        engine.target, "prefill", lambda segments: begun.extend(segments) or prefill(segments)
    )
    assert tokens_of(engine, mixed) == plain
    assert len(begun) <= len(mixed)


def test_a_moved_sample_goes_on_as_if_nothing_had_happened(policy, mixed, plain, texts):
    here, there = engine_of(policy, 4, Insider(texts), *FLIPS), engine_of(policy, 3, Stubborn(), "layer:2")
    made = [here.add(prompt) for prompt in mixed]
    moved = []
    while here.running or here.waiting:
        here.step()
        candidates = (
            (here.running[1:2] + here.waiting[-1:]) if len(here.meters.arms) % 2 else here.running[:1]
        )
        for rollout in candidates[: 1 + len(moved) % 2]:
            moved.append(there.add(here.remove(rollout)))
        there.step()
    back = [here.add(there.remove(rollout)) for rollout in [*there.running, *there.waiting]]
    for engine in (here, there):
        list(engine.generate([]))
    ended = {
        (each.prompt.rollout, each.prompt.sample): each
        for each in [*made, *moved, *back]
        if each.finish_reason
    }
    assert len(moved) > 8
    assert back
    assert any(rollout.prompt.sample == 0 for rollout in moved)
    for prompt, tokens in zip(mixed, plain, strict=True):
        rollout = ended[prompt.rollout, prompt.sample]
        assert rollout.tokens == tokens
        assert rollout.logprobs == pytest.approx(logprobs_of(policy, prompt, tokens), abs=1e-6)
        assert len(rollout.versions) == len(tokens)


def test_who_is_not_here_cannot_be_taken_out(policy, mixed):
    engine = engine_of(policy, 4)
    rollout = engine.add(mixed[0])
    engine.remove(rollout)
    with pytest.raises(ValueError, match="rollout 0/0 is not in this engine"):
        engine.remove(rollout)


def test_a_sample_goes_on_in_another_process(mixed, plain, texts):
    """It has nothing of this process: it is forked from a server that has only imported modules."""
    seed = 0
    engine = engine_of(tiny_policy(seed), 4, Insider(texts), *FLIPS)
    made = [engine.add(prompt) for prompt in mixed[:4]]
    for _ in range(3):
        engine.step()
    prompts = [engine.remove(rollout) for rollout in made if not rollout.finish_reason]
    assert any(prompt.partial.tokens for prompt in prompts)
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=go_on_elsewhere, args=(theirs, seed), daemon=True)
    process.start()
    try:
        ours.send(prompts)
        assert ours.poll(300), "the other process did not answer within 300 s"
        rollouts = ours.recv()
        process.join(30)
    finally:
        process.kill()
        process.join(30)
    done = [rollouts.get(each.prompt.sample, each).tokens for each in made]
    assert done == plain[:4]


def test_greedy_decoding_is_the_same_in_rejection_mode_which_knows_no_trees(policy):
    prompts = samples(["greedy"])
    plain = decode_plainly(policy, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    engine = engine_of(policy, 3, Insider(texts), "layer:4", "off", "layer:1", mode="rejection")
    assert tokens_of(engine, prompts) == plain
    assert engine.status()["accepted_length"] > 1.3
    engine = engine_of(policy, 3, Insider(texts), "layer:3x2x6", mode="rejection")
    engine.add(prompts[0])
    with pytest.raises(ValueError, match="layer:3x2x6: rejection mode verifies chains only"):
        engine.step()
