"""Memory of keys and values: while a long-tailed batch is decoded, and with rows for very long texts.

The models are small but for their keys and values. The prefix cache is off, as it keeps texts on purpose.
"""

import gc
import random
from dataclasses import dataclass

import psutil
from transformers import PreTrainedModel

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.decode_parts.policy import PolicyShape, random_policy
from benchmarks.decode_parts.systems import random_texts

MIB = 2**20
NO_PREFIX_CACHE = EngineLimits(prefix_cache_bytes=0)
TAIL_SHAPE = PolicyShape(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
"""8 KiB of keys and values per token in fp32."""
WIDE_SHAPE = PolicyShape(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 16,
)
"""Keys and values of a model of 7 B parameters with grouped queries: 128 KiB per token in bf16."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory between two steps."""

    tokens: int
    """Cached tokens of all rows."""
    kv_bytes: int
    rss_bytes: int
    """Resident memory of the process, less that before the engine was made."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory over one batch."""

    what: str
    token_bytes: int
    """Keys and values of one token."""
    reserved_bytes: int
    moments: list[Moment]
    end: Moment
    """When all samples have ended."""

    @property
    def peak(self) -> Moment:
        """Return the moment with the most tokens in use."""
        return max(self.moments, key=lambda moment: moment.tokens)

    @property
    def over_tokens(self) -> float:
        """Return the bytes of the cache over those of the tokens in use, summed over all moments."""
        used = sum(moment.tokens for moment in self.moments) * self.token_bytes
        return sum(moment.kv_bytes for moment in self.moments) / used


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of which most are short and some are long."""

    rows: int = 16
    max_tokens: int = 4096
    samples: int = 64
    prompt: int = 24
    median: float = 150.0
    """New tokens of a sample; drawn from a log-normal distribution."""
    spread: float = 1.1

    def lengths(self) -> list[int]:
        """Return the new tokens of each sample."""
        rng, most = random.Random(0), self.max_tokens - self.prompt
        drawn = (self.median * rng.lognormvariate(0.0, self.spread) for _ in range(self.samples))
        return [max(1, min(most, round(length))) for length in drawn]


def long_tail(batch: Batch, shape: PolicyShape = TAIL_SHAPE) -> Memory:
    """Decode a long-tailed batch."""
    model = random_policy(shape, "fp32")
    name = f"{batch.samples} long-tailed samples, {batch.rows} rows of {batch.max_tokens}, fp32"
    return _measured(name, model, batch)


def wide(batch: Batch, shape: PolicyShape = WIDE_SHAPE) -> Memory | str:
    """Decode a few short samples in rows for very long ones; return why not if the memory is refused."""
    name = f"{batch.rows} rows of {batch.max_tokens}, keys and values as of 7 B, bf16"
    try:
        return _measured(name, random_policy(shape, "bf16"), batch)
    except (RuntimeError, MemoryError) as error:
        return f"{name}: not allocated ({str(error).rpartition(': ')[2][:80]})"


def _measured(name: str, model: PreTrainedModel, batch: Batch) -> Memory:
    gc.collect()
    before = psutil.Process().memory_info().rss
    engine = Engine.of(model, rows=batch.rows, max_tokens=batch.max_tokens, limits=NO_PREFIX_CACHE)
    kv = engine.target.read_kv(0, 1)
    token_bytes = kv.numel() * kv.element_size()
    texts = random_texts(engine.target.vocabulary, batch.samples, batch.prompt, random.Random(1))
    for i, (tokens, new) in enumerate(zip(texts, batch.lengths(), strict=True)):
        how = Sampling(temperature=1.0, max_new_tokens=new)
        engine.add(Prompt(tokens=tuple(tokens), rollout=i, sampling=how))

    def now() -> Moment:
        # The last token of a sample has no keys and values yet.
        tokens = sum(batch.prompt + len(each.tokens) - 1 for each in engine.running)
        return Moment(tokens, engine.target.kv_bytes, psutil.Process().memory_info().rss - before)

    moments = []
    while engine.running or engine.waiting:
        engine.step()
        moments += [now()] if engine.running else []
    return Memory(name, token_bytes, engine.target.kv_bytes_reserved, moments, now())
