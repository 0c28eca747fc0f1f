"""A sample that is running in a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from aedit.spec_rollout.engine.feature_history import FeatureHistory
from aedit.spec_rollout.sampling import FinishReason, Rollout, StopStrings, TokenDecoder


@dataclass(slots=True)
class RunningSample:
    """A sample in its row."""

    rollout: Rollout
    length: int
    """Number of tokens whose keys and values are in the row: all but the last."""
    last: int
    """Token that goes through the policy next."""
    stops: StopStrings | None
    features: FeatureHistory | None
    """Features of the prompt, for other samples of the group; with a prefix cache, of all tokens but the
    last. None if features are not needed."""

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: TokenDecoder | None, features: FeatureHistory | None) -> Self:
        """Return a sample that begins or continues after all tokens of its rollout so far."""
        length = len(rollout.prompt.tokens) + len(rollout.tokens) - 1
        last = rollout.tokens[-1] if rollout.tokens else rollout.prompt.tokens[-1]
        return cls(rollout, length, last, _stops(rollout, tokenizer), features)

    @property
    def cached_tokens(self) -> list[int]:
        """Return the tokens whose keys and values are in the row."""
        return [*self.rollout.prompt.tokens, *self.rollout.tokens][: self.length]

    @property
    def max_remaining(self) -> int:
        """Return the upper limit of new tokens that the sample may still get."""
        return self.rollout.prompt.sampling.max_new_tokens - len(self.rollout.tokens)

    def find_end(self, tokens: Sequence[int]) -> tuple[int, FinishReason]:
        """Return how many of these next tokens belong to the rollout, and its finish reason.

        The reason is empty if the rollout does not end with them.
        """
        sampling, num_tokens = self.rollout.prompt.sampling, len(self.rollout.tokens)
        for i, token in enumerate(tokens, 1):
            completed = self.stops is not None and self.stops.completes(token)
            if token in sampling.stop_tokens or (completed and num_tokens + i >= sampling.min_new_tokens):
                return i, "stop"
            if num_tokens + i >= sampling.max_new_tokens:
                return i, "length"
        return len(tokens), ""

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append the tokens of one pass of the policy."""
        rollout = self.rollout
        rollout.tokens += tokens
        rollout.logprobs += logprobs
        rollout.versions += [version] * len(tokens)
        rollout.passes += 1
        self.length += len(tokens)
        self.last = tokens[-1]


def _stops(rollout: Rollout, tokenizer: TokenDecoder | None) -> StopStrings | None:
    """Return the search for the sample's stop strings, after its text so far."""
    strings = rollout.prompt.sampling.stop_strings
    if not strings or tokenizer is None:
        return None
    stops = StopStrings(strings, tokenizer, rollout.prompt.tokens)
    for token in rollout.tokens:
        stops.completes(token)
    return stops
