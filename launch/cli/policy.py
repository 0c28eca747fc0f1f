"""Load a policy for generation from a run or a model directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from aedit.launch.cli.export import read_run
from aedit.launch.cli.text_stream import Decode
from aedit.types import UserError

RUNS = Path("runs")

# Their methods carry no types.
_model: Any = AutoModelForCausalLM
_tokenizer: Any = AutoTokenizer
_logging: Any = logging


@dataclass(frozen=True, slots=True)
class Policy:
    """Model for generation, with its tokenizer."""

    place: str
    model: PreTrainedModel
    encode: Callable[[str], list[int]]
    decode: Decode
    stop_tokens: tuple[int, ...]


def load_policy(place: str) -> Policy:
    """Return the policy of a run (its directory, or its name in `runs`), or of a `save_pretrained` directory.

    Raises UserError if it is neither, or has no tokenizer.
    """
    _logging.disable_progress_bar()
    for path in (Path(place), RUNS / place):
        if (path / "run.toml").is_file():
            return _of_run(place, path)
        if (path / "config.json").is_file():
            return _of_directory(place, path)
    raise UserError(f"{place}: neither a run nor a model directory, here or in {RUNS}")


def _of_run(place: str, path: Path) -> Policy:
    model, tokenizer, _ = read_run(path)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text)]

    return Policy(place, model, encode, tokenizer.decode, (tokenizer.eos_id,))


def _of_directory(place: str, path: Path) -> Policy:
    try:
        model = _model.from_pretrained(path, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: no usable model found ({first_line(error)})") from error
    try:
        tokenizer = _tokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: no tokenizer found ({first_line(error)})") from error

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
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
