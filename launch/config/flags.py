"""Dotted flags: split them from a command line, and apply them to a configuration."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import NONE, hints
from aedit.types import ImportPath, UserError, is_import_path, suggest

T = TypeVar("T")

SIZES = "model.sizes."


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of the command itself, and the configuration flags with their values."""
    rest: list[str] = []
    flags: list[str] = []
    i = 0
    while i < len(words):
        width = _width(words[i:])
        (flags if width else rest).extend(words[i : i + max(width, 1)])
        i += max(width, 1)
    return rest, flags


def flags_help() -> str:
    """Return the section of `--help` on configuration flags."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        _parsed(["--help"], RunConfig(), prog="aedit run")
    return "\n".join(line for line in shown.getvalue().splitlines() if not line.startswith("usage:"))


def with_flags(config: RunConfig, flags: list[str]) -> RunConfig:
    """Return the configuration with the values of these flags. Raises UserError if a flag cannot be read."""
    sizes, others = _take_sizes(flags)
    model = replace(config.model, sizes={**config.model.sizes, **sizes})
    config = replace(config, model=model)
    if not others:
        return config
    # Without the sizes, which are read already: tyro would make each of them a flag.
    bare = replace(config, model=replace(model, sizes={}))
    words = _spell_bools(_spell_none(others))
    parsed = _quietly(lambda: _parsed(words, bare, prog="aedit"))
    return replace(parsed, model=replace(parsed.model, sizes=model.sizes))


def flag_keys(flags: list[str]) -> set[str]:
    """Return the dotted names of the values and tables that these flags set."""
    named = {_key(word) for word in flags if word.startswith("--")}
    return named | {re.sub(r"(^|\.)no_(\w+)$", r"\1\2", key) for key in named}


def _parsed(words: list[str], default: RunConfig, prog: str) -> RunConfig:
    registry = ConstructorRegistry()
    registry.primitive_rule(_import_path)
    return tyro.cli(
        RunConfig, args=words, default=default, prog=prog, use_underscores=True, registry=registry
    )


def _import_path(hint: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """Return how tyro reads an ImportPath. Without it, tyro takes the class for one without a constructor."""
    if hint.type is not ImportPath:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="MODULE:NAME",
        instance_from_str=_to_import_path,
        is_instance=lambda value: isinstance(value, str) and is_import_path(value),
        str_from_instance=lambda path: [path],
    )


def _to_import_path(words: list[str]) -> str:
    if not is_import_path(words[0]):
        raise ValueError(f"expected package.module:Name, got {words[0]!r}")
    return words[0]


def _take_sizes(flags: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of `--model.sizes.KEY VALUE`, whose keys depend on the family, and other flags."""
    sizes: dict[str, Any] = {}
    others: list[str] = []
    words = iter(flags)
    for word in words:
        name, _, value = word.partition("=")
        if not _key(name).startswith(SIZES):
            others.append(word)
            continue
        value = value or next(words, "")
        if not value:
            raise UserError(f"{name}: needs a value")
        sizes[_key(name).removeprefix(SIZES)] = _scalar(value)
    return sizes, others


def _spell_none(flags: list[str]) -> list[str]:
    """Return the flags with the text `none` of TOML files replaced by `None` of tyro."""
    known = hints()
    empty = {key for key, hint in known.items() if type(None) in get_args(hint)}
    words = [re.sub(f"={NONE}$", "=None", word) if _key(word) in empty else word for word in flags]
    pairs = zip(["", *words], words, strict=False)
    return ["None" if word == NONE and _key(before) in empty else word for before, word in pairs]


def _spell_bools(flags: list[str]) -> list[str]:
    """Return the flags with `true` and `false` in tables as tyro spells them; it reads others as text."""
    tables = {key for key, hint in hints().items() if get_origin(hint) is dict}
    words, key = [], ""
    for word in flags:
        key = _key(word) if word.startswith("--") else key
        is_bool = key in tables and word.lower() in ("true", "false")
        words.append(word.title() if is_bool else word)
    return words


def _scalar(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _quietly(parse: Callable[[], T]) -> T:
    """Return the result of `parse`.

    Raise UserError with the first sentence of tyro's error box instead of exiting.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse()
    except SystemExit:
        raise UserError(_first_sentence(said.getvalue())) from None


def _first_sentence(box: str) -> str:
    """Return the first sentence of tyro's error box: title, rule, message, then a rule or an empty line."""
    lines = [line.strip() for line in box.strip().splitlines()]
    ends = [i for i, line in enumerate(lines) if not line.strip("-")]
    sentence = " ".join(lines[ends[0] + 1 : ends[1]]) if len(ends) > 1 else " ".join(lines)
    sentence = re.sub(r"^Error parsing (\w+(\.\w+)*: )?", "", sentence).rstrip(".")
    sentence = re.sub(
        r"no type matching (.*?) could be instantiated from \['(.*)'\]", r"expected \1, got '\2'", sentence
    )
    sentence = sentence.replace("could not convert string to float: ", "expected a number, got ")
    return sentence.replace("invalid literal for int() with base 10: ", "expected a whole number, got ")


def _key(flag: str) -> str:
    """Return the key of a flag: `--edit.penalty.step-weight=1` -> `edit.penalty.step_weight`."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _width(words: list[str]) -> int:
    """Return the number of words that the configuration flag at the start takes; 0 if it is none."""
    word = words[0]
    if not word.startswith("--") or word == "--":
        return 0
    known = hints()
    key = _key(word)
    negated = re.sub(r"(^|\.)no_(\w+)$", r"\1\2", key)
    if known.get(key) is bool or known.get(negated) is bool:
        return 1
    if key not in known and not key.startswith(SIZES):
        if "." in key:
            hint = suggest(key, known).replace("mean ", "mean --") or "; see aedit run --help"
            raise UserError(f"unknown flag --{key}{hint}")
        return 0
    if "=" in word:
        return 1
    following = next((i for i, w in enumerate(words[1:]) if w.startswith("--")), len(words) - 1)
    return 1 + (following if _takes_many(known.get(key)) else min(1, following))


def _takes_many(hint: Any) -> bool:
    return bool({tuple, dict} & {get_origin(hint), *map(get_origin, get_args(hint))})
