"""Configuration values by dotted name: their types, TOML text and conversion."""

import difflib
import json
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from aedit.launch.config.config import RunConfig
from aedit.launch.config.effects import without_effect
from aedit.types import ImportPath, UserError, is_import_path

NONE = "none"
"""Text for an empty value in a TOML file, as TOML has no null."""


def hints(cls: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return the type of each value by dotted name: `{"edit.every": float, ...}`.

    `model.sizes` is one value.
    """
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        inner = hints(hint, f"{prefix}{name}.") if is_dataclass(hint) else {f"{prefix}{name}": hint}
        found.update(inner)
    return found


def values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each field, `model.sizes.*` included, in declared order."""
    for field in fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from values(value, f"{name}.")
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", entry) for key, entry in value.items())
        else:
            yield name, value


def to_toml(config: RunConfig, *, defaults: bool = True) -> str:
    """Return the configuration as TOML text that `load` reads back to an equal value.

    Keys that are at their default and have no effect are left out, so that the text passes the strict checks
    of `load`. defaults: include values that are at their default. Without them, a build that does not know a
    setting can read the text while that setting is at its default.
    """
    tree = _tree(config, None if defaults else RunConfig())
    usual = dict(values(RunConfig()))
    for name, value in values(config):
        if usual.get(name) == value and any(without_effect(config, name)):
            _drop(tree, name.split("."))
    return tomli_w.dumps(tree)


def literal(value: object) -> str:
    """Return one value as TOML on one line; None as the text `none`."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return f'"{NONE}"' if value is None else str(value)


def convert(value: object, hint: Any, name: str) -> Any:
    """Return the value converted to the type `hint`.

    Raises UserError with key, expected type and value found.
    """
    converted = _convert(value, hint)
    if converted is _WRONG:
        raise UserError(f"{name}: expected {describe(hint)}, got {_shown(value)}")
    return converted


def suggest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean X?`, or "" if no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    same_leaf = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    best = (close or same_leaf)[:1]
    return f"; did you mean {best[0]}?" if best else ""


def describe(hint: Any) -> str:
    """Return a type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is tuple:
        return f"a list of {describe(args[0])}" if args[1:] == (...,) else f"a list of {len(args)} values"
    if origin is dict:
        return "a table"
    return _WORDS[hint]


def _tree(config: Any, usual: Any) -> dict[str, Any]:
    """Return the values of `config` that differ from `usual` as nested tables; all values if that is None."""
    tree: dict[str, Any] = {}
    for field in fields(config):
        value, other = getattr(config, field.name), getattr(usual, field.name, None)
        if is_dataclass(value):
            if table := _tree(value, other):
                tree[field.name] = table
        elif usual is None or value != other:
            tree[field.name] = NONE if value is None else value
    return tree


def _drop(tree: dict[str, Any], path: list[str]) -> None:
    """Remove a key from nested tables, and the tables that become empty."""
    first, *rest = path
    if rest and first in tree:
        _drop(tree[first], rest)
    if not rest or not tree.get(first, True):
        tree.pop(first, None)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    ImportPath: "package.module:Name",
    type(None): f'"{NONE}"',
}
_WRONG = object()


def _convert(value: object, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        answers = (_convert(value, a) for a in args)
        return next((a for a in answers if a is not _WRONG), _WRONG)
    if origin is Literal:
        return value if value in args and isinstance(value, str) else _WRONG
    if origin is tuple:
        return _convert_list(value, args)
    if origin is dict:
        return _convert_table(value, args[1])
    return _convert_scalar(value, hint)


def _convert_scalar(value: object, hint: type) -> Any:
    if hint is type(None):
        return None if isinstance(value, str) and value.lower() == NONE else _WRONG
    if hint is ImportPath:
        return str(value) if isinstance(value, str) and is_import_path(value) else _WRONG
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint else _WRONG


def _convert_list(value: object, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return _WRONG
    wanted = [args[0]] * len(value) if args[1:] == (...,) else list(args)
    if len(wanted) != len(value):
        return _WRONG
    converted = tuple(_convert(v, w) for v, w in zip(value, wanted, strict=True))
    return _WRONG if _WRONG in converted else converted


def _convert_table(value: object, hint: Any) -> Any:
    if not isinstance(value, Mapping):
        return _WRONG
    # Keep the type of each number: `int | float` must not convert hidden_size = 64 to 64.0.
    entries = {key: v if type(v) in get_args(hint) else _WRONG for key, v in value.items()}
    return _WRONG if _WRONG in entries.values() else entries


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
