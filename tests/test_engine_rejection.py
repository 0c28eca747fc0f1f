"""An engine in rejection mode: other tokens than without drafts, but each text as likely as it should be.

The vocabulary is so small that all texts can be listed, with their exact probabilities. They end at a stop
token, so that what an accepted run says behind its end would show as well.
"""

import numpy as np
import pytest
import torch
from engine_mistakes import (
    Mistakes,
    a_token_too_few_is_kept_in_the_cache,
    an_end_inside_of_an_accepted_run_is_not_seen,
)
from markov import chi_square
from rollouts import Flips, tiny_policy, warped
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout import rejection, verdict
from aedit.spec_rollout.draft_layer import DraftLayer
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.layer_drafter import LayerDrafter
from aedit.spec_rollout.samples import Prompt, Sampling
from aedit.spec_rollout.suffix import SuffixDrafter
from aedit.spec_rollout.target import Target

V, STOP, LENGTH = 8, 7, 3
PROMPT = (1, 2, 3, 1, 2)
NUM = 2_000


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(kind=(lambda **sizes: LlamaConfig(**sizes | {"vocab_size": V}), LlamaForCausalLM))


def exact(policy, sampling):
    """The probability of every text, by the model's own forward pass over each of its beginnings."""
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


def p_value(policy, num=NUM, **draw):
    sampling = Sampling(max_new_tokens=LENGTH, stop_tokens=(STOP,), **draw)
    target = Target.of(policy, rows=100, max_tokens=len(PROMPT) + LENGTH, nodes=4)
    layer = DraftLayer.of(policy, generator=torch.Generator().manual_seed(0))
    drafters = {
        "layer": LayerDrafter.of(layer, target, mode="rejection"),
        "suffix": SuffixDrafter(min_match=1),
    }
    flips = Flips("layer:2", "suffix:2", "off", "layer:1")
    engine = Engine(target, drafters=drafters, chooser=flips, mode="rejection")
    prompts = [Prompt(tokens=PROMPT, rollout=i, group=1, sampling=sampling) for i in range(num)]
    seen = dict.fromkeys(expected := exact(policy, sampling), 0)
    for rollout in engine.generate(prompts):
        seen[tuple(rollout.tokens)] += 1
    counts, chances = (np.array([table[text] for text in expected]) for table in (seen, expected))
    possible = chances > 0
    assert not counts[~possible].any()
    return chi_square(counts[possible], num * chances[possible])


def test_every_rollout_is_as_likely_as_the_policy_makes_it(policy):
    assert p_value(policy, temperature=0.7, top_p=0.9) > 1e-3


mistake = Mistakes()
mistake(a_token_too_few_is_kept_in_the_cache)
mistake(an_end_inside_of_an_accepted_run_is_not_seen)


@mistake
def the_policy_draws_in_place_of_the_residual(patch):
    patch.setattr(rejection, "_residual", lambda p, q: p)


@mistake
def the_policy_is_asked_at_another_temperature(patch):
    right = verdict.shaped
    patch.setattr(verdict, "shaped", lambda logits, *rest: right(logits * 0.8, *rest))


@pytest.mark.parametrize("name", mistake)
def test_a_mistake_is_seen(policy, name, monkeypatch):
    mistake[name](monkeypatch)
    try:
        p = p_value(policy, num=1_000)
    except (AssertionError, RuntimeError, ValueError, IndexError, KeyError):
        return
    assert p < 1e-6
