"""Speculation changes no token: whatever is guessed, by whom, how much of it, and wherever a sample goes.

The reference makes each token by a full forward pass of transformers' own model, with the same noise.
"""

import pytest
import torch
from rollouts import VOCABULARY, Flips, Insider, Stubborn, decode_plainly, tiny_policy

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.samples import Prompt, Sampling
from aedit.spec_rollout.target import Target

KINDS = {
    "greedy": {"temperature": 0.0},
    "T = 1": {"temperature": 1.0},
    "T = 0.7": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "T = 0.7, top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
}
ARMS = ["off", "layer:1", "layer:2", "layer:4", "layer:8", "layer:3x2x6", "layer:4x3x12"]
FLIPS = ["layer:4", "off", "layer:4x3x12", "layer:1", "layer:2x2x4", "layer:8"]


def samples(kinds):
    """Four of each kind: two of one group, a long prompt and a short one; short and long rollouts, some of
    which end at stop tokens, some not before they have a few tokens."""
    made = []
    for number, kind in enumerate(kinds):
        draw = torch.Generator().manual_seed(number)
        lengths, groups = (6, 6, 13, 1), (number, number, -1, -1)
        together = torch.randint(VOCABULARY, (13,), generator=draw).tolist()
        for i, (length, group) in enumerate(zip(lengths, groups, strict=True)):
            stops = {"stop_tokens": (5, 11, 40), "min_new_tokens": 4 * (i % 2)} if number % 2 else {}
            sampling = Sampling(**KINDS[kind], **stops, max_new_tokens=24 - 3 * i)
            tokens = tuple(together[:length])
            made.append(Prompt(tokens=tokens, rollout=number, sample=i, group=group, sampling=sampling))
    return made


def engine_of(model, rows, drafter=None, *arms, mode="coupled"):
    target = Target.of(model, rows=rows, max_tokens=48, nodes=12)
    drafters = {} if drafter is None else {"layer": drafter}
    return Engine(target, drafters=drafters, chooser=Flips(*(arms or ["off"])), mode=mode)


def tokens_of(engine, prompts):
    """Of each prompt, whatever order they finish in."""
    made = {(each.prompt.rollout, each.prompt.sample): each for each in engine.generate(prompts)}
    assert len(made) == len(prompts)
    return [made[prompt.rollout, prompt.sample].tokens for prompt in prompts]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def mixed():
    """Twenty samples that want different things."""
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
    some = slice(None, None, 3 if rows == 1 else 1)
    insider = Insider(texts)
    engine = engine_of(policy, rows, insider, arm)
    assert tokens_of(engine, mixed[some]) == plain[some]
    if arm != "off":
        assert insider.num_proposed
        assert engine.status()["accepted_length"] > 1.3
    assert engine.status()["tokens"] == sum(map(len, plain[some]))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_flip_of_the_arm_changes_no_token(policy, mixed, plain, texts, rows):
    some = slice(None, None, 3 if rows == 1 else 1)
    engine = engine_of(policy, rows, Insider(texts, seed=1), *FLIPS)
    assert tokens_of(engine, mixed[some]) == plain[some]
    assert set(engine.status()["arms"]) == set(FLIPS)


@pytest.mark.parametrize("drafter", [lambda texts: Stubborn(), lambda texts: Insider(texts, honesty=0.0)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_malicious_drafter_changes_no_token(policy, mixed, plain, texts, drafter, rows):
    some = slice(None, None, 3 if rows == 1 else 1)
    assert tokens_of(engine_of(policy, rows, drafter(texts), *FLIPS), mixed[some]) == plain[some]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_all_want_the_same_get_it(policy, kind):
    prompts = samples([kind])
    plain = decode_plainly(policy, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    assert tokens_of(engine_of(policy, 3, Insider(texts), *FLIPS), prompts) == plain
