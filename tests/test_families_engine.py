"""Tests that an engine generates what each family's own forward pass and `generate` do, with every arm."""

import pytest
import torch
from kit.families import FAMILIES, family_model
from kit.rollouts import Flips, Insider, decode_plainly, prompts_of, tokens_of

from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target


def engine_of(model, drafters, *arms):
    target = Target.of(model, rows=2, max_tokens=40, nodes=12)
    return Engine(target, drafters=drafters, chooser=Flips(*arms))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_generate(name):
    model, prompts = family_model(name), prompts_of(3, seed=1, max_new_tokens=12, temperature=0.0)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        expected.append(made[0, len(prompt.tokens) :].tolist())
    assert tokens_of(engine_of(model, {}, "off"), prompts) == expected
    assert len({token for tokens in expected for token in tokens}) > 5


@pytest.mark.parametrize("name", FAMILIES)
def test_no_arm_changes_a_token(name):
    model = family_model(name)
    prompts = prompts_of(4, seed=2, group_size=2, max_new_tokens=14, temperature=1.0)
    plain = decode_plainly(model, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    assert tokens_of(engine_of(model, {}, "off"), prompts) == plain
    insider = Insider(texts)
    engine = engine_of(model, {"layer": insider}, "layer:6", "layer:6x2x10", "layer:8")
    assert tokens_of(engine, prompts) == plain
    assert insider.num_proposed
    assert engine.status()["accepted_length"] > 1.3
    suffix = SuffixDrafter(min_match=1)
    assert tokens_of(engine_of(model, {"suffix": suffix}, "suffix:4"), prompts) == plain


@pytest.mark.parametrize("name", ["mistral", "phi3", "olmo2", "smollm3", "mixtral", "qwen3 moe"])
def test_a_draft_layer_of_the_family_changes_no_token(name):
    model = family_model(name)
    prompts = prompts_of(3, seed=3, max_new_tokens=10, temperature=1.0)
    target = Target.of(model, rows=2, max_tokens=40, nodes=12)
    layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(1))
    drafters = {"layer": LayerDrafter.of(layer, target)}
    engine = Engine(target, drafters=drafters, chooser=Flips("layer:3", "layer:3x2x6"))
    assert tokens_of(engine, prompts) == decode_plainly(model, prompts)
