"""Tokenizers: bytes by default, any Hugging Face tokenizer by name."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aedit.launch.config import DataConfig
from aedit.spec_rollout.sampling import TextTokens
from aedit.system import check_folder
from aedit.types import UserError, first_line

EOS = "<|endoftext|>"
_PROBE = "def f(x):\n\treturn  x ** 2 # 3.14, 1000000 \u00e9\u4e2d\U0001f600\r\n"


def load_tokenizer(config: DataConfig) -> "CorpusTokenizer":
    """Return the tokenizer `byte`, or the Hugging Face tokenizer of this directory or name.

    Never executes downloaded code.

    Raises UserError if there is none with that name, it has no end-of-text token, or `data.special_tokens` is
    "none" and it cannot leave them out.
    """
    name = config.tokenizer
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            check_folder(path, weights=False)
        loaded = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise UserError(f"data.tokenizer = {name!r}: no tokenizer found ({reason})") from error
    if config.special_tokens == "none":
        _remove_special_tokens(loaded, name)
    return PretrainedTokenizer(loaded, name)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return uint16 if it holds all ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class ByteTokenizer:
    """Tokenizer with one id per UTF-8 byte, and one for the end of a document."""

    vocab_size = 257
    eos_id = 256

    def __init__(self) -> None:
        probe = self.encode(_PROBE).tolist()
        self.fingerprint = _fingerprint({**_byte_vocabulary(), EOS: self.eos_id}, self.eos_id, probe)

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the bytes of `text` as ids."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_document(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the bytes of `text` and the end-of-document id."""
        return np.append(self.encode(text), np.uint16(self.eos_id))

    def encode_answer(self, prompt: str, text: str, *, is_chat: bool) -> NDArray[np.unsignedinteger]:
        """Return the bytes of `text`."""
        return self.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Return None: bytes have no chat template."""
        return None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Return None: bytes have no chat template."""
        return None

    def decode(self, ids: Iterable[int], *, raw: bool = False) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return bytes(id for id in map(int, ids) if id != self.eos_id).decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write files from which `AutoTokenizer` loads an equal tokenizer. Raises OSError."""
        fast = FastTokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        # Split special tokens, so that a text that contains the eos token is encoded as bytes.
        settings = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
        wrap: Any = PreTrainedTokenizerFast
        _save(wrap(tokenizer_object=fast, eos_token=EOS, **settings), directory)


class PretrainedTokenizer:
    """Hugging Face tokenizer, fast or slow.

    Attributes:
        vocab_size: Ids are in [0, vocab_size).
        eos_id: Ends every document.
        fingerprint: Digest of the behaviour: equal for tokenizers that give the same ids, independent of
            their files.
    """

    def __init__(self, loaded: Any, name: str) -> None:
        if loaded.eos_token_id is None:
            raise UserError(f"data.tokenizer = {name!r} has no eos token, which must end every document")
        self._loaded, self._texts = loaded, TextTokens(loaded)
        self.eos_id: int = loaded.eos_token_id
        vocabulary: dict[str, int] = loaded.get_vocab()
        self.vocab_size = max(*vocabulary.values(), self.eos_id) + 1  # ids may have gaps
        # Without tokens before a text it is that of builds that never put any there, for their checkpoints.
        probe = [*self._texts.before, *self._texts.plain(_PROBE)]
        self.fingerprint = _fingerprint(vocabulary, self.eos_id, probe)

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the ids of `text` as a prompt: after those that the tokenizer puts before a text."""
        return self._array(self._texts.prompt(text))

    def encode_document(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the ids of `text` as `encode` does, and one end-of-document id."""
        return self._array([*self._texts.prompt(text), self.eos_id])

    def encode_answer(self, prompt: str, text: str, *, is_chat: bool) -> NDArray[np.unsignedinteger]:
        """Return the ids of `text` behind those of a prompt. is_chat: the prompt is a text of `render`."""
        return self._array(self._texts.continuation(prompt, text, special=not is_chat))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.unsignedinteger] | None:
        """Return the ids of a dialogue, ready for an answer; None if there is no chat template."""
        if not self._loaded.chat_template:
            return None
        return self._array(self._texts.chat(messages, add_generation_prompt=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text whose ids `encode_chat` returns; None if there is no chat template."""
        if not self._loaded.chat_template:
            return None
        text: str = self._loaded.apply_chat_template(
            list(map(dict, messages)), add_generation_prompt=True, tokenize=False
        )
        return text

    def decode(self, ids: Iterable[int], *, raw: bool = False) -> str:
        """Return the text of `ids`, by default without special tokens and with the tokenizer's clean-up.

        The end-of-document id has no text. raw: with the text of special tokens, and all spaces, as stop
        strings are searched.
        """
        if raw:
            return self._texts.decode(ids, skip_special=False, clean_up_tokenization_spaces=False)
        return self._texts.decode(ids)

    def save(self, directory: Path) -> None:
        """Write the files of the tokenizer. Raises OSError."""
        _save(self._loaded, directory)
        again = TextTokens(AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False))
        if (again.before, again.behind) != (self._texts.before, self._texts.behind):
            kind = type(self._loaded).__name__  # a class may add its own when it is loaded
            print(
                f"aedit: {directory}: {kind} puts special tokens around texts whenever it is loaded,"
                " and this model has none there: call it with add_special_tokens=False",
                file=sys.stderr,
            )

    def _array(self, ids: Sequence[int]) -> NDArray[np.unsignedinteger]:
        return np.asarray(ids, dtype=token_dtype(self.vocab_size))


CorpusTokenizer = ByteTokenizer | PretrainedTokenizer
"""Tokenizer of corpora and checkpoints."""


def _save(tokenizer: Any, directory: Path) -> None:
    """Write the files of a transformers tokenizer.

    Raises OSError. The library `tokenizers` raises a bare Exception on a full disk.
    """
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if isinstance(error, OSError) or type(error) is not Exception:
            raise
        raise OSError(first_line(error)) from error


def _remove_special_tokens(loaded: Any, name: str) -> None:
    """Let a tokenizer put no tokens around a text, also after `save_pretrained`.

    Raises UserError if it goes on to do so.
    """
    if getattr(loaded, "is_fast", False):
        alone = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        loaded.backend_tokenizer.post_processor = alone
    found = TextTokens(loaded)
    if found.before or found.behind:
        raise UserError(
            f"data.special_tokens = 'none': the tokenizer {name!r} ({type(loaded).__name__}) puts the tokens"
            f" {[*found.before, *found.behind]} around a text by code of its own; use 'tokenizer', or"
            " another tokenizer"
        )


def _fingerprint(vocabulary: Mapping[str, int], eos_id: int, probe: list[int]) -> str:
    # From behaviour, not from files: the files of one tokenizer differ between releases of transformers.
    return sha256(repr((sorted(vocabulary.items()), eos_id, probe)).encode()).hexdigest()[:16]


def _byte_vocabulary() -> dict[str, int]:
    """Return GPT-2's printable character for each byte.

    Itself if printable, else the next one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: 0x100 + index for index, byte in enumerate(hidden)}
    return {chr(stand_in.get(byte, byte)): byte for byte in range(256)}
