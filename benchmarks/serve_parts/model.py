"""Model of the serving benchmark: a random Llama and a tokenizer of one word per token id."""

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.decode_parts.policy import PolicyShape, random_policy

SHAPE = PolicyShape(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1152,
    num_hidden_layers=14,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=1024,
)
"""27 M parameters."""
QUICK = PolicyShape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=512,
)
_fast: Any = PreTrainedTokenizerFast  # its methods carry no types


def saved_model(shape: PolicyShape, directory: Path) -> Path:
    """Write model and tokenizer in fp32 for `from_pretrained`, and return the directory.

    The words t0, t1, ... are the tokens 0, 1, .... No token ends an answer, so each has all its tokens.
    """
    shutil.rmtree(directory, ignore_errors=True)
    random_policy(shape, "fp32").save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(directory)
    return directory
