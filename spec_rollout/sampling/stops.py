"""Text and tokens of a tokenizer, and the end of a rollout by stop strings in the decoded text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

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


PROBES = ("a", "0", " ", "\n")
"""Texts that show what a tokenizer puts around a text. Several, as one may have no token in a vocabulary."""


class TextTokens:
    """A tokenizer and its chat template. Thread-safe where the tokenizer is."""

    def __init__(self, tokenizer: Any) -> None:
        """Find out what `tokenizer` puts before and behind a text."""
        self.tokenizer = tokenizer
        self.before, self.behind = _around(self)
        """Tokens that the tokenizer puts before and behind every text."""

    def plain(self, text: str) -> list[int]:
        """Return the tokens of `text` alone."""
        # Not verbose: texts longer than the model's context are expected.
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def whole(self, text: str) -> list[int]:
        """Return the tokens of `tokenizer(text)`, with all that it puts around a text."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued."""
        whole = self.whole(text)
        return whole[: len(whole) - len(self.behind)]

    def continuation(self, before: str, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of `text` where it continues the prompt `before`.

        They are those behind the prompt in the tokens of both texts together, so that a tokenizer that puts a
        space before every text puts none here. Where the two texts share a token, which a continuation of the
        prompt's tokens cannot have, they are the tokens of `text` alone.

        special: `before` has the special tokens of a prompt; false for a rendered chat, which has its own.
        """
        encode = self.prompt if special else self.plain
        first, both = encode(before), encode(before + text)
        return both[len(first) :] if both[: len(first)] == first else self.plain(text)

    @property
    def chat_template(self) -> str | None:
        """Return the template of chats, or None."""
        found = getattr(self.tokenizer, "chat_template", None)
        return found if isinstance(found, str) else None

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of a chat. options: of `apply_chat_template`. Raises what the template raises."""
        found = self.tokenizer.apply_chat_template(list(map(dict, messages)), return_dict=True, **options)
        ids: list[int] = found["input_ids"]
        return ids

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True, **options: Any) -> str:
        """Return the text of tokens, by default without special tokens. options: of the tokenizer."""
        ids = list(map(int, tokens))
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special, **options)
        return text


def _around(tokens: TextTokens) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before and behind every text."""
    for probe in PROBES:
        plain, whole = tokens.plain(probe), tokens.whole(probe)
        num_added = len(whole) - len(plain)
        for first in range(num_added + 1):
            if plain and whole[first : first + len(plain)] == plain:
                return tuple(whole[:first]), tuple(whole[first + len(plain) :])
    # No probe has a token: an EOS at the end of nothing is behind the text.
    whole = tokens.whole("")
    eos = tokens.tokenizer.eos_token_id
    end = len(whole) - (len(whole) > 1 and whole[-1] == eos)
    return tuple(whole[:end]), tuple(whole[end:])
