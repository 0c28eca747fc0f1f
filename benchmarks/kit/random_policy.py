"""Policies of random weights from a fixed seed, the same in every system, for benchmarks of decoding.

Speed does not depend on the values of the weights.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_auto: Any = AutoModelForCausalLM  # its methods carry no types
_fast: Any = PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """Sizes of a Llama with tied embeddings; the defaults have 124 M parameters."""

    vocab_size: int = 50_304
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    max_position_embeddings: int = 8192


def random_policy(shape: PolicyShape, dtype: str, seed: int = 0) -> PreTrainedModel:
    """Return the policy: fp32 weights drawn from the seed, rounded to the dtype."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **asdict(shape), tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    model: PreTrainedModel = _auto.from_config(config, dtype=torch.float32)
    model.to(DTYPES[dtype])  # type: ignore[arg-type]
    model.train(False)
    model.requires_grad_(False)
    return model


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids."""
    config: Any = model.config
    return int(config.vocab_size)


def saved_policy(model: PreTrainedModel, directory: Path) -> Path:
    """Write the policy for other systems, with a tokenizer of one word per token id; return the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    words = {f"t{i}": i for i in range(vocabulary(model))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    specials = {"unk_token": "t0", "bos_token": "t0", "eos_token": "t0"}  # CTranslate2 wants all of them
    _fast(tokenizer_object=tokenizer, **specials).save_pretrained(directory)
    return directory
