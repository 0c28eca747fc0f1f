"""Text to tokens and back with a `transformers` tokenizer: which special tokens stand around a text.

They follow the tokenizer, as `tokenizer(text)` does: prompts and documents begin with the tokens that it puts
before a text, such as BOS. The tokens that some tokenizers put behind every text, such as EOS, end a text: a
prompt is to be continued and does not have them; a document ends with one EOS. The tokens of a chat are those
of the chat template alone, which writes its own BOS.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
