"""Llama models of benchmark size on bytes of the standard library, and one inner step."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from aedit.launch.config import DataConfig, ModelConfig
from aedit.launch.data import Corpus, load_corpus, load_tokenizer
from aedit.launch.node import build_model, loss


def llama(hidden_size: int, num_layers: int, seq_len: int, seed: int = 0) -> nn.Module:
    """Return a Llama for bytes, on CPU, with heads of 32 and tied embeddings."""
    sizes: dict[str, int | float | bool | str] = {
        "hidden_size": hidden_size,
        "intermediate_size": 8 * round(hidden_size / 3),
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "tie_word_embeddings": True,
    }
    tokenizer = load_tokenizer(DataConfig())
    return build_model(ModelConfig(sizes=sizes), tokenizer.vocab_size, seq_len, seed, tokenizer.eos_id)


@cache
def corpus(seq_len: int) -> Corpus:
    """Return the standard library's text as samples of seq_len + 1 bytes."""
    return load_corpus(DataConfig(seq_len=seq_len), load_tokenizer(DataConfig()), None)


def inner_step(
    model: nn.Module,
    inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    samples: Tensor,
    before_clip: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run forward, backward, clip and step of all optimizers. Returns the loss, in nats per token."""
    mean = loss(model, samples, "fp32")
    mean.backward()  # type: ignore[no-untyped-call]
    before_clip()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for each in inner if isinstance(inner, Sequence) else (inner,):
        each.step()
        each.zero_grad()
    return mean.detach()
