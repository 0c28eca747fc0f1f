"""Text output while samples are generated: complete characters only, one sample after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from aedit.spec_rollout.engine import Step
from aedit.spec_rollout.sampling import Rollout

REPLACEMENT_CHARACTER = "\ufffd"
"""Output of a decoder for bytes that are not a complete character (yet)."""

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Detokenizer:
    """Incremental decoding of the tokens of one text.

    It decodes from the token before the last complete character, as the text of a token may depend on the one
    before it.
    """

    decode: Decode
    _tokens: list[int] = field(default_factory=list)
    _first: int = 0
    _num_decoded: int = 0
    """Number of tokens from `_first` on whose characters have been returned."""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the new complete characters, or with `last` all remaining ones."""
        self._tokens += tokens
        before = self.decode(self._tokens[self._first : self._num_decoded])
        text = self.decode(self._tokens[self._first :])
        if text.endswith(REPLACEMENT_CHARACTER) and not last:
            return ""
        self._first, self._num_decoded = self._num_decoded, len(self._tokens)
        return text[len(before) :]


class TextStream:
    """Writes samples in the order of the request.

    The first unfinished sample is written as it grows, the next ones follow. With more than one sample each
    has a line with its name above it.
    """

    def __init__(self, names: Sequence[tuple[Rollout, str]], decode: Decode, out: TextIO) -> None:
        self._names, self._decode, self._out = list(names), decode, out
        self._many = len(self._names) > 1
        self._current = 0
        self._num_shown = 0
        self._detokenizer = Detokenizer(decode)
        self._begin()

    def follow(self, step: Step) -> None:
        """Write what a step has added."""
        while step.rollouts and self._current < len(self._names):
            rollout, _ = self._names[self._current]
            new = rollout.tokens[self._num_shown :]
            self._num_shown += len(new)
            self._out.write(self._detokenizer.add(new, last=bool(rollout.finish_reason)))
            self._out.flush()
            if not rollout.finish_reason:
                return
            self._next()

    def _next(self) -> None:
        self._out.write("\n")
        self._current += 1
        self._num_shown, self._detokenizer = 0, Detokenizer(self._decode)
        self._begin()

    def _begin(self) -> None:
        if self._many and self._current < len(self._names):
            self._out.write(f"--- {self._names[self._current][1]}\n")


def token_lines(rollout: Rollout, decode: Decode) -> list[str]:
    """Return a line for each token with its log-probability and the most likely tokens at its place.

    There are none if the sample did not ask for top log-probabilities.
    """
    lines = []
    for token, logprob, top in zip(rollout.tokens, rollout.logprobs, rollout.top_logprobs, strict=False):
        best = ", ".join(f"{decode([other])!r} {value:.3f}" for other, value in top)
        lines.append(f"{decode([token])!r} {logprob:.3f} (best: {best})")
    return lines
