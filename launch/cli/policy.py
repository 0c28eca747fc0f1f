"""Load a policy with its tokenizer from a run or from a model directory."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from aedit.launch.cli.arguments import policy_folder
from aedit.launch.cli.export import load_run_model
from aedit.launch.node import check_shapes, stop_tokens
from aedit.spec_rollout.sampling import TextTokens
from aedit.system import check_folder
from aedit.types import UserError, first_line

# Their methods carry no types.
_model: Any = AutoModelForCausalLM
_tokenizer: Any = AutoTokenizer
_logging: Any = logging

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with its tokenizer."""

    source: str
    model: PreTrainedModel
    encode: Callable[[str], list[int]]
    decode: Decode
    stop_tokens: tuple[int, ...]
    tokenizer: Any = None
    """That of `transformers`, of a model directory."""


def load_policy(source: str) -> Policy:
    """Return the policy of a run or of a model directory.

    Args:
        source: Run directory, name of a run in `runs`, or a directory that `save_pretrained` wrote.

    Raises:
        UserError: It is none of these, or has no tokenizer.
    """
    _logging.disable_progress_bar()
    path = policy_folder(source)
    if not (path / "run.toml").is_file():
        return read_directory(source, path)
    model, tokenizer, _ = load_run_model(path)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text)]

    return Policy(source, model, encode, tokenizer.decode, stop_tokens(model, tokenizer.eos_id))


def read_directory(source: str, path: Path) -> Policy:
    """Return the model of a directory that `save_pretrained` wrote; `source` is its name in messages.

    Raises:
        UserError: It has no usable model, or no tokenizer.
    """
    _logging.disable_progress_bar()
    model = read_model(source, path)
    try:
        tokenizer = _tokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the readers of tokenizer files raise plain Exception, too
        raise UserError(f"{source}: no tokenizer there ({first_line(error)})") from error
    texts = TextTokens(tokenizer)
    stops = stop_tokens(model, tokenizer.eos_token_id)
    return Policy(source, model, texts.prompt, texts.decode, stops, tokenizer)


def read_model(source: str, path: Path) -> Any:
    """Return the model of a directory.

    Raises:
        UserError: Configuration or weights cannot be read, are incomplete, or do not fit each other.
    """
    try:
        check_folder(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: {error}") from None
    level = _logging.get_verbosity()
    _logging.set_verbosity_error()  # the report of the loader would come before the line of this command
    try:
        check_shapes(path)
        model, found = _model.from_pretrained(
            path,
            dtype="auto",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # files are read by several libraries, each with exceptions of its own
        raise UserError(f"{source}: no usable model there ({first_line(error)})") from error
    finally:
        _logging.set_verbosity(level)
    wrong = [f"no weights for {name}" for name in sorted(found["missing_keys"])]
    wrong += [f"{name} with shape {tuple(file)}, expected {tuple(own)}"
              for name, file, own in sorted(found["mismatched_keys"])]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{source}: no usable model there (its files have {wrong[0]}{more})")
    if unused := sorted(found["unexpected_keys"]):
        print(
            f"aedit: {source}: {len(unused)} tensors there are not used, such as {unused[0]}", file=sys.stderr
        )
    return model
