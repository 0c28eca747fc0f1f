"""Tests of new weights while samples run: every token is exactly that of the version that its span names."""

from dataclasses import replace

import pytest
import torch
from kit.rollouts import (
    Flips,
    Insider,
    decode_plainly,
    prompts_of,
    tiny_policy,
    tokens_of,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from aedit.spec_rollout.drafters import SuffixDrafter
from aedit.spec_rollout.engine import Engine, EngineLimits, WeightSwap
from aedit.spec_rollout.model import SpareWeights, make_target

POLICIES = {version: tiny_policy(seed=version) for version in range(1, 4)}
PREFILL_TOKENS = 7


def weights(version):
    return POLICIES[version].state_dict()


def expected(rollout):
    """Return the tokens that plain decoding by transformers gives for the rollout's spans of versions."""
    tokens = []
    for version in sorted(set(rollout.versions)):
        num_tokens = rollout.versions.count(version)
        prompt = rollout.prompt
        sampling = replace(prompt.sampling, max_new_tokens=num_tokens)
        text = replace(prompt, tokens=(*prompt.tokens, *tokens), sampling=sampling)
        tokens += decode_plainly(POLICIES[version], [text])[0]
    return tokens


def engine(drafter=None, arms=(), rows=4, path="fast", **limits):
    limits = EngineLimits(prefill_tokens=PREFILL_TOKENS, **limits)
    target = make_target(tiny_policy(seed=1), rows=rows, max_tokens=96, nodes=12, path=path)
    target.update_weights(weights(1), 1)
    if drafter is None:
        return Engine(target, limits=limits)
    kind = "suffix" if isinstance(drafter, SuffixDrafter) else "layer"
    return Engine(target, drafters={kind: drafter}, chooser=Flips(*arms), limits=limits)


def prompts(num=7):
    return prompts_of(num, seed=5, group_size=2, max_new_tokens=24)


DRAFTERS = {
    "plain": lambda: (None, ()),
    "chains of a drafter": lambda: (Insider(texts_of_version_2()), ("layer:4", "off", "layer:2")),
    "suffix": lambda: (SuffixDrafter(), ("suffix:4",)),
}


def texts_of_version_2():
    return [[*p.tokens, *t] for p, t in zip(prompts(), decode_plainly(POLICIES[2], prompts()), strict=True)]


@pytest.mark.parametrize("path", ["fast", "generic"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_token_after_a_swap_is_that_of_plain_decoding_with_the_new_weights(name, path):
    made = engine(*DRAFTERS[name](), path=path)
    swap = WeightSwap(made)
    rollouts = [made.add(prompt) for prompt in prompts()]
    num_steps, in_chunks = 0, []
    while made.running or made.waiting:
        if num_steps in (6, 9):  # the second one while the texts are being computed again
            swap.fill(weights(made.version + 1))
            swap.recompute(made.version + 1)
            assert not made.running
        before = made.status()["prefilled_tokens"]
        made.step()
        if num_steps >= 6:
            in_chunks.append(made.status()["prefilled_tokens"] - before)
        num_steps += 1
        assert num_steps < 500
    assert all(sum(in_chunks[:n]) <= PREFILL_TOKENS * (n + 1) for n in range(len(in_chunks)))
    assert max(in_chunks) <= 2 * PREFILL_TOKENS, "a chunk before a pass, and one when samples end after it"
    assert any({1, 3} <= set(rollout.versions) for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.versions == sorted(rollout.versions)
        assert len(rollout.tokens) == 24
        assert rollout.tokens == expected(rollout)


def test_samples_continue_one_by_one_while_others_are_computed():
    """After a swap the engine decodes before all texts are there again."""
    made = engine(rows=4)
    rollouts = [made.add(prompt) for prompt in prompts(4)]
    for _ in range(12):
        made.step()
    swap = WeightSwap(made)
    swap.fill(weights(2))
    lengths = [len(rollout.tokens) for rollout in rollouts]
    swap.recompute(2)
    assert sorted(made.waiting, key=rollouts.index) == rollouts
    numbers = []
    while len(made.running) < 4:
        made.step()
        numbers.append(len(made.running))
    assert set(numbers) >= {1, 2, 3}
    news = {r.prompt.key: r.versions[n:].count(2) for r, n in zip(rollouts, lengths, strict=True)}
    assert max(news.values()) > min(news.values())


def test_the_shortest_text_is_computed_first_so_that_no_token_waits_for_a_longer_one():
    made = engine(rows=4)
    long, short = (replace(prompts_of(1, seed=k, max_new_tokens=24)[0], rollout=k) for k in range(2))
    long = replace(long, tokens=(long.tokens * 20)[:60])
    rollouts = [made.add(prompt) for prompt in (long, short)]
    while len(made.running) < 2:
        made.step()
    swap = WeightSwap(made)
    swap.fill(weights(2))
    swap.recompute(2)
    num_tokens = len(short.tokens) + len(rollouts[1].tokens)
    num_silent = 0
    while not made.running:
        made.step()
        num_silent += 1
    assert made.running == [rollouts[1]]
    assert num_silent <= -(-num_tokens // PREFILL_TOKENS)
    while made.running or made.waiting:
        made.step()
    assert [rollout.tokens for rollout in rollouts] == [expected(rollout) for rollout in rollouts]


def test_the_contract_of_update_weights_is_as_before():
    made = engine(rows=4)
    rollouts = [made.add(prompt) for prompt in prompts(4)]
    for _ in range(12):
        made.step()
    running = list(made.running)
    made.update_weights(weights(2), 2)
    assert made.running == running, "computed in the call"
    while made.running:
        made.step()
    for rollout in rollouts:
        assert set(rollout.versions) == {1, 2}
        assert rollout.tokens == expected(rollout)


def test_a_removed_or_aborted_sample_is_not_waited_for_after_a_swap():
    made = engine(rows=4)
    rollouts = [made.add(prompt) for prompt in prompts(6)]
    for _ in range(12):
        made.step()
    swap = WeightSwap(made)
    swap.fill(weights(2))
    swap.recompute(2)
    made.step()
    made.abort(rollouts[1])
    moved = made.remove(rollouts[0])
    made.step()
    again = made.add(moved)
    while made.running or made.waiting:
        made.step()
    for rollout in (again, *rollouts[2:]):
        assert rollout.tokens == expected(rollout)
    assert rollouts[1].finish_reason == "abort"


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_finish_ends_what_has_begun_with_the_old_weights_and_starts_the_rest_with_the_new_ones(path):
    made = engine(SuffixDrafter(), ("suffix:4",), path=path)
    rollouts = [made.add(prompt) for prompt in prompts()]
    for _ in range(6):
        made.step()
    begun = {r.prompt.key for r in [*made.running, *made.waiting] if r.tokens}
    done = [r for r in rollouts if r.finish_reason]
    swap = WeightSwap(made)
    swap.fill(weights(2))
    old = swap.finish(2)
    assert (old.version, made.version) == (1, 2)
    assert {r.prompt.key for r in [*old.running, *old.waiting]} == begun
    before = old.status()["prefilled_tokens"]
    done += [rollout for engine in (made, old) for rollout in engine.generate([])]
    assert old.status()["prefilled_tokens"] == before, "keys and values came along"
    assert len(done) == len(rollouts)
    for rollout in done:
        assert len(set(rollout.versions)) == 1
        assert rollout.tokens == expected(rollout)
    assert {r.versions[0] for r in done if r.prompt.key in begun} == {1}
    assert {r.versions[0] for r in done} == {1, 2}
    swap.fill(weights(3))
    assert swap.finish(3) is None, "nothing had begun"
    assert tokens_of(made, prompts(2)) == decode_plainly(POLICIES[3], prompts(2))


@pytest.mark.parametrize("how", ["recompute", "finish"])
def test_a_version_that_goes_back_is_refused_and_changes_nothing(how):
    made = engine()
    swap = WeightSwap(made)
    rollouts = [made.add(prompt) for prompt in prompts(3)]
    for _ in range(5):
        made.step()
    swap.fill(weights(2))
    for version in (0, 1):
        with pytest.raises(ValueError, match=f"version {version} is not above version 1"):
            getattr(swap, how)(version)
    with pytest.raises(ValueError, match="is missing"):
        swap.fill({name: t for name, t in weights(2).items() if "norm" not in name})
    list(made.generate([]))
    for rollout in rollouts:
        assert set(rollout.versions) == {1}
        assert rollout.tokens == expected(rollout)


def test_tied_parameters_stay_tied_and_the_second_set_is_counted_once():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model, other = (Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)) for _ in "ab")
    spare = SpareWeights(model)
    assert spare.num_bytes == sum(p.nbytes for p in model.parameters())
    first = {name: t.clone() for name, t in model.state_dict().items()}
    spare.fill(other.state_dict())
    addresses = {p.data_ptr() for p in (*model.parameters(), *spare.model.parameters())}
    for _ in range(3):
        spare.exchange()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert spare.model.lm_head.weight is spare.model.get_input_embeddings().weight
    for name, t in model.state_dict().items():
        torch.testing.assert_close(t, other.state_dict()[name], rtol=0, atol=0)
        torch.testing.assert_close(spare.model.state_dict()[name], first[name], rtol=0, atol=0)
    assert addresses == {p.data_ptr() for p in (*model.parameters(), *spare.model.parameters())}, (
        "no new memory"
    )
