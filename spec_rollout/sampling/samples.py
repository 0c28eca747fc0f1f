"""What goes into an engine and what comes out: prompts, how to sample, rollouts."""

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from aedit.types import check

FinishReason = Literal["", "stop", "length"]
"""Why a rollout has ended; empty as long as it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn: mask, then temperature, then top-k, then top-p."""

    temperature: float = 1.0
    """0 takes the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Only so many of the most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, at least one."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """No stop token is drawn, and no stop string ends the rollout, before there are so many."""
    stop_tokens: tuple[int, ...] = ()
    """A rollout ends after one of these, which is its last token."""
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these in the decoded text; needs a tokenizer."""
    allowed: Tensor | None = field(default=None, compare=False)
    """Bool, (vocabulary,): the tokens that may be drawn at all."""

    def __post_init__(self) -> None:
        check(self.temperature >= 0, "temperature", "must be 0 or more", self.temperature)
        check(self.top_k >= 0, "top_k", "must be 0 or more", self.top_k)
        check(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1", self.top_p)
        check(self.max_new_tokens > 0, "max_new_tokens", "must be above 0", self.max_new_tokens)
        check(self.min_new_tokens >= 0, "min_new_tokens", "must be 0 or more", self.min_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sample to be made. (rollout, sample) names its noise: the same pair, prompt, policy and sampling
    give the same tokens on any engine, with any drafter."""

    tokens: tuple[int, ...]
    rollout: int = 0
    sample: int = 0
    group: int = -1
    """Samples of one group have the same prompt, which is computed once, and learn from each other's text
    (suffix drafter). Below 0: of no group."""
    sampling: Sampling = Sampling()
    partial: "Rollout | None" = None
    """What another engine has made of it already: this one goes on from there."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleKV:
    """Keys and values of all tokens of a sample but the last: what an engine that goes on with it need not
    compute again."""

    kv: Tensor
    """(layers, 2, key/value heads, tokens, head size)."""
    version: int
    """Of the policy that made them: no other can read them."""

    @property
    def num_tokens(self) -> int:
        return self.kv.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


@dataclass(slots=True)
class Rollout:
    """One sample as it grows. The three lists are of one length."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """log softmax(logits / T) of each token under the policy that drew it, before mask, top-k and top-p; T
    is 1 where the temperature is 0."""
    versions: list[int] = field(default_factory=list)
    """The policy's version that drew each token."""
    finish_reason: FinishReason = ""
    passes: int = 0
    """Forward passes of the policy that drew tokens of it: tokens / passes is the accepted length."""

    kv: SampleKV | None = field(default=None, repr=False, compare=False)
    """What it has brought along from another engine, until it has a row."""

    def to_prompt(self, kv: SampleKV | None = None) -> Prompt:
        """A prompt that lets another engine go on where this one stops."""
        return replace(self.prompt, partial=replace(self, kv=kv))
