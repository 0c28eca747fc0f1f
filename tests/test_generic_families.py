"""Tests of the generic path: every family gives the tokens of its own forward, under every arm.

The reference makes each token by a full forward pass of the model, with the same noise; greedy tokens are
those of `transformers.generate`.
"""

import pytest
import torch
from kit.model_families import FAMILIES, tiny_model
from kit.rollouts import Flips, Insider, decode_plainly, prompts_of, samples, tokens_of

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import make_target

TREES, RAGGED, EQUAL, WHOLE = (
    ("generic (one pass for all rows)", True),
    ("generic (one pass for all rows)", False),
    ("generic (one pass for rows of equal length)", False),
    ("generic (the whole text in every pass)", False),
)
PATHS = {
    "Bloom": EQUAL,
    "Falcon with ALiBi": EQUAL,
    "GPT-Neo": EQUAL,
    "MPT": RAGGED,
    "Jamba": WHOLE,
    "Mamba": WHOLE,
    "RWKV": WHOLE,
}
CHAINS = ("off", "layer:4", "layer:1", "layer:7")
KINDS = ("greedy", "T = 0.7, top-k, top-p")


def engine_of(model, texts, rows=3):
    target = make_target(model, rows=rows, max_tokens=40, nodes=12, path="generic")
    arms = (*CHAINS, "layer:4x3x12", "layer:2x2x4") if target.supports_trees else CHAINS
    return Engine(target, drafters={"layer": Insider(texts)}, chooser=Flips(*arms))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_family_are_those_of_its_own_forward_under_every_arm(family):
    model, mixed = tiny_model(family), samples(KINDS)
    plain = decode_plainly(model, mixed)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(mixed, plain, strict=True)]
    engine = engine_of(model, texts)
    assert (engine.target.path, engine.target.supports_trees) == PATHS.get(family, TREES)
    assert tokens_of(engine, mixed) == plain
    assert len({token for tokens in plain for token in tokens}) > 10
    assert engine.status()["accepted_length"] > 1.3


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_family_are_those_of_generate(family):
    model = tiny_model(family)
    prompts = prompts_of(4, seed=3, max_new_tokens=12, temperature=0.0)
    expected = []
    for prompt in prompts:
        text = torch.tensor([prompt.tokens])
        made = model.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        expected.append(made[0, len(prompt.tokens) :].tolist())
    assert tokens_of(engine_of(model, []), prompts) == expected
