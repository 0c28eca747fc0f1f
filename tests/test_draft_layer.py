"""Tests the draft layer against transformers' decoder layers, and what is saved, sent and loaded of it."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aedit.spec_rollout.drafters import DraftLayer, DraftShape

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}


def policy(family="llama"):
    torch.manual_seed(3)
    model = FAMILIES[family]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def layer_for(model, **options):
    layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(5), **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def halves(rows, heads):
    """Reorder rows of neighbouring pairs as transformers does: the first of each pair, then the second."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


@torch.no_grad()
def theirs(model, layer):
    """Return a transformers decoder layer with the weights of `layer`."""
    made, shape = model.base_model.layers[0], layer.shape
    attention, mlp, (q, k) = made.self_attn, made.mlp, layer.shape.split
    for kind in ("weight", "bias") if shape.has_qkv_bias else ("weight",):
        queries, keys, values = getattr(layer.qkv, kind).split([q, k, k])
        getattr(attention.q_proj, kind).copy_(halves(queries, shape.num_heads))
        getattr(attention.k_proj, kind).copy_(halves(keys, shape.num_kv_heads))
        getattr(attention.v_proj, kind).copy_(values)
    if shape.has_qk_norm:
        attention.q_norm.weight.copy_(halves(layer.qk_norm[0], 1))
        attention.k_norm.weight.copy_(halves(layer.qk_norm[1], 1))
    attention.o_proj.weight.copy_(layer.attended.weight)
    gate, up = layer.gate_up.weight.chunk(2)
    mlp.gate_proj.weight.copy_(gate)
    mlp.up_proj.weight.copy_(up)
    mlp.down_proj.weight.copy_(layer.down.weight)
    made.input_layernorm.weight.copy_(layer.input_norm)
    made.post_attention_layernorm.weight.copy_(layer.middle_norm)
    return made


def causal(count):
    return torch.ones(count, count, dtype=torch.bool).tril()[None]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_it_computes_what_a_decoder_layer_of_its_policy_computes(family):
    model = policy(family)
    layer, embedding = layer_for(model), model.get_input_embeddings().weight
    features = torch.randn(2, 9, 24, dtype=torch.float64)
    embedded = embedding[torch.randint(40, (2, 9))]
    positions = torch.arange(7, 16)[None].expand(2, -1)
    guessed, _ = layer(features, embedded, positions, causal(9))

    fused = torch.cat([embedded * layer.gain, features], -1) @ layer.fuse.weight.T
    rotary = model.base_model.rotary_emb(fused, positions)
    mask = torch.where(causal(9), 0.0, -torch.inf)[None].double()
    out = theirs(model, layer)(fused, attention_mask=mask, position_embeddings=rotary)
    model.base_model.norm.weight.copy_(layer.final_norm)
    # Their tables of sine and cosine are made in float32.
    torch.testing.assert_close(guessed, model.base_model.norm(out), rtol=0, atol=2e-5)


@torch.no_grad()
def test_pairs_that_come_later_see_the_keys_and_values_of_those_before():
    model = policy("qwen3")
    layer = layer_for(model)
    features, embedded = torch.randn(2, 1, 7, 24, dtype=torch.float64)
    positions = torch.arange(7)[None]
    whole, kv = layer(features, embedded, positions, causal(7))
    first, past = layer(features[:, :4], embedded[:, :4], positions[:, :4], causal(4))
    rest, more = layer(features[:, 4:], embedded[:, 4:], positions[:, 4:], causal(7)[:, 4:], past)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    torch.testing.assert_close(torch.cat([past, more], 1), kv)


def test_a_guess_is_of_the_size_of_a_feature_and_can_take_its_place():
    model = policy()
    layer = DraftLayer.of(model, taps=3)
    assert layer.shape.feature_size == 96
    embedded = model.get_input_embeddings()(torch.tensor([[1, 2]]))
    tapped = torch.randn(1, 2, 96, dtype=torch.float64)
    guessed, past = layer(tapped, embedded, torch.tensor([[0, 1]]), causal(2))
    again, _ = layer(guessed[:, 1:], embedded[:, 1:], torch.tensor([[2]]), torch.ones(1, 1, 3).bool(), past)
    norm = model.base_model.norm.weight
    for output in (guessed, again):
        size = (output / norm).pow(2).mean(-1).sqrt()
        torch.testing.assert_close(size, torch.ones_like(size), atol=1e-3, rtol=0)


def test_no_gradient_reaches_the_policy():
    model = policy()
    layer = layer_for(model)
    embedded = model.get_input_embeddings()(torch.tensor([[1, 2, 3]]))
    features = torch.randn(1, 3, 24, dtype=torch.float64)
    guessed, _ = layer(features, embedded, torch.arange(3)[None], causal(3))
    guessed.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in layer.parameters())


def checksum(model):
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def test_saving_and_loading_a_drafter_touches_no_tensor_of_the_policy(tmp_path):
    model = policy()
    layer, before = layer_for(model), checksum(model)
    layer.save(tmp_path / "drafter.safetensors")
    sizes = {value.untyped_storage().data_ptr() for value in model.parameters()}
    found = DraftLayer.load(tmp_path / "drafter.safetensors", model)
    assert checksum(model) == before
    assert not sizes & {value.untyped_storage().data_ptr() for value in found.state_dict().values()}
    for name, value in layer.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_a_file_holds_the_trainable_tensors_and_nothing_else(tmp_path):
    model = policy()
    layer = layer_for(model)
    layer.save(tmp_path / "drafter.safetensors")
    saved = load_file(tmp_path / "drafter.safetensors")
    assert set(saved) == {name for name, _ in layer.named_parameters()}
    # Neither embedding nor head, whatever they are called.
    assert not any(40 in value.shape for value in saved.values())


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "head", "embedding"])
def test_weights_of_the_policy_are_refused(name, tmp_path):
    model = policy()
    layer = layer_for(model)
    state = {key: torch.zeros_like(value) for key, value in layer.state_dict().items()}
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    shared = model.get_input_embeddings().weight.detach()
    with pytest.raises(ValueError, match=f"'{name}' belongs to the policy"):
        layer.load_state_dict({**state, name: shared})
    with pytest.raises(ValueError, match=f"'{name}' belongs to the policy"):
        layer.load_state_dict({**state, name: shared}, strict=False)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), "refused, yet something was loaded"

    layer.save(tmp_path / "drafter")
    from safetensors import safe_open

    with safe_open(tmp_path / "drafter", "pt") as file:
        metadata = file.metadata()
    save_file({**state, name: shared.clone()}, tmp_path / "drafter", metadata)
    with pytest.raises(ValueError, match=f"'{name}' belongs to the policy"):
        DraftLayer.load(tmp_path / "drafter", model)


def test_what_does_not_fit_is_named():
    layer = layer_for(policy())
    state = layer.state_dict()
    with pytest.raises(ValueError, match=r"'fuse.weight' is missing"):
        layer.load_state_dict({k: v for k, v in state.items() if k != "fuse.weight"})
    with pytest.raises(ValueError, match=r"'spare' is unknown"):
        layer.load_state_dict({**state, "spare": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'gain' must be of shape \(24,\), got \(25,\)"):
        layer.load_state_dict({**state, "gain": torch.zeros(25)})


def test_a_drafter_of_another_policy_is_refused(tmp_path):
    layer_for(policy()).save(tmp_path / "drafter")
    other = LlamaConfig(**{**SIZES, "vocab_size": 41, "hidden_size": 32})
    with pytest.raises(ValueError, match="hidden_size 24, not 32; head_size 6, not 8; vocabulary 40, not 41"):
        DraftLayer.load(tmp_path / "drafter", other)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text: not a safetensors file"):
        DraftLayer.load(tmp_path / "text", other)
    save_file({"x": torch.zeros(1)}, tmp_path / "else")
    with pytest.raises(ValueError, match="else: not a draft layer"):
        DraftLayer.load(tmp_path / "else", other)


def test_positions_that_change_with_the_length_are_refused():
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="kind of rotary positions must be one of default"):
        DraftShape.of(config)


@pytest.mark.parametrize("kind", [Gemma2Config, Gemma3TextConfig, GPT2Config])
def test_policies_without_a_draft_layer_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"policy's model_type must be one of llama.*{kind.model_type}"):
        DraftShape.of(kind())
