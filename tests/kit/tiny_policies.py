"""Small policies of the supported kinds, samples of theirs, and drafters for them, in plain transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training import FeatureSample, PolicyEmbeddings

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def policy(kind="llama", dtype=torch.float64, loudness=6.0):
    """Return a random model; a larger `loudness` of its head makes the next token more certain."""
    torch.manual_seed(3)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(**SIZES, head_dim=8, initializer_range=0.15, tie_word_embeddings=True)
        )
    with torch.no_grad():
        model.lm_head.weight.mul_(loudness) if kind == "llama" else None
    return model.to(dtype).eval()


@torch.no_grad()
def said(model, prompts, num_tokens, *, version=1, seed=0):
    """Return samples at temperature 1, from full forwards of the model itself."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(prompts)
    for _ in range(num_tokens):
        p = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)), 1)
    hidden = model.model(input_ids=tokens).last_hidden_state
    return [
        FeatureSample(row, features[:-1], len(prompts[0]), version, 0, number + 1, True)
        for number, (row, features) in enumerate(zip(tokens, hidden, strict=True))
    ]


def ends(model, version=1):
    return PolicyEmbeddings(
        model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach(), version
    )


def drafter(model, seed=0, taps=0):
    """Return a draft layer that no longer has its fresh initialization, so that all its weights matter."""
    generator = torch.Generator().manual_seed(seed)
    layer = DraftLayer.of(model, taps=taps, generator=generator)
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(torch.randn(value.shape, generator=generator).to(value) * 0.1)
    return layer
