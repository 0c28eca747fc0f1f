"""Tests of the generic path where the model, its state or its caller is unusual."""

import inspect
import mmap
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.model_families import tiny_model
from kit.rollouts import (
    FLIPS,
    KINDS,
    VOCABULARY,
    Flips,
    Insider,
    Stubborn,
    decode_plainly,
    prompts_of,
    samples,
    tiny_policy,
    tokens_of,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.model import Segment, make_target

ONE_PASS = "generic (one pass for all rows)"
EQUAL = "generic (one pass for rows of equal length)"
ALONE = "generic (one pass for each row)"
WHOLE = "generic (the whole text in every pass)"


def generic(model, *, rows=3, max_tokens=40, nodes=12, taps=()):
    return make_target(model, rows=rows, max_tokens=max_tokens, nodes=nodes, taps=taps, path="generic")


def texts_of(prompts, plain):
    return [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]


def drawn(*sizes, seed=0):
    return torch.randint(VOCABULARY, sizes, generator=torch.Generator().manual_seed(seed))


def checked(model, path, *arms, rows=3):
    """Check tokens of the engine against the model's own forward."""
    mixed = samples(("greedy", "T = 0.7"))
    plain = decode_plainly(model, mixed)
    target = generic(model, rows=rows)
    assert target.path == path
    drafters = {"layer": Insider(texts_of(mixed, plain))}
    engine = Engine(target, drafters=drafters, chooser=Flips(*(arms or ("layer:4", "off", "layer:1"))))
    assert tokens_of(engine, mixed) == plain


# --- the same as the fast path


@pytest.mark.parametrize("rows", [1, 4])
def test_a_llama_gives_the_same_tokens_on_both_paths(rows):
    policy, mixed = tiny_policy(), samples(KINDS)
    plain = decode_plainly(policy, mixed)
    for path in ("fast", "generic"):
        target = make_target(policy, rows=rows, max_tokens=48, nodes=12, path=path)
        engine = Engine(target, drafters={"layer": Insider(texts_of(mixed, plain))}, chooser=Flips(*FLIPS))
        assert tokens_of(engine, mixed) == plain


def test_features_and_taps_are_those_of_the_fast_path():
    policy = tiny_policy()
    text, more = drawn(9).tolist(), drawn(1, 4, seed=1)
    found = []
    for path in ("fast", "generic"):
        target = make_target(policy, rows=2, max_tokens=40, taps=(0, 1), path=path)
        assert target.feature_size == 3 * target.hidden_size
        parts = target.prefill([Segment(1, 0, text[:4]), Segment(0, 0, text)])
        found.append([*parts, *target.step(more, [9])])
    for fast, own in zip(*found, strict=True):
        torch.testing.assert_close(own, fast, atol=1e-5, rtol=1e-5)


def test_a_long_prefill_in_chunks_is_that_of_one_pass(monkeypatch):
    model, text = tiny_model("GPT-NeoX", max_position_embeddings=128), drawn(100).tolist()
    whole = generic(model, max_tokens=120).prefill([Segment(0, 0, text), Segment(2, 0, text[:70])])
    monkeypatch.setattr("aedit.spec_rollout.model.generic.PREFILL_TOKENS", 16)
    target = generic(model, max_tokens=120)
    parts = target.prefill([Segment(0, 0, text), Segment(2, 0, text[:70])])
    for chunked, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(chunked, expected, atol=1e-6, rtol=1e-6)
    own = model(input_ids=torch.tensor([text]))
    logits, _ = target.step(torch.tensor([text[-1:]]), [99])
    torch.testing.assert_close(logits[0, 0], own.logits[0, -1], atol=1e-5, rtol=1e-5)


# --- what the user's model brings


def test_hooks_adapters_and_a_bias_of_the_head_take_effect():
    model = tiny_model("Llama")
    model.lm_head.bias = nn.Parameter(3 * torch.randn(VOCABULARY).double())
    low, high = (torch.randn(32, 32).double() * 0.2 for _ in range(2))
    layer = model.model.layers[1].self_attn.o_proj
    layer.register_forward_hook(lambda module, args, output: output + args[0] @ low @ high)
    plain = tokens_of(Engine(generic(tiny_model("Llama"))), prompts_of(3, temperature=0.0))
    assert tokens_of(Engine(generic(model)), prompts_of(3, temperature=0.0)) != plain
    checked(model, ONE_PASS, "layer:4", "off", "layer:4x3x12")
    with pytest.warns(UserWarning, match="LlamaForCausalLM takes the generic .* path, not the fast one: .*"):
        assert make_target(model, rows=1, max_tokens=9).path == ONE_PASS
    with pytest.raises(ValueError, match="not supported"):
        make_target(model, rows=1, max_tokens=9, path="fast")


def test_dropout_is_off_and_training_mode_and_configuration_are_left_as_they_were():
    model = tiny_model("Phi-3", resid_pdrop=0.5, use_cache=False)
    plain = decode_plainly(model, prompts := samples(("greedy",)))
    model.set_attn_implementation("flex_attention")
    model.train().activation_checkpointing_enable()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert tokens_of(Engine(generic(model)), prompts) == plain
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.config._attn_implementation == "flex_attention"
    assert not model.config.use_cache


def test_a_model_can_be_trained_after_it_has_generated():
    model = tiny_model("Phi-3")
    tokens_of(Engine(generic(model)), prompts_of(3))
    model.train()
    model(input_ids=drawn(2, 20), labels=drawn(2, 20)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(buffer.is_inference() for buffer in model.buffers())


@torch._dynamo.config.patch(recompile_limit=1)  # a second for each graph, and none of them is tested
def test_wrapped_models_are_unwrapped_and_a_compiled_layer_takes_effect(tmp_path):
    model = tiny_model("OPT")
    checked(torch.compile(model, backend="eager"), ONE_PASS)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        checked(DistributedDataParallel(model), ONE_PASS)
    finally:
        dist.destroy_process_group()
    partly = tiny_model("Llama")
    partly.model.layers[0] = torch.compile(partly.model.layers[0], backend="eager")
    with pytest.raises(ValueError, match=r"layers\.0 is a OptimizedModule"):
        make_target(partly, rows=1, max_tokens=9, path="fast")
    checked(partly, ONE_PASS)


def test_adapters_of_peft_take_effect_and_prompt_learning_is_refused():
    class Adapted(nn.Module):  # as PeftModel
        def __init__(self, model, **config):
            super().__init__()
            self.inner, self.peft_config = model, {"default": type("Config", (), config)()}

        def get_base_model(self):
            return self.inner

    model = tiny_model("Llama")
    adapted = Adapted(model, is_prompt_learning=False)
    engine = Engine(generic(adapted))
    assert tokens_of(engine, prompts_of(3)) == tokens_of(Engine(generic(model)), prompts_of(3))
    engine.update_weights({name: 2 * tensor for name, tensor in adapted.state_dict().items()}, 1)
    assert tokens_of(engine, prompts_of(3)) == decode_plainly(model, prompts_of(3))
    with pytest.raises(ValueError, match="prompt learning adds tokens"):
        generic(Adapted(model, is_prompt_learning=True))


# --- models that share passes less well, and those that are refused


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_keys_and_values_are_passed_by_the_name_that_the_forward_gives_them(name):
    """transformers 5.24 calls them `cache`, and releases before `past_key_values`."""
    model = tiny_model("Llama")
    own = model.forward
    signature = inspect.signature(own)
    theirs = "cache" if "cache" in signature.parameters else "past_key_values"

    def forward(**arguments):
        return own(**{theirs if key == name else key: value for key, value in arguments.items()})

    parameters = [p.replace(name=name) if p.name == theirs else p for p in signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)
    model.forward = forward
    checked(model, ONE_PASS)


def test_a_model_that_ignores_the_cache_computes_the_whole_text():
    model = tiny_model("Llama")
    own = model.forward
    model.forward = lambda input_ids, past_key_values=None, position_ids=None, **more: own(
        input_ids, **{**more, "use_cache": False}
    )
    checked(model, WHOLE)
    refused = generic(model).refused_passes
    assert any("does not use the cache that it is given" in reason for reason in refused)


def test_a_model_whose_rows_depend_on_each_other_runs_each_row_alone():
    model = tiny_model("Llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: output - output.mean(0) / 2)
    mixed = samples(("greedy",))
    plain = [decode_plainly(model, [prompt])[0] for prompt in mixed]
    target = generic(model)
    assert target.path == ALONE
    assert tokens_of(Engine(target), mixed) == plain


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: BertLMHeadModel(BertConfig(vocab_size=64, hidden_size=36)),
            "not causal",
        ),
        (lambda: T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32)), "encoder-decoder"),
        (lambda: tiny_model("Llama").model, "no language model head"),
        (lambda: nn.Linear(2, 2), "Linear is not a model of transformers"),
        (lambda: packed(), "of its state_dict is no tensor: pass a model that is not quantized"),
        (lambda: noisy(), "not deterministic"),
        (lambda: not_a_number(), "logits are not finite"),
    ],
)
def test_what_is_no_causal_language_model_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        generic(model())


def packed():
    class Packed(nn.Linear):
        def get_extra_state(self):
            return "scales"

    model = tiny_model("Llama")
    model.lm_head = Packed(32, VOCABULARY)
    return model


def noisy():
    model = tiny_model("Llama")
    model.model.norm.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
    return model


def not_a_number():
    model = tiny_model("GPT-2")
    nn.init.constant_(model.lm_head.weight, torch.nan)
    return model


def test_more_tokens_than_positions_are_refused_and_drafts_may_reach_beyond_them():
    model = tiny_model("OPT", max_position_embeddings=40)
    with pytest.raises(ValueError, match="max_tokens 41 exceeds the 40 positions of OPTForCausalLM"):
        generic(model, max_tokens=41)
    prompts = prompts_of(3, max_new_tokens=31)  # up to 9 tokens, so one ends at the last position
    prompts[0] = replace(prompts[0], tokens=tuple(range(9)))
    plain = decode_plainly(model, prompts)
    for arm in ("layer:8", "layer:4x3x12"):
        engine = Engine(generic(model), drafters={"layer": Stubborn()}, chooser=Flips(arm))
        assert tokens_of(engine, prompts) == plain


def test_a_rope_that_changes_with_the_length_is_limited_to_the_length_where_it_does():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    model = tiny_model("Llama", rope_parameters=rope, max_position_embeddings=40)
    checked(model, ONE_PASS)
    with pytest.raises(ValueError, match="max_tokens 41 exceeds the 40 positions"):
        generic(model, max_tokens=41)


# --- engine


@pytest.mark.parametrize("family", ["Mistral", "Bloom", "Mamba"])
def test_drafts_that_are_cut_row_by_row_change_no_token(family):
    model, prompts = tiny_model(family), prompts_of(6, seed=5)
    plain = decode_plainly(model, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    chooser = Flips("layer:4", "off", "layer:2", cuts=True)
    engine = Engine(generic(model), drafters={"layer": Insider(texts)}, chooser=chooser)
    assert tokens_of(engine, prompts) == plain
    assert any(len(set(observed.verified_B)) > 1 for observed in chooser.seen)


def test_a_tree_is_refused_where_it_cannot_be_verified():
    target = generic(tiny_model("Bloom"))
    engine = Engine(target, drafters={"layer": Stubborn()}, chooser=Flips("layer:2x2x4"))
    with pytest.raises(ValueError, match="arm layer:2x2x4: this policy cannot verify trees: use chains"):
        list(engine.generate(prompts_of(2)))
    with pytest.raises(ValueError, match="BloomForCausalLM cannot verify trees"):
        target.step(drawn(1, 3), [1], torch.tensor([[-1, -1]]))


@pytest.mark.parametrize("family", ["Mistral", "Bloom", "Mamba"])
def test_shipped_drafters_and_the_adaptive_choice_change_no_token(family):
    model, prompts = tiny_model(family), samples(("T = 1",)) + prompts_of(6, seed=5, group_size=3)
    plain = decode_plainly(model, prompts)
    target = generic(model)
    drafters = {"suffix": SuffixDrafter(min_match=1)}
    if family == "Mistral":
        layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(0))
        drafters["layer"] = LayerDrafter.of(layer, target)
    arms = [parse_arm(arm) for arm in ("suffix:2", "suffix:4", "layer:2")]
    engine = Engine(target, drafters=drafters, chooser=Goodput([a for a in arms if a.drafter in drafters]))
    assert tokens_of(engine, prompts) == plain


@pytest.mark.parametrize("family", ["Gemma 3", "Bloom", "Mamba"])
def test_samples_move_between_engines_with_their_state(family):
    model, prompts = tiny_model(family), prompts_of(4, max_new_tokens=12)
    plain = decode_plainly(model, prompts)
    one, other = (Engine(generic(model)) for _ in range(2))
    begun = [one.add(prompt) for prompt in prompts]
    for _ in range(5):
        one.step()
    going = [rollout for rollout in begun if not rollout.finish_reason]
    moved = [other.add(one.remove(rollout, kv=True)) for rollout in going]
    list(other.generate([]))
    assert other.status()["restored_tokens"] > 0
    by_id = {rollout.prompt.sample: rollout.tokens for rollout in (*begun, *moved)}
    assert [by_id[prompt.sample] for prompt in prompts] == plain


@pytest.mark.parametrize("family", ["GPT-NeoX", "Bloom", "Mamba"])
def test_the_prefix_cache_gives_the_same_tokens(family):
    model = tiny_model(family)
    long = [replace(prompt, tokens=tuple(range(1, 35))) for prompt in prompts_of(3, max_new_tokens=4)]
    engine = Engine(generic(model, rows=1), limits=EngineLimits(prefix_cache_bytes=1 << 24))
    plain = decode_plainly(model, long)
    for prompt, tokens in zip(long, plain, strict=True):
        assert tokens_of(engine, [prompt]) == [tokens]
    assert engine.status()["prefix_cache"]["hit_tokens"] >= 32


@pytest.mark.parametrize("family", ["GPT-NeoX", "Mamba"])
def test_new_weights_take_effect_at_the_next_token(family):
    model, other = tiny_model(family), tiny_model(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    new = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    engine, prompt = Engine(generic(model)), prompts_of(1, max_new_tokens=12)[0]
    rollout = engine.add(prompt)
    for _ in range(5):
        engine.step()
    begun = list(rollout.tokens)
    engine.update_weights(new, 1)
    list(engine.generate([]))
    assert rollout.versions == [0] * len(begun) + [1] * (12 - len(begun))
    going = replace(prompt, tokens=(*prompt.tokens, *begun))
    assert rollout.tokens[len(begun) :] == decode_plainly(other, [going])[0][: 12 - len(begun)]
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    engine.add(prompt)
    with pytest.raises(RuntimeError, match="has changed, and the weights are still called version 1"):
        engine.step()


def test_not_a_number_that_was_cached_does_not_spread_to_new_weights():
    model = tiny_model("GPT-NeoX")
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = generic(model)
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    target.update_weights(bad, 1)
    target.prefill([Segment(row, 0, list(range(30))) for row in range(3)])
    target.update_weights(good, 2)
    target.prefill([Segment(0, 0, [1, 2, 3]), Segment(1, 0, [4])])
    logits, _ = target.step(drawn(2, 1), [3, 1])
    assert logits.isfinite().all()


def test_memory_in_use_follows_the_tokens():
    target = generic(tiny_model("DeepSeek-V3"))
    per_token = 2 * (12 + 8) * 8  # layers, latent and rotary part of a key, bytes
    assert target.kv_bytes == 0
    assert target.kv_bytes_reserved == 3 * (40 + 12 + 1) * per_token
    target.prefill([Segment(0, 0, [1] * 10), Segment(2, 0, [1] * 10)])
    assert target.kv_bytes == 20 * per_token
    target.release_row(0)
    assert target.kv_bytes == 10 * per_token


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_rows_take_memory_for_their_tokens_and_give_it_back():
    model = tiny_model("GPT-NeoX", max_position_embeddings=1 << 20)
    before = resident_bytes()
    target = generic(model, rows=4, max_tokens=1 << 18)
    target.prefill([Segment(1, 0, [1] * 512)])
    assert target.kv_bytes_reserved > 1 << 30
    assert target.read_kv(1, 512, 64).any()
    target.release_row(1)
    assert not target.read_kv(1, 512, 64).any()  # given back, pages read as zeros; 64 tokens share one
    target.update_weights({name: 2 * tensor for name, tensor in model.state_dict().items()}, 1)
    assert resident_bytes() - before < 1 << 28


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
