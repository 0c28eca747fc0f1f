"""Text of an answer that grows: complete characters only, and cut before a stop string."""

from collections.abc import Sequence

from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.sampling import MAX_INCOMPLETE_TOKENS, NUM_CONTEXT_TOKENS, REPLACEMENT


class AnswerText:
    """Incremental decoding of one answer.

    The text of a token may depend on those before it: only the last few tokens are decoded each time, after
    some tokens of the prompt at first. Bytes that are no complete character (yet) wait for the next token.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        kept: Sequence[str] = (),
        skip_special: bool = True,
    ) -> None:
        """Begin after a prompt.

        Args:
            codec: The tokenizer.
            prompt: Tokens before the answer.
            stops: Stop strings: what may be the beginning of one is held back.
            kept: Those of them that belong to the text, which ends after them.
            skip_special: Leave special tokens out of the text.
        """
        self._codec, self._stops, self._skip_special = codec, tuple(stops), skip_special
        self._kept = frozenset(kept)
        self.text = ""
        """Text of the tokens so far, without incomplete characters."""
        self.offsets: list[int] = []
        """Number of characters of the text before each token that `add` got alone."""
        self._num_taken = 0
        self._num_before_last = 0
        self._begin_window(list(prompt[-NUM_CONTEXT_TOKENS:]))
        self._num_chars = len(self._decode().rstrip(REPLACEMENT))  # the answer may complete a character

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens, decoded together."""
        if not tokens:
            return
        self.offsets.append(len(self.text))
        self._num_before_last = len(self.text)
        self._window += tokens
        decoded = self._decode()
        is_stuck = len(self._window) - self._num_old >= MAX_INCOMPLETE_TOKENS
        whole = decoded if is_stuck else decoded.rstrip(REPLACEMENT)
        self.text += whole[self._num_chars :]
        self._num_chars = max(self._num_chars, len(whole))
        if whole == decoded:
            self._begin_window(self._window[-NUM_CONTEXT_TOKENS:])

    def take(self) -> str:
        """Return the text that is new since the last call and belongs to the answer whatever follows.

        It ends before what may be the beginning of a stop string, and at one that the last token has
        completed: whether the answer ends there is known when `finish` is called or the next token comes.
        """
        held = max((_overlap(self.text, stop) for stop in self._stops), default=0)
        end = min(len(self.text) - held, self._first_stop())
        new = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return new

    def finish(self, *, by_stop: bool) -> None:
        """Take note that no token follows.

        Args:
            by_stop: The last token may complete a stop string. The text then ends before that.
        """
        whole = self._decode()
        self.text += whole[self._num_chars :]
        if by_stop:
            self.text = self.text[: self._first_stop()]
        self._stops = ()

    def _first_stop(self) -> int:
        """Return the end of the text if the last token has completed a stop string; if not, its length."""
        longest = max(map(len, self._stops), default=1)
        first = max(0, self._num_before_last - longest + 1)
        found = [(place, stop) for stop in self._stops if (place := self.text.find(stop, first)) >= 0]
        ends = [place + (len(stop) if stop in self._kept else 0) for place, stop in found]
        return min(ends, default=len(self.text))

    def _begin_window(self, tokens: list[int]) -> None:
        self._window, self._num_old = tokens, len(tokens)
        self._num_chars = len(self._decode())

    def _decode(self) -> str:
        return self._codec.decode(self._window, skip_special=self._skip_special)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
