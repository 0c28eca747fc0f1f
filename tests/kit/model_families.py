"""Tiny random models of many families of transformers, with features that decide how rows share a pass."""

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from kit.rollouts import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OLD_SIZES = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}

FAMILIES = {
    "GPT-2": (GPT2Config, GPT2LMHeadModel, {**OLD_SIZES, "n_embd": 32, "n_positions": 48}),
    "GPT-NeoX": (GPTNeoXConfig, GPTNeoXForCausalLM, SIZES),
    "OPT": (OPTConfig, OPTForCausalLM, {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Bloom": (BloomConfig, BloomForCausalLM, {**OLD_SIZES, "hidden_size": 32}),
    "MPT": (
        MptConfig,
        MptForCausalLM,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "initializer_range": 0.3},
    ),
    "Falcon": (FalconConfig, FalconForCausalLM, SIZES),
    "Falcon with ALiBi": (FalconConfig, FalconForCausalLM, {**SIZES, "alibi": True}),
    "GPT-Neo": (
        GPTNeoConfig,
        GPTNeoForCausalLM,
        {
            **SIZES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 17,
        },
    ),
    "GPT-J": (GPTJConfig, GPTJForCausalLM, {**OLD_SIZES, "n_embd": 32, "n_positions": 64, "rotary_dim": 4}),
    "Jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            **SIZES,
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
    ),
    "Llama 4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            **SIZES,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "head_dim": 8,
            "attention_chunk_size": 17,
        },
    ),
    "Gemma 2": (Gemma2Config, Gemma2ForCausalLM, {**SIZES, **ALTERNATING, "initializer_range": 0.1}),
    "Gemma 3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {**SIZES, **ALTERNATING, "sliding_window": 17, "initializer_range": 0.1},
    ),
    "Phi-3": (Phi3Config, Phi3ForCausalLM, {**SIZES, "sliding_window": 17}),
    "Mistral": (MistralConfig, MistralForCausalLM, {**SIZES, "sliding_window": 3}),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, {**SIZES, **EXPERTS, **ALTERNATING}),
    "Mixtral": (MixtralConfig, MixtralForCausalLM, {**SIZES, **EXPERTS}),
    "Qwen3-MoE": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "DeepSeek-V2": (DeepseekV2Config, DeepseekV2ForCausalLM, {**SIZES, **MLA, "topk_method": "greedy"}),
    "DeepSeek-V3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**SIZES, **MLA}),
    "Mamba": (
        MambaConfig,
        MambaForCausalLM,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3},
    ),
    "RWKV": (
        RwkvConfig,
        RwkvForCausalLM,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    ),
    "Llama": (LlamaConfig, LlamaForCausalLM, SIZES),
}


def tiny_model(family, **changes):
    """Return a random model of a family in float64, in evaluation mode."""
    config, model, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made = model(config(**{**sizes, **changes})).double().eval()
    made.set_experts_implementation("eager") if hasattr(made, "set_experts_implementation") else None
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:  # biases and norms, which start as zeros and ones
                parameter += 0.3 * torch.randn_like(parameter)
    return made
