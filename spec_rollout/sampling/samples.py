"""Input and output of an engine: prompts, sampling settings, rollouts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from aedit.types import NonNegativeInt, PositiveInt, Range, Share, check, checked

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["", "stop", "length", "abort"]
"""Why a rollout has ended; empty while it is running."""

SampleKey = tuple[int, int]
"""`Prompt.rollout` and `Prompt.sample`: in a run the position of the group in the stream of prompts, and the
number of the sample in the group."""

TopLogprobs = tuple[tuple[int, float], ...]
"""Tokens with their log-probabilities, as in `Rollout.logprobs`, the most likely one first."""

ROLLOUT_PROTOCOL = 2
"""Equal on trainers, servers and verifiers; it changes with whatever an older build would misunderstand, or
draw otherwise from the same logits and key."""
UNASSIGNED = 1 << 63
"""Id that the engine replaces. It does not fit into 64 bits, so it is no id of a sample."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Limits of a temperature above 0. Beyond them, logits over temperature overflow or vanish in float32."""
MIN_TOP_P = 1e-30
"""Lower limit of top_p. A smaller one may be 0 in float32."""
MAX_PENALTY = 1e6
"""Upper limit of penalties. A larger repetition penalty could make logits infinite."""


class Constraint(Protocol):
    """Allowed next tokens of one sample, which depend on its text: a grammar, a schema, a list of choices."""

    def allowed(self, tokens: Sequence[int]) -> "Tensor | Iterable[int] | None":
        """Return the tokens that may follow.

        It is called for the answer so far and for drafted continuations of it, in any order, and must return
        the same for the same tokens. It sees no drafted token that it forbids, and nothing after a stop
        token.

        Args:
            tokens: The answer so far, without the prompt.

        Returns:
            A bool mask (vocabulary,), the allowed token ids, or None if all are allowed.
        """


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of the next-token distribution, applied in this order.

    Logit bias, repetition penalty, frequency and presence penalty, constraint, allowed tokens,
    min_new_tokens, temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    """0 selects the most likely token, the lowest id among equals."""
    top_k: NonNegativeInt = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Range(least=MIN_TOP_P, most=1)] = 1.0
    """Keep the most likely tokens that together reach this probability, at least one."""
    min_p: Share = 0.0
    """Keep the tokens with at least this share of the largest probability."""
    repetition_penalty: Annotated[float, Range(least=1 / MAX_PENALTY, most=MAX_PENALTY)] = 1.0
    """Logits of tokens that occur in prompt or answer are divided by it where positive, else multiplied."""
    frequency_penalty: Annotated[float, Range(least=-MAX_PENALTY, most=MAX_PENALTY)] = 0.0
    """Subtracted from a token's logit once for each time that it occurs in the answer."""
    presence_penalty: Annotated[float, Range(least=-MAX_PENALTY, most=MAX_PENALTY)] = 0.0
    """Subtracted from the logits of the tokens that occur in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    max_new_tokens: PositiveInt = 256
    min_new_tokens: NonNegativeInt = 0
    """Before this many new tokens no stop token is drawn and no stop string ends the rollout."""
    stop_tokens: tuple[int, ...] = ()
    """A rollout ends after one of these tokens, which is its last one."""
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these in the decoded text. Needs a tokenizer."""
    allowed: "Tensor | None" = field(default=None, compare=False)
    """Bool, (vocabulary,): tokens that may be drawn. None allows all."""
    constraint: Constraint | None = field(default=None, compare=False)
    """Returns the tokens that may be drawn after a text. It stays in this process."""
    top_logprobs: NonNegativeInt = 0
    """Number of most likely tokens whose log-probabilities are reported with each token."""

    def __post_init__(self) -> None:
        check(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
            "Sampling: temperature",
            f"must be 0 or more: 0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
            self.temperature,
        )


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One requested sample.

    (rollout, sample) is the key of its noise: the same key, prompt, policy and sampling give the same tokens
    on any engine with any drafter. So two samples of a prompt must have two keys. A prompt without ids gets a
    key of its own from `Engine.add`: (-1, 0), (-2, 0), ... in the order of adding, so a program that is
    started again gets the same keys. If one id is given, the other is 0. Give ids where several engines work
    on one batch: each engine counts for itself.
    """

    tokens: tuple[int, ...]
    rollout: int = UNASSIGNED
    sample: int = UNASSIGNED
    group: int = -1
    """Samples of one group have the same prompt, which is computed once, and share the history of the suffix
    drafter. A negative number means no group."""
    sampling: Sampling = Sampling()
    partial: "Rollout | None" = None
    """Unfinished rollout of another engine that this engine continues."""

    def __post_init__(self) -> None:
        if (self.rollout == UNASSIGNED) != (self.sample == UNASSIGNED):
            name = "rollout" if self.rollout == UNASSIGNED else "sample"
            object.__setattr__(self, name, 0)

    @property
    def key(self) -> SampleKey:
        """Return (rollout, sample)."""
        return self.rollout, self.sample

    @property
    def has_key(self) -> bool:
        """Return true if the ids were given, or assigned by an engine."""
        return self.rollout != UNASSIGNED

    @property
    def name(self) -> str:
        """Return the sample's name in messages."""
        return f"{self.rollout}/{self.sample}" if self.has_key else "without ids"

    def to_rollout(self) -> "Rollout":
        """Return a new rollout of this prompt, which continues the partial one if there is one."""
        begun = self.partial or Rollout(self)
        lists = [*begun.tokens], [*begun.logprobs], [*begun.versions], [*begun.top_logprobs]
        prompt, servers = replace(self, partial=None), [*begun.servers]
        drafted = [*begun.drafted]
        return Rollout(prompt, *lists, passes=begun.passes, servers=servers, kv=begun.kv, drafted=drafted)


@dataclass(frozen=True, slots=True, eq=False)
class SampleKV:
    """Keys and values of all tokens of a sample but the last.

    An engine that continues the sample need not compute them again.
    """

    kv: "Tensor"
    """(layers, 2, key/value heads, tokens, head size)."""
    version: int
    """Version of the policy that computed them. They are valid for this version only."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.kv.shape[3]

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return self.kv.numel() * self.kv.element_size()


@checked()
@dataclass(slots=True)
class Rollout:
    """One sample, which grows with the steps of the engine.

    tokens, logprobs and versions have the same length.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """log softmax(logits / T) of each token under the policy version that drew it, before bias, penalties,
    masks, top-k, top-p and min-p. T is 1 where the temperature is 0."""
    versions: list[int] = field(default_factory=list)
    """Policy version that drew each token."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """The most likely tokens at the place of each token; empty unless `Sampling.top_logprobs` asks."""
    finish_reason: FinishReason = ""
    passes: NonNegativeInt = 0
    """Number of forward passes of the policy that drew its tokens; tokens / passes is the mean accepted
    length."""

    servers: list[tuple[int, str]] = field(default_factory=list)
    """Place of the first token of each part that one rollout server has generated, and its name, `""` for an
    engine of this node. Empty: no server has."""

    kv: SampleKV | None = field(default=None, repr=False, compare=False)
    """Keys and values from another engine, until the sample has a row."""

    advantage: float | None = None
    """Set by the trainer. None: it has no part in the loss."""

    drafted: list[int] = field(default_factory=list, repr=False, compare=False)
    """Places of the tokens that a drafter had proposed, where this process's engine has generated them."""

    @property
    def knows_drafted(self) -> bool:
        """Return whether `drafted` is complete: each pass draws one token more than those that were drafted.

        The last pass may end within the drafted ones.
        """
        return 0 <= self.passes + len(self.drafted) - len(self.tokens) <= 1

    def note_server(self, name: str) -> None:
        """Note the server of the tokens that are appended from now on; `""` is an engine of this node."""
        if name != (self.servers[-1][1] if self.servers else ""):
            self.servers.append((len(self.tokens), name))

    def to_prompt(self, kv: SampleKV | None = None) -> Prompt:
        """Return a prompt with which another engine continues this rollout."""
        return replace(self.prompt, partial=replace(self, kv=kv))
