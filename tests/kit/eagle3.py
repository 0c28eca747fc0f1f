"""A small policy of four layers, and layers of EAGLE-3's form for it whose weights all matter."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.drafters import Eagle3Layer, Eagle3Shape, layer_of

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SOME = (0, 3, 4, 7, 11, 12, 20, 21, 22, 30, 41, 47)


def policy(loudness=6.0, dtype=torch.float64):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.mul_(loudness)
    return model.to(dtype).eval().requires_grad_(False)


def layer_for(model, draft_tokens=(), *, after=True):
    generator = torch.Generator().manual_seed(5)
    layer = Eagle3Layer.for_policy(model, draft_tokens=draft_tokens, generator=generator)
    if not after:
        fields = {name: getattr(layer.shape, name) for name in layer.shape.__dataclass_fields__}
        other = layer_of(Eagle3Shape(**fields | {"residual_after_norm": False})).to(layer.gain)
        other.load_state_dict(layer.state_dict())
        layer = other
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(torch.randn(value.shape, generator=generator).to(value) * 0.1)
    return layer
