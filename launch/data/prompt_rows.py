"""Rows of the source of problems: JSON lines, Hugging Face, reasoning-gym, functions. Imports no torch."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aedit.launch.config import PromptConfig
from aedit.launch.data.gym import gym_rows
from aedit.launch.data.readers import load_dataset, matching_files
from aedit.types import UserError, imported, is_import_path

KEY = "prompts.source"


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `name` names its place in messages."""

    name: str
    columns: Mapping[str, Any]


def rows(config: PromptConfig, seed: int) -> Iterator[Row]:
    """Yield the rows of `config.source` in an order that is equal on all machines.

    seed: of generators; files and datasets do not depend on it. Raises UserError for a source that is
    missing, unreadable or of an unknown kind.
    """
    source = config.source
    if source.startswith("hf:"):
        return _plain(source, load_dataset(source.removeprefix("hf:"), config.split, f"{KEY} = {source!r}"))
    if source.startswith("gym:"):
        _needs("reasoning_gym", "gym")
        return _plain(source, gym_rows(config, seed))
    if is_import_path(source):
        return _plain(source, _generated(config, seed))
    return _json_lines(source)


def check_source(source: str) -> None:
    """Raise UserError if `source` names files that are missing or not of JSON lines. Reads none of them."""
    if not source.startswith(("hf:", "gym:")) and not is_import_path(source):
        _json_files(source)


def _generated(config: PromptConfig, seed: int) -> Iterable[object]:
    try:
        function = imported(config.source, KEY)
    except ValueError as error:
        raise UserError(f"{error}; install the module here, or add its folder to PYTHONPATH") from None
    try:
        found: Iterable[object] = function(size=config.size, seed=seed, options=dict(config.options))
        return list(found)
    except UserError:
        raise
    except Exception as error:  # a function of the user may raise anything
        raise UserError(f"{KEY} = {config.source!r}: {type(error).__name__}: {error}") from error


def _json_lines(source: str) -> Iterator[Row]:
    for path in _json_files(source):
        yield from _json_file(path)


def _json_files(source: str) -> list[Path]:
    paths = matching_files(source, KEY)
    for path in paths:
        if path.suffix.lower() not in (".jsonl", ".json"):
            raise UserError(
                f"{KEY}: {path} has the suffix {path.suffix!r}, expected .jsonl: one JSON object a line"
            )
    return paths


def _json_file(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(f"{path}:{number}", _decoded(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"{KEY}: cannot read {path}: {error.strerror}") from error


def _decoded(line: bytes, name: str) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{KEY}: {name} is not JSON ({error}); expected one JSON object a line") from error


def _plain(source: str, values: Iterable[object]) -> Iterator[Row]:
    for number, value in enumerate(values):
        name = f"row {number} of {source}"
        row = _row(name, value)
        try:
            # Rewards run in other processes, and the columns travel there as JSON.
            yield Row(name, json.loads(json.dumps(row.columns, default=_as_json)))
        except TypeError as error:
            raise UserError(f"{KEY}: {name} {error}; leave that column out") from None


def _as_json(value: Any) -> Any:
    for method in ("tolist", "isoformat"):  # NumPy and PyTorch; dates
        if callable(found := getattr(value, method, None)):
            return found()
    raise TypeError(
        f"has a value of type {type(value).__name__}, expected text, numbers, lists or dictionaries"
    )


def _row(name: str, value: object) -> Row:
    if not isinstance(value, Mapping):
        raise UserError(f"{KEY}: {name} is {type(value).__name__}, expected an object with columns")
    return Row(name, value)


def _needs(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{KEY} needs the package {module!r}: pip install 'aedit[{extra}]' ({error})"
        ) from error
