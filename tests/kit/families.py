"""Tiny models of all families with a fast path, with weights and sizes that make every part matter."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from kit.exact_norms import normalize_exactly

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
GEMMA = {
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": False,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [3.0, 4.0],
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, rope_parameters=ROPE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(
        **SIZES, rope_parameters=ROPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, rope_parameters=ROPE, head_dim=12, attention_bias=True),
    "mistral": MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=5),
    "gemma2": Gemma2Config(**SIZES, **GEMMA, rope_parameters=ROPE, attn_logit_softcapping=1.5),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        **GEMMA,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": ROPE | {"rope_theta": 1e4}, "sliding_attention": ROPE},
    ),
    "phi3": Phi3Config(**SIZES, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}, sliding_window=6),
    "phi3 longrope": Phi3Config(**SIZES, rope_parameters=LONG_ROPE, original_max_position_embeddings=48),
    "olmo2": Olmo2Config(**SIZES, rope_parameters=ROPE, attention_bias=True),
    "smollm3": SmolLM3Config(
        **SIZES,
        rope_parameters=ROPE,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        mlp_bias=True,  # no attention_bias: without RoPE a bias of keys changes nothing
    ),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, rope_parameters=ROPE, sliding_window=5),
    "qwen3 moe": Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        rope_parameters=ROPE,
        head_dim=12,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen3 moe normalized": Qwen3MoeConfig(
        **SIZES, **EXPERTS, rope_parameters=ROPE, head_dim=8, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "gpt2": GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=48,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def family_model(name, dtype=torch.float64, **changes):
    """Return a model whose weights are large enough that omitting any part of it is detected.

    In float64 it computes exactly where `transformers` rounds to float32.
    """
    torch.manual_seed(3)
    config = FAMILIES[name].__class__.from_dict(FAMILIES[name].to_dict() | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.config._experts_implementation = "eager"  # grouped products do not support float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
        for module in model.modules():
            if "Norm" in type(module).__name__ and not hasattr(module, "eps"):
                module.weight.add_(1.0)  # other than Gemma's
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.add_(1.0)
    return normalize_exactly(model)
