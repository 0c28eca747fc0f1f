"""Configuration values by dotted name: types, TOML text, conversion, and which ones decide the result.

The settings that `method` returns are equal on hub, standby and nodes, whatever their builds. Two builds with
the same protocol number train the same run if these settings are equal; equal code is not required. Values at
the build's default are left out, so that a build with a new setting at its default agrees with one that does
not know it. A changed default therefore needs a new `PROTOCOL`.
"""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from aedit.launch.config.checks import without_effect
from aedit.launch.config.config import RunConfig
from aedit.types import WRONG, ImportPath, UserError, choices, describe, is_import_path, shown, suggest

T = TypeVar("T")

NONE = "none"
"""Text for an empty value in a TOML file, as TOML has no null."""


@cache
def hints(cls: Any = RunConfig, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of each value by dotted name: `{"edit.every": float, ...}`.

    `model.sizes` is one value.
    """
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        inner = (
            hints(hint, f"{prefix}{name}.")
            if isinstance(hint, type) and is_dataclass(hint)
            else {f"{prefix}{name}": hint}
        )
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


def replaced(config: T, changes: Mapping[str, Any]) -> T:
    """Return the configuration with these values by table, tables such as `model.sizes` key by key.

    Its checks run once, when all values are set.
    """
    found: dict[str, Any] = {}
    for key, value in changes.items():
        before = getattr(config, key)
        found[key] = replaced(before, value) if is_dataclass(before) else value
        if isinstance(before, dict):
            found[key] = before | value
    return replace(config, **found)  # type: ignore[type-var]


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
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML wants it escaped
    return f'"{NONE}"' if value is None else str(value)


def convert(value: object, hint: Any, name: str) -> Any:
    """Return the value converted to the type `hint`.

    Raises UserError with key, expected type and value found.
    """
    converted = _convert(value, hint)
    if converted is WRONG:
        near = suggest(value.lower(), choices(hint)) if isinstance(value, str) else ""
        raise UserError(f"{name}: expected {describe(hint)}, got {shown(value)}{near}")
    return converted


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


def _convert(value: object, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        answers = (_convert(value, a) for a in args)
        return next((a for a in answers if a is not WRONG), WRONG)
    if origin is Literal:
        return value if value in args and isinstance(value, str) else WRONG
    if origin is tuple:
        return _convert_list(value, args)
    if origin is dict:
        return _convert_table(value, args[1])
    return _convert_scalar(value, hint)


def _convert_scalar(value: object, hint: type) -> Any:
    if hint is type(None):
        return None if isinstance(value, str) and value.lower() == NONE else WRONG
    if hint is ImportPath:
        return str(value) if isinstance(value, str) and is_import_path(value) else WRONG
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint else WRONG


def _convert_list(value: object, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return WRONG
    wanted = [args[0]] * len(value) if args[1:] == (...,) else list(args)
    if len(wanted) != len(value):
        return WRONG
    converted = tuple(_convert(v, w) for v, w in zip(value, wanted, strict=True))
    return WRONG if WRONG in converted else converted


def _convert_table(value: object, hint: Any) -> Any:
    if not isinstance(value, Mapping):
        return WRONG
    # Keep the type of each number: `int | float` must not convert hidden_size = 64 to 64.0.
    entries = {key: v if type(v) in get_args(hint) else WRONG for key, v in value.items()}
    return WRONG if WRONG in entries.values() else entries


_DECIDES = (
    "seed",
    "model.family",
    "model.sizes.",
    "data.seq_len",
    "data.held_out",
    "train.optimizer",
    "train.lr",
    "train.lr_by_nodes",
    "train.lr_warmup",
    "train.lr_final",
    "train.weight_decay",
    "train.betas",
    "train.grad_clip",
    "edit.schedule",
    "edit.every",
    "edit.warmup_steps",
    "edit.units",
    "edit.landing",
    "edit.fragments",
    "edit.penalty.",
    "outer.",
    "hub.merge",
    "hub.merge_cut",
    "hub.weights",
    "hub.codec",
    "hub.codec_down",
    "reward.functions",
    "reward.weights",
    "reward.options.",
    "rl.group_size",
    "rl.loss",
    "rl.advantage",
    "rl.clip_low",
    "rl.clip_high",
    "rl.importance",
    "rl.importance_cap",
    "rl.kl",
    "rl.max_staleness",
    "rl.epochs",
    "rl.batches",
    "rl.dynamic_sampling",
    "rl.overlong",
    "rl.supervised_steps",
    "rl.supervised_lr",
    "rl.sampling.",
    "drafter.kind",
    "drafter.share",
)
"""Not here: what each machine chooses for itself (batch size, dtype, paths, time-outs), the problems, whose
digest is compared, and what the hub alone applies and an operator may change between two of its starts
(quorum, grace, staleness, screen, budget)."""


def method(config: RunConfig) -> dict[str, str]:
    """Return the settings that determine the result and are not at their default, each as TOML text."""
    usual = dict(values(RunConfig()))
    found = ((name, value) for name, value in values(config) if _decides(name))
    return {name: literal(value) for name, value in found if name not in usual or usual[name] != value}


def defaults() -> dict[str, str]:
    """Return the defaults of all settings that determine the result, as TOML text."""
    return {name: literal(value) for name, value in values(RunConfig()) if _decides(name)}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first setting that differs, its value in `ours` and in `theirs`; None if all are equal."""
    usual = defaults()
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            default = usual.get(name, "its default")
            return name, ours.get(name, default), theirs.get(name, default)
    return None


def _decides(name: str) -> bool:
    return name.startswith(tuple(key for key in _DECIDES if key.endswith("."))) or name in _DECIDES
