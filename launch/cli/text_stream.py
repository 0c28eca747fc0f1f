"""Print text while it is generated: complete characters only, one sample after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from aedit.spec_rollout.engine.meters import Step
from aedit.spec_rollout.sampling.samples import Rollout

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Detokenizer:
    """Incremental conversion of the tokens of one text into characters.

    Decodes the tokens since the last but one complete character, as the text of a token may depend on the one
    before it.
    """

    decode: Decode
    _tokens: list[int] = field(default_factory=list)
    _first: int = 0
    _said: int = 0
    """Tokens from `_first` on whose characters have been given."""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the characters that are complete now; with `last`, all that remain."""
        self._tokens += tokens
        before = self.decode(self._tokens[self._first : self._said])
        text = self.decode(self._tokens[self._first :])
        if text.endswith(REPLACEMENT) and not last:
            return ""
        self._first, self._said = self._said, len(self._tokens)
        return text[len(before) :]


class TextStream:
    """Writer of samples in the order of the requests.

    The first unfinished one as it grows, later ones afterwards.

    If there is more than one, a line above each has its name.
    """

    def __init__(self, names: Sequence[tuple[Rollout, str]], decode: Decode, out: TextIO) -> None:
        self._names, self._decode, self._out = list(names), decode, out
        self._many = len(self._names) > 1
        self._turn = 0
        self._shown = 0
        self._words = Detokenizer(decode)
        self._begin()

    def follow(self, step: Step) -> None:
        """Write the new text of a step."""
        while step.rollouts and self._turn < len(self._names):
            rollout, _ = self._names[self._turn]
            new = rollout.tokens[self._shown :]
            self._shown += len(new)
            self._out.write(self._words.add(new, last=bool(rollout.finish_reason)))
            self._out.flush()
            if not rollout.finish_reason:
                return
            self._next()

    def _next(self) -> None:
        self._out.write("\n")
        self._turn += 1
        self._shown, self._words = 0, Detokenizer(self._decode)
        self._begin()

    def _begin(self) -> None:
        if self._many and self._turn < len(self._names):
            self._out.write(f"--- {self._names[self._turn][1]}\n")
