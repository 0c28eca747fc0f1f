"""Tests that speculation changes no token: every drafter and arm, at every batch size and sampling mode.

Drafters: a fresh layer, one trained on the text, one with a constant guess, and a suffix automaton. Arms:
off, chains of 1, 2, 4 and 8, trees, another one at every step, and that while the drafter is replaced again
and again. Other tests of the engine cover a selection of these that takes seconds.
"""

from collections import Counter
from itertools import count

import pytest
import torch
from kit.drafters import engine_of, fresh, learned_by_heart
from kit.rollouts import KINDS, Stubborn, decode_plainly, perturbed, samples, tiny_policy

from aedit.spec_rollout.model import cache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHAPES = ("1", "2", "4", "8", "3x2x6", "4x3x12")
CLOSE = 1e-4
"""Tokens whose noisy logits differ by less are tied in float32."""


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def world(request):
    """Return a policy, two layers for it, and sixteen samples of each kind."""
    policy = tiny_policy(dtype=request.param)
    asked = {kind: samples([kind] * 4) for kind in KINDS}
    return policy, (fresh(policy), learned_by_heart(policy, samples(KINDS), fresh(policy))), asked


@pytest.fixture(scope="module")
def plain(world):
    policy, _, asked = world
    return {kind: decode_plainly(policy, prompts) for kind, prompts in asked.items()}


class Played:
    """Engine with one of the drafters."""

    def __init__(self, world, rows, drafter, arms):
        policy, self.layers, _ = world
        self.drafter = drafter
        self.first = 1 if drafter == "trained" else 0
        layer = {"constant": Stubborn(), "suffix": None}.get(drafter, self.layers[self.first])
        self.engine = engine_of(policy, rows, arms, layer=layer, suffix=drafter == "suffix")

    def replace(self, version):
        if self.drafter == "suffix":
            for group in range(4):
                self.engine.drafters["suffix"].forget_group(group)
        elif self.drafter == "constant":
            self.engine.drafters["layer"].token = version % 60
        else:
            self.engine.drafters["layer"].replace(self.layers[(self.first + version) % 2], version)

    def said(self, prompts, is_replaced):
        made = [self.engine.add(prompt) for prompt in prompts]
        for step in count(1):
            if not (self.engine.running or self.engine.waiting):
                return [rollout.tokens for rollout in made]
            self.engine.step()
            if is_replaced and step % 3 == 0:
                self.replace(step // 3)


def cells(drafter):
    """Return (arms in turn, whether the drafter is replaced on the way)."""
    by = "suffix" if drafter == "suffix" else "layer"
    all_arms = [f"{by}:{shape}" for shape in SHAPES]
    flips = [all_arms[2], "off", all_arms[5], all_arms[0], all_arms[4], all_arms[3], all_arms[1]]
    return [(["off"], False), *(([arm], False) for arm in all_arms), (flips, False), (flips, True)]


def all_said(world, drafter, rows):
    """Yield (kind, prompts, tokens) of every cell."""
    for kind, asked in world[2].items():
        prompts = asked[:: 4 if rows == 1 else 1]
        for arms, is_replaced in cells(drafter):
            played = Played(world, rows, drafter, arms)
            yield kind, prompts, played.said(prompts, is_replaced)
            assert arms[0] in played.engine.status()["arms"]


def gaps(policy, prompt, tokens):
    """Return by how much the score of each token is below the best one; 0 where the token is the best."""
    text = [*prompt.tokens, *tokens]
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([text]), use_cache=False).logits[0, len(prompt.tokens) - 1 :]
    found = []
    for i, token in enumerate(tokens):
        logits_V = logits[i].clone()
        if i < prompt.sampling.min_new_tokens:
            logits_V[list(prompt.sampling.stop_tokens)] = -torch.inf
        noisy = perturbed(logits_V, prompt, len(prompt.tokens) + i)
        found.append(0.0 if int(noisy.argmax()) == token else float(noisy.max() - noisy[token]))
    return found


def ends_where_it_should(prompt, tokens):
    *before, last = tokens
    is_long = len(tokens) == prompt.sampling.max_new_tokens
    return not set(before) & set(prompt.sampling.stop_tokens) and (
        is_long or last in prompt.sampling.stop_tokens
    )


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["random", "trained", "constant", "suffix"])
def test_no_drafter_with_any_arm_changes_a_token(world, plain, drafter, rows, monkeypatch):
    if rows == 4:
        monkeypatch.setattr(cache, "default_layout", lambda device: "blocks")
    policy, known, num_tokens, misses = world[0], {}, 0, Counter()
    for kind, prompts, made in all_said(world, drafter, rows):
        if policy.dtype == torch.float64:
            assert made == plain[kind][:: 4 if rows == 1 else 1], kind
            continue
        for prompt, tokens in zip(prompts, made, strict=True):
            key = kind, prompt.rollout, prompt.sample, tuple(tokens)
            if key not in known:
                assert ends_where_it_should(prompt, tokens)
                known[key] = [gap for gap in gaps(policy, prompt, tokens) if gap]
            misses.update(known[key])
            num_tokens += len(tokens)
    assert all(gap < CLOSE for gap in misses), misses
    assert misses.total() <= num_tokens / 1000
