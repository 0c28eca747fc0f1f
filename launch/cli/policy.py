"""A policy that can be asked: of a run, or out of a model directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from aedit.launch.cli.export import read_run
from aedit.launch.cli.places import policy_folder
from aedit.launch.cli.text_stream import Decode
from aedit.types import UserError

# Their methods carry no types.
_model: Any = AutoModelForCausalLM
_tokenizer: Any = AutoTokenizer
_logging: Any = logging


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that can be asked, with its words."""

    place: str
    model: PreTrainedModel
    encode: Callable[[str], list[int]]
    decode: Decode
    stop_tokens: tuple[int, ...]


def load_policy(place: str) -> Policy:
    """The policy of a run (a run directory, or its name in `runs`), or a directory that `save_pretrained`
    wrote. UserError if it is neither, or has no tokenizer."""
    _logging.disable_progress_bar()
    path = policy_folder(place)
    return (_of_run if (path / "run.toml").is_file() else _of_directory)(place, path)


def _of_run(place: str, path: Path) -> Policy:
    model, tokenizer, _ = read_run(path)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text)]

    return Policy(place, model, encode, tokenizer.decode, (tokenizer.eos_id,))


def _of_directory(place: str, path: Path) -> Policy:
    try:
        model = _model.from_pretrained(path, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: no usable model there ({first_line(error)})") from error
    try:
        tokenizer = _tokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: no tokenizer there ({first_line(error)})") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    return Policy(place, model, encode, decode, tuple(sorted(stops)))


def first_line(error: BaseException) -> str:
    """What an error says, without its explanations."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
