"""Configuration values by dotted name: types, TOML text, conversion, and which ones decide the result.

The settings that `method` returns are equal on hub, standby and nodes, whatever their builds. Two builds with
the same protocol number train the same run if these settings are equal; equal code is not required. Values at
the build's default are left out, so that a build with a new setting at its default agrees with one that does
not know it. A changed default therefore needs a new `PROTOCOL`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import isfinite
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

from aedit.launch.config.checks import without_effect
from aedit.launch.config.config import RunConfig
from aedit.types import WRONG, UserError, accepted, choices, describe, shown, suggest

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


def with_values(config: T, changes: Mapping[str, Any]) -> T:
    """Return the configuration with these values by table, tables such as `model.sizes` key by key.

    Its checks run once, when all values are set.
    """
    found: dict[str, Any] = {}
    for key, value in changes.items():
        before = getattr(config, key)
        found[key] = with_values(before, value) if is_dataclass(before) else value
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
    """Return the value of a TOML file converted to the type `hint`.

    Raises UserError with key, expected type and value found.
    """
    if isinstance(value, float) and not isfinite(value) and accepted(0.0, hint) is not WRONG:
        return value  # the constructor refuses it, and names the range too
    converted = accepted(_plain(value, hint), hint)
    if converted is WRONG:
        near = suggest(value.lower(), choices(hint)) if isinstance(value, str) else ""
        raise UserError(f"{name}: expected {describe(hint)}, got {shown(value)}{near}")
    return converted


def _plain(value: Any, hint: Any) -> Any:
    """Return what TOML cannot say: None for `none`, a float for a whole number; WRONG for a wrong table."""
    args = get_args(hint)
    origins = {get_origin(each) or each for each in (hint, *args)}
    if isinstance(value, str) and value.lower() == NONE and type(None) in origins:
        return None
    if tuple in origins and isinstance(value, list):
        items = next((get_args(each) for each in (hint, *args) if get_origin(each) is tuple), ())
        return [_plain(item, items[0]) for item in value]
    if dict in origins and isinstance(value, dict):
        # Each number keeps its type: `int | float` must not convert hidden_size = 64 to 64.0.
        return value if all(type(item) in get_args(args[1]) for item in value.values()) else WRONG
    is_whole = type(value) is int and int not in origins
    return float(value) if is_whole and float in origins else value


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


_DECIDES = """
seed model.family model.sizes. data.seq_len data.held_out train.optimizer train.lr train.lr_by_nodes
train.lr_warmup train.lr_final train.weight_decay train.betas train.grad_clip edit.schedule edit.every
edit.warmup_steps edit.units edit.landing edit.fragments edit.penalty. outer. hub.merge hub.merge_cut
hub.weights hub.codec hub.codec_down reward.functions reward.weights reward.options. rl.group_size
rl.loss rl.advantage rl.clip_low rl.clip_high rl.importance rl.importance_cap rl.old_logprobs rl.kl
rl.max_staleness rl.epochs rl.batches rl.dynamic_sampling rl.overlong rl.supervised_steps
rl.supervised_lr rl.sampling. drafter.form drafter.kind drafter.share drafter.vocabulary
"""
"""Keys, and tables that end in a dot.

Not here: what each machine chooses for itself (batch size, dtype, paths, time-outs), the problems, whose
digest is compared, and what the hub alone applies and an operator may change between two of its starts
(quorum, grace, staleness, screen, budget).
"""


def method(config: RunConfig) -> dict[str, str]:
    """Return the settings that determine the result and are not at their default, each as TOML text."""
    usual = dict(values(RunConfig()))
    found = ((name, value) for name, value in values(config) if _decides(name))
    return {name: literal(value) for name, value in found if name not in usual or usual[name] != value}


@cache
def defaults() -> Mapping[str, str]:
    """Return the defaults of all settings that determine the result, as TOML text."""
    return {name: literal(value) for name, value in values(RunConfig()) if _decides(name)}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first setting that differs, its value in `ours` and in `theirs`; None if all are equal."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            default = defaults().get(name, "its default")
            return name, ours.get(name, default), theirs.get(name, default)
    return None


_DECIDING = frozenset(_DECIDES.split())
_DECIDING_TABLES = tuple(key for key in _DECIDING if key.endswith("."))


def _decides(name: str) -> bool:
    return name in _DECIDING or name.startswith(_DECIDING_TABLES)
