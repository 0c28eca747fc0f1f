"""Tests an engine in rejection mode: tokens differ from those without drafts, the distribution does not.

The vocabulary is so small that all texts can be enumerated with their exact probabilities. Texts end at a
stop token, so that tokens accepted behind the end would show as well.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.engine_mutants import (
    Mistakes,
    a_token_too_few_is_kept_in_the_cache,
    a_token_too_many_is_kept_in_the_cache,
    an_end_inside_of_an_accepted_run_is_not_seen,
    the_embedding_is_an_older_policy_s,
)
from kit.markov import chi_square
from kit.rollouts import Flips, decode_plainly, tiny_policy, tokens_of, warped
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.engine import verification as verdict
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling, verify

V, STOP, LENGTH = 8, 7, 3
PROMPT = (1, 2, 3, 1, 2)
NUM = 2_000


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(kind=(lambda **sizes: LlamaConfig(**sizes | {"vocab_size": V}), LlamaForCausalLM))


def exact(policy, sampling):
    """Return the probability of every text, by the model's own forward pass over each of its prefixes."""
    chances, ended = {(): 1.0}, {}
    for _ in range(LENGTH):
        texts = list(chances)
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        longer = {}
        for text, logits_V in zip(texts, logits, strict=True):
            for token, p in enumerate(warped(logits_V, sampling).softmax(-1).tolist()):
                longer[(*text, token)] = chances[text] * p
        ended |= {text: p for text, p in longer.items() if text[-1] == STOP}
        chances = {text: p for text, p in longer.items() if text[-1] != STOP}
    return ended | chances


def engine_of(policy, rows, length):
    """Return an engine with two drafters that take turns."""
    target = Target.of(policy, rows=rows, max_tokens=length, nodes=4)
    layer = DraftLayer.of(policy, generator=torch.Generator().manual_seed(0))
    drafters = {
        "layer": LayerDrafter.of(layer, target, mode="rejection"),
        "suffix": SuffixDrafter(min_match=1),
    }
    flips = Flips("layer:2", "suffix:2", "off", "layer:1")
    return Engine(target, drafters=drafters, chooser=flips, mode="rejection")


def p_value(policy, num=NUM, **draw):
    sampling = Sampling(max_new_tokens=LENGTH, stop_tokens=(STOP,), **draw)
    engine = engine_of(policy, 100, len(PROMPT) + LENGTH)
    prompts = [Prompt(tokens=PROMPT, rollout=i, group=1, sampling=sampling) for i in range(num)]
    seen = dict.fromkeys(expected := exact(policy, sampling), 0)
    for rollout in engine.generate(prompts):
        seen[tuple(rollout.tokens)] += 1
    counts, chances = (np.array([table[text] for text in expected]) for table in (seen, expected))
    possible = chances > 0
    assert not counts[~possible].any()
    return chi_square(counts[possible], num * chances[possible])


def says_the_most_likely(policy):
    """Return whether the tokens at temperature 0 are those of plain decoding."""
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    prompts = [Prompt(tokens=(i % V, 1 + i % 5), sample=i, sampling=sampling) for i in range(12)]
    return tokens_of(engine_of(policy, 5, 26), prompts) == decode_plainly(policy, prompts)


def test_every_rollout_is_as_likely_as_the_policy_makes_it(policy):
    assert p_value(policy, temperature=0.7, top_p=0.9) > 1e-3
    assert says_the_most_likely(policy)


mistake = Mistakes()
mistake(a_token_too_few_is_kept_in_the_cache)
mistake(a_token_too_many_is_kept_in_the_cache)
mistake(an_end_inside_of_an_accepted_run_is_not_seen)
mistake(the_embedding_is_an_older_policy_s)


@mistake
def the_policy_draws_in_place_of_the_residual(patch):
    patch.setattr(verify, "_residual", lambda p, q: p)


@mistake
def drafts_are_said_to_be_drawn_at_another_temperature(patch):
    propose = LayerDrafter.propose

    def wrong(*args):
        draft = propose(*args)
        return replace(draft, logq_BNV=(draft.logq_BNV * 2).log_softmax(-1))

    patch.setattr(LayerDrafter, "propose", wrong)


@mistake
def the_policy_is_asked_at_another_temperature(patch):
    right = verdict.warp_logits
    patch.setattr(verdict, "warp_logits", lambda logits, *rest: right(logits * 0.8, *rest))


@pytest.mark.parametrize("name", mistake)
def test_a_mistake_is_seen(policy, name, monkeypatch):
    mistake[name](monkeypatch)
    try:
        p, is_right_where_greedy = p_value(policy, num=1_000), says_the_most_likely(policy)
    except (AssertionError, RuntimeError, ValueError, IndexError, KeyError):
        return
    assert p < 1e-6 or not is_right_where_greedy
