"""Tests the forward pass of every family against the model's own, in float64, and what is refused by name."""

import pytest
import torch
from kit.families import FAMILIES, family_model
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaForCausalLM

from aedit.spec_rollout.model import Segment, Target, prefill

TREE = torch.tensor([[-1, 0, 1, 2, 3, 4, -1, 6]])
"""A path longer than the windows, and a branch."""


def drawn(*shape, seed=0):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own(model, text):
    """Return the model's own logits and features (last hidden state, first layer's output) for one text."""
    out = model(text[None], output_hidden_states=True, use_cache=False)
    return out.logits[0], torch.cat([out.hidden_states[-1][0], out.hidden_states[1][0]], -1)


def close(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def prefilled(target, text):
    return target.prefill([Segment(0, 0, text.tolist())])[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_steps_chain_and_tree_are_as_the_models_own(name):
    model = family_model(name)
    target = Target.of(model, rows=1, max_tokens=40, taps=(0,))
    text, tree = drawn(17), drawn(1, 9, seed=1)
    logits, features = own(model, text)
    hidden = prefilled(target, text[:11])
    close(hidden, features[:11])
    close(target.logits(hidden), logits[:11])
    cut = target.step(text[None, 11:17], [11], None, [3])
    close(cut[0][0, :3], logits[11:14])
    close(cut[1][0, :3], features[11:14])
    for start, end in ((11, 12), (12, 13), (13, 17)):
        stepped = target.step(text[None, start:end], [start])
        close(stepped[0][0], logits[start:end])
        close(stepped[1][0], features[start:end])
    cut, stepped = target.step(tree, [17], TREE, [7]), target.step(tree, [17], TREE)
    close(cut[0][:, :7], stepped[0][:, :7])
    for nodes in ([0, 1, 2, 3, 4, 5, 6], [0, 7, 8]):
        logits, features = own(model, torch.cat([text, tree[0, nodes]]))
        close(stepped[0][0, nodes], logits[17:])
        close(stepped[1][0, nodes], features[17:])


@pytest.mark.parametrize(("activations", "masks"), [(32 << 20, 2000), (4096, 500)])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_pieces_of_several_rows_are_as_the_models_own(name, activations, masks, monkeypatch):
    monkeypatch.setattr(prefill, "ACTIVATION_BYTES", activations)
    monkeypatch.setattr(prefill, "MASK_BYTES", masks)
    model, texts = family_model(name), [drawn(47), drawn(3, seed=1), drawn(22, seed=2)]
    target = Target.of(model, rows=3, max_tokens=48)
    hidden = target.prefill([Segment(row, 0, text.tolist()) for row, text in enumerate(texts)])
    for found, text in zip(hidden, texts, strict=True):
        close(target.logits(found), own(model, text)[0])


DEFAULT = {"rope_type": "default"}
CHANGES = {
    "a window of one less": (
        ["mistral", "qwen2", "gemma2", "gemma3", "smollm3", "mixtral"],
        {"sliding_window": 4},
    ),
    "no window": (["mistral", "phi3", "mixtral"], {"sliding_window": None}),
    "windows on no layer": (
        ["qwen2", "gemma2", "gemma3", "smollm3"],
        {"layer_types": ["full_attention"] * 3},
    ),
    "no cap of the scores": (["gemma2"], {"attn_logit_softcapping": None}),
    "no cap of the logits": (["gemma2", "gemma3"], {"final_logit_softcapping": None}),
    "another scale of the scores": (["gemma2", "gemma3"], {"query_pre_attn_scalar": 12}),
    "a scale that is the same for all layers": (["gpt2"], {"scale_attn_by_inverse_layer_idx": False}),
    "no scale of the scores": (["gpt2"], {"scale_attn_weights": False}),
    "the global angles on local layers": (
        ["gemma3"],
        {
            "rope_parameters": {
                kind: DEFAULT | {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
            }
        },
    ),
    "the local angles on global layers": (
        ["gemma3"],
        {
            "rope_parameters": {
                kind: DEFAULT | {"rope_theta": 100.0} for kind in ("full_attention", "sliding_attention")
            }
        },
    ),
    "more rotated dimensions": (["phi3"], {"rope_parameters": DEFAULT | {"rope_theta": 100.0}}),
    "angles on a layer without": (["smollm3"], {"no_rope_layers": [1, 1, 1]}),
    "another epsilon": (["llama", "gemma2", "olmo2"], {"rms_norm_eps": 0.1}),
    "another epsilon of a layer norm": (["gpt2"], {"layer_norm_epsilon": 0.1}),
    "one expert more": (["mixtral", "qwen3 moe"], {"num_experts_per_tok": 3}),
    "weights of experts that add up to one": (["qwen3 moe"], {"norm_topk_prob": True}),
    "another activation": (["phi3", "mixtral", "olmo2"], {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, id=f"{name}, {what}")
        for what, (names, change) in CHANGES.items()
        for name in names
    ],
)
def test_no_value_of_a_configuration_is_left_out(name, change):
    """Compare with the model without the change: a value that is not read would make them equal."""
    text, changed = drawn(17), family_model(name, **change)
    target = Target.of(changed, rows=1, max_tokens=40)
    logits = target.logits(prefilled(target, text))
    close(logits, own(changed, text)[0])
    assert (logits - own(family_model(name), text)[0]).abs().max() > 1e-4


def test_the_scale_of_an_embedding_is_the_models_own():
    model, text = family_model("gemma3"), drawn(17)
    model.model.embed_tokens.embed_scale.fill_(2.0)
    target = Target.of(model, rows=1, max_tokens=40)
    close(target.logits(prefilled(target, text)), own(model, text)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_of_any_parameter_takes_effect_at_once(name):
    model, text = family_model(name), drawn(17)
    target = Target.of(model, rows=1, max_tokens=40)
    before = target.logits(prefilled(target, text))
    for key, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.2)
            parameter.add_(torch.randn_like(parameter) * 0.05)
        after = target.logits(prefilled(target, text))
        assert (after - before).abs().max() > 1e-6, key
        before = after
    close(before, own(model, text)[0])


@pytest.mark.parametrize("name", ["phi3", "mixtral", "gpt2", "gemma3"])
def test_new_weights_of_fused_and_tied_parameters_are_the_new_policy(name):
    model, other = family_model(name), family_model(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    target = Target.of(model, rows=1, max_tokens=40)
    target.update_weights(other.state_dict(), version=3)
    close(target.logits(prefilled(target, drawn(17))), own(other, drawn(17))[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "mixtral", "gpt2", "phi3"])
def test_lower_precisions_are_near_the_models_own(name, dtype, tolerance):
    model, text = family_model(name, dtype), drawn(9)
    target = Target.of(model, rows=1, max_tokens=40)
    logits = target.logits(prefilled(target, text))
    difference = (logits - own(model, text)[0]).float().abs()
    assert difference.mean() < tolerance / 2
    assert logits.dtype is dtype


def test_small_offsets_of_gemmas_norms_are_not_rounded_away_in_bf16():
    model, text = family_model("gemma3", torch.bfloat16), drawn(9)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0015)
    target = Target.of(model, rows=1, max_tokens=40)
    with_offset = prefilled(target, text).float().abs().sum()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    without = prefilled(target, text).float().abs().sum()
    assert (with_offset / without - 1).item() == pytest.approx(0.0015, rel=0.3)


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 48), ("phi3 longrope", 48)])
def test_a_text_may_be_as_long_as_the_model_has_positions(name, limit):
    model, text = family_model(name), drawn(limit)
    target = Target.of(model, rows=1, max_tokens=limit)
    hidden = prefilled(target, text[:-1])
    close(target.logits(hidden), own(model, text)[0][:-1])
    logits, _ = target.step(torch.cat([text[-1:], drawn(6)])[None], [limit - 1])
    close(logits[0, 0], own(model, text)[0][-1])
    with pytest.raises(ValueError, match=f"max_tokens {limit + 1} exceeds the {limit} positions"):
        Target.of(model, rows=1, max_tokens=limit + 1)


class Mine(LlamaForCausalLM):
    """A class that computes something else."""


def other_class(name, kind):
    model = family_model(name)
    model.__class__ = kind
    return model


def with_part(name, path, part):
    model = family_model(name)
    model.set_submodule(path, part)
    return model


REFUSED = {
    "Mine is not supported: use one of LlamaForCausalLM": lambda: other_class("llama", Mine),
    r"GemmaForCausalLM is not supported": lambda: AutoModelForCausalLM.from_config(
        GemmaConfig(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, head_dim=8)
    ),
    "hidden_act 'tanh' is not supported: it must be silu or gelu": lambda: family_model(
        "mistral", hidden_act="tanh"
    ),
    "hidden_activation 'tanh'": lambda: family_model("gemma2", hidden_activation="tanh"),
    "activation_function 'tanh'": lambda: family_model("gpt2", activation_function="tanh"),
    "use_bidirectional_attention True": lambda: family_model("gemma3", use_bidirectional_attention=True),
    "attn_logit_softcapping 3.0": lambda: family_model("gemma3", attn_logit_softcapping=3.0),
    "pretraining_tp 2": lambda: family_model("llama", pretraining_tp=2),
    "add_cross_attention True": lambda: family_model("gpt2", add_cross_attention=True),
    "reorder_and_upcast_attn True": lambda: family_model("gpt2", reorder_and_upcast_attn=True),
    "rope_type 'dynamic' is not supported": lambda: family_model(
        "smollm3", rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    ),
    "layers.1.mlp is a Identity of torch.*: only Olmo2MLP is supported": lambda: with_part(
        "olmo2", "model.layers.1.mlp", torch.nn.Identity()
    ),
    "model.layers.0.mlp is a LlamaMLP of .*: only MistralMLP is supported": lambda: with_part(
        "mistral", "model.layers.0.mlp", family_model("llama").model.layers[0].mlp
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(words):
    with pytest.raises(ValueError, match=words):
        Target.of(REFUSED[words](), rows=1, max_tokens=20)
