"""End of a rollout by stop strings in the decoded text."""

from collections.abc import Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = 5
"""Earlier tokens that are decoded with the new text, as the text of a token may depend on those before it."""

REPLACEMENT = "\ufffd"
"""Replacement character: output of a decoder for bytes that are not a complete character (yet)."""

MAX_INCOMPLETE_TOKENS = 64
"""After this many tokens without a complete character the bytes are taken as they are."""


class TokenDecoder(Protocol):
    """The part of a transformers tokenizer that stop strings need."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Return the text of the tokens."""


class StopStrings:
    """Incremental search for stop strings in a text that grows token by token.

    A character counts when all its bytes are complete. Only the last few tokens are decoded each time.
    """

    def __init__(self, strings: Sequence[str], tokenizer: TokenDecoder, before: Sequence[int] = ()) -> None:
        self._strings, self._tokenizer = tuple(strings), tokenizer
        self._longest = max(map(len, self._strings))
        self._tail = ""  # in which a string may have begun
        self._num_chars = 0  # of the window's text, that have been read
        self._begin_window(list(before[-NUM_CONTEXT_TOKENS:]))

    def completes(self, token: int) -> bool:
        """Append a token and return whether one of the strings ends in the text that it adds."""
        self._window.append(token)
        text = self._text()
        whole = text.rstrip(REPLACEMENT)
        if len(self._window) - self._num_old >= MAX_INCOMPLETE_TOKENS:
            whole = text
        new, self._num_chars = whole[self._num_chars :], max(self._num_chars, len(whole))
        if whole == text:
            self._begin_window(self._window[self._num_old :])
        text, num_old = self._tail + new, len(self._tail)
        self._tail = text[-self._longest :]
        return any(text.find(s, max(0, num_old - len(s) + 1)) >= 0 for s in self._strings)

    def _begin_window(self, tokens: list[int]) -> None:
        """Start a new decoding window after tokens whose text has been searched."""
        self._window, self._num_old = tokens, len(tokens)
        self._num_chars = len(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
