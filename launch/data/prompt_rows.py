"""Rows of the source of problems: JSON lines, Hugging Face, reasoning-gym, functions. Imports no torch."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aedit.launch.config import PromptConfig
from aedit.launch.data.readers import json_lines, load_dataset, matching_files
from aedit.spec_rollout.rl import ProblemOrigin, num_levels, source_of
from aedit.types import UserError, first_line, imported, is_import_path

KEY = "prompts.source"


Row = tuple[str, Mapping[str, Any]]
"""The place of a row, for messages, and its columns."""


def source_rows(config: PromptConfig, seed: int) -> Iterator[Row]:
    """Yield the rows of `config.source` in an order that is equal on all machines.

    seed: of generators; files and datasets do not depend on it. Raises UserError for a source that is
    missing, unreadable or of an unknown kind.
    """
    source = config.source
    if source.startswith("hf:"):
        return _plain(source, load_dataset(source.removeprefix("hf:"), config.split, f"{KEY} = {source!r}"))
    if source.startswith("gym:"):
        try:
            importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise UserError(
                f"{KEY} needs the package 'reasoning_gym': pip install 'aedit[gym]' ({error})"
            ) from error
        return _plain(source, gym_rows(config, seed))
    if is_import_path(source):
        return _plain(source, _generated(config, seed))
    expected = "; expected one JSON object a line"
    rows = (row for path in _json_files(source) for row in json_lines(path, KEY, expected))
    return ((name, _columns(name, value)) for name, value in rows)


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


def _json_files(source: str) -> list[Path]:
    paths = matching_files(source, KEY)
    for path in paths:
        if path.suffix.lower() not in (".jsonl", ".json"):
            raise UserError(
                f"{KEY}: {path} has the suffix {path.suffix!r}, expected .jsonl: one JSON object a line"
            )
    return paths


def _plain(source: str, values: Iterable[object]) -> Iterator[Row]:
    for number, value in enumerate(values):
        name = f"row {number} of {source}"
        columns = _columns(name, value)
        try:
            # Rewards run in other processes, and the columns travel there as JSON.
            yield name, json.loads(json.dumps(columns, default=_as_json))
        except TypeError as error:
            raise UserError(f"{KEY}: {name} {error}; leave that column out") from None


def _as_json(value: Any) -> Any:
    for method in ("tolist", "isoformat"):  # NumPy and PyTorch; dates
        if callable(found := getattr(value, method, None)):
            return found()
    raise TypeError(
        f"has a value of type {type(value).__name__}, expected text, numbers, lists or dictionaries"
    )


def _columns(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{KEY}: {name} is {type(value).__name__}, expected an object with columns")
    return value


def generator_weights(source: str) -> list[tuple[str, float]]:
    """Return the generators of `gym:A*2+B`, and their weights 2 and 1. Raises UserError for others."""
    found = []
    for part in source.removeprefix("gym:").split("+"):
        name, star, weight = part.strip().partition("*")
        try:
            found.append((name.strip(), float(weight) if star else 1.0))
        except ValueError:
            raise UserError(
                f"prompts.source: {part!r} has no number as weight, expected NAME or NAME*2"
            ) from None
    names = [name for name, _ in found]
    fits = all(0 < weight < float("inf") for _, weight in found)
    if "" in names or len(set(names)) < len(names) or not fits:
        raise UserError(
            f"prompts.source = {source!r}: expected gym:NAME, or gym:A*2+B with different names, weights > 0"
        )
    return found


def gym_rows(config: PromptConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `config.size` problems, of each generator as many as its weight says, in turn.

    With `config.curriculum` each generator's levels take turns as well; the column `level` counts from 1.
    """
    parts = generator_weights(config.source)
    counts = [0] * len(parts)
    levels = [num_levels(name) if config.curriculum else 0 for name, _ in parts]
    if config.curriculum and (flat := [name for (name, _), n in zip(parts, levels, strict=True) if n < 2]):
        raise UserError(
            f"prompts.curriculum = true: the generator {flat[0]!r} of reasoning-gym has no levels;"
            " leave it out"
        )
    for _ in range(config.size):
        # The generator that is furthest behind its share, the first of several: an even mixture.
        turn = min(range(len(parts)), key=lambda i: ((counts[i] + 1) / parts[i][1], i))
        origin = ProblemOrigin(parts[turn][0], seed, config.size, counts[turn], -1, dict(config.options))
        if levels[turn]:
            index, level = divmod(counts[turn], levels[turn])
            origin = replace(origin, index=index, level=level)
        yield _gym_row(origin, config)
        counts[turn] += 1


def _gym_row(origin: ProblemOrigin, config: PromptConfig) -> dict[str, Any]:
    try:
        entry = source_of(origin)[origin.index]
    except Exception as error:  # each generator checks its options in its own way
        where = f", level {origin.level + 1}" if origin.level >= 0 else ""
        raise UserError(
            f"prompts.source: generator {origin.name!r} of reasoning-gym{where}: {first_line(error)}"
        ) from error
    row = {config.prompt_key: entry["question"], config.answer_key: entry["answer"], "gym": asdict(origin)}
    return row | ({"level": origin.level + 1} if origin.level >= 0 else {})
