"""Text to token ids and back, with a `transformers` tokenizer. Thread-safe where the tokenizer is."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from aedit.spec_rollout.http.errors import bad_request
from aedit.spec_rollout.sampling import REPLACEMENT, TextTokens

_bytes: Any = bytes_to_unicode


class TextCodec:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts = TextTokens(tokenizer)
        self._byte_of = {character: byte for byte, character in _bytes().items()}
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        """Return the text of one token by itself."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the tokens of a prompt, with `special` after those that the tokenizer puts before a text."""
        return tuple(self._texts.prompt(text) if special else self._texts.plain(text))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens."""
        return self._texts.decode(tokens, skip_special=skip_special, clean_up_tokenization_spaces=False)

    def token_bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token, which may be a part of a character; None if they are unknown."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return None
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:5], 16)]
        if all(character in self._byte_of for character in piece):
            return [self._byte_of[character] for character in piece]
        return None

    @property
    def chat_template(self) -> str | None:
        """Return the template of chats, or None."""
        found = getattr(self.tokenizer, "chat_template", None)
        return found if isinstance(found, str) else None

    @property
    def chat_arguments(self) -> frozenset[str]:
        """Return the names that are not free for variables of the template: it gets them in another way."""
        renders = (self.tokenizer.apply_chat_template, render_jinja_template)
        names = {name for each in renders for name in signature(each).parameters}
        return frozenset({*names, "self", "messages"})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Return the tokens of a chat.

        Args:
            messages: The messages.
            settings: Arguments of `apply_chat_template`.
            variables: Further variables of the template, none of which is in `chat_arguments`.

        Raises:
            ApiError: There is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise bad_request(
                "messages", "need a chat template, which this model has not: use /v1/completions"
            )
        try:
            found = self.tokenizer.apply_chat_template(
                list(messages), return_dict=True, **settings, **variables
            )
        except Exception as error:  # templates are programs with exceptions of their own
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise bad_request("messages", f"do not fit this model's chat template: {first}") from error
        return tuple(found["input_ids"])

    def info(self) -> dict[str, Any]:
        """Return the special tokens and the chat template."""
        tokenizer = self.tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": self.chat_template,
        }

    def _token_text(self, token: int) -> str:
        return self.decode([token], skip_special=False)
