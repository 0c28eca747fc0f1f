"""Dotted flags: split them from a command line, and apply them to a configuration."""

import contextlib
import io
import re
import tomllib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import convert, hints, with_values
from aedit.types import ImportPath, UserError, is_import_path, suggest


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the command itself, and the configuration flags with their values."""
    rest: list[str] = []
    flags: list[str] = []
    while arguments:
        width = _width(arguments)
        (flags if width else rest).extend(arguments[: max(width, 1)])
        arguments = arguments[max(width, 1) :]
    return rest, flags


def flags_help() -> str:
    """Return the section of `--help` on configuration flags."""
    import tyro  # it takes half a second, and only writes the help
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    def import_path(hint: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
        """Return how tyro shows an ImportPath, which it takes for a class without a constructor."""
        if hint.type is not ImportPath:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="MODULE:NAME",
            instance_from_str=lambda arguments: arguments[0],
            is_instance=lambda value: isinstance(value, str) and is_import_path(value),
            str_from_instance=lambda path: [path],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(import_path)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(RunConfig, args=["--help"], prog="aedit run", use_underscores=True, registry=registry)
    return "\n".join(line for line in shown.getvalue().splitlines() if not line.startswith("usage:"))


def with_flags(config: RunConfig, flags: list[str]) -> RunConfig:
    """Return the configuration with the values of these flags. Raises UserError if a flag is wrong."""
    try:
        return with_values(config, flag_tree(flags))
    except ValueError as error:
        raise UserError(str(error)) from None


def flag_tree(flags: list[str]) -> dict[str, Any]:
    """Return the values of these flags by table. Raises UserError if a flag cannot be read.

    A value is TOML, as `aedit config show` prints it, or plain text: `--log '["wandb"]'`, `--log wandb`.
    """
    known = hints()
    tree: dict[str, Any] = {}
    for key, arguments in _parted(flags):
        table, _, entry = key.rpartition(".")
        if name := _negated(key):
            key, value = name, not _read(arguments or ["true"], bool, f"--{key}")
        elif key in known:
            value = _read(arguments or ["true"] * (known[key] is bool), known[key], f"--{key}")
        elif _is(dict, known.get(table)):
            if not any(arguments):
                raise UserError(f"--{key}: needs a value")
            key, value = table, convert({entry: _scalar(" ".join(arguments))}, known[table], f"--{key}")
        else:
            raise _unknown(key)
        *tables, leaf = key.split(".")
        inner = tree
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[leaf] = inner.get(leaf, {}) | value if _is(dict, known[key]) else value
    return tree


def flag_keys(flags: list[str]) -> set[str]:
    """Return the dotted names of the values and tables that these flags set."""
    return {_negated(key) or key for key, _ in _parted(flags)}


def _parted(flags: list[str]) -> list[tuple[str, list[str]]]:
    """Return key and arguments of the value of each flag, in order."""
    found: list[tuple[str, list[str]]] = []
    for argument in flags:
        if argument.startswith("--"):
            found.append((_key(argument), argument.split("=", 1)[1:]))
        else:
            found[-1][1].append(argument)
    return found


def _read(arguments: list[str], hint: Any, flag: str) -> Any:
    """Return the value of a flag, of the first reading of its arguments that the type has.

    Raises UserError with flag, type and arguments.
    """
    errors = []
    for value in _readings(arguments, hint):
        try:
            return convert(value, hint, flag)
        except UserError as error:
            errors.append(error)
    raise errors[0] if arguments else UserError(f"{flag}: needs a value")


def _readings(arguments: list[str], hint: Any) -> Iterator[Any]:
    """Yield what the arguments of a value can mean: TOML, a list or a table, a number, text."""
    text = " ".join(arguments)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if (found := tomllib.loads(f"value = {text}")).keys() == {"value"}:
            yield found["value"]
    if _is(dict, hint):
        pairs = zip(arguments[::2], arguments[1::2], strict=False)
        yield {key: _scalar(value) for key, value in pairs} if arguments and len(arguments) % 2 == 0 else text
        return
    if arguments:
        yield _scalar(text)
        yield text
    if _is(tuple, hint):
        yield list(map(_scalar, arguments))
        yield arguments


def _scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"] if text[:1] in ('"', "'") else text
    return text


def _is(container: type, hint: Any) -> bool:
    """Return whether a type is, or can be, a list (`tuple`) or a table (`dict`)."""
    return container in {get_origin(hint), *map(get_origin, get_args(hint))}


def _key(flag: str) -> str:
    """Return the key of a flag: `--edit.penalty.step-weight=1` -> `edit.penalty.step_weight`."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _negated(key: str) -> str:
    """Return the key that `--no-KEY` or `--TABLE.no-KEY` sets to false; "" for other keys."""
    name = re.sub(r"(^|\.)no_(\w+)$", r"\1\2", key)
    return name if key not in hints() and hints().get(name) is bool else ""


def _unknown(key: str) -> UserError:
    hint = suggest(key, hints()).replace("mean ", "mean --") or "; see aedit run --help"
    return UserError(f"unknown flag --{key}{hint}")


def _width(arguments: list[str]) -> int:
    """Return the number of arguments that the configuration flag at the start takes; 0 if it is none."""
    first, key = arguments[0], _key(arguments[0])
    if not first.startswith("--") or first == "--":
        return 0
    hint, is_switch = hints().get(key), hints().get(key) is bool or bool(_negated(key))
    if hint is None and not is_switch and not _is(dict, hints().get(key.rpartition(".")[0])):
        if "." in key:
            raise _unknown(key)
        return 0
    if "=" in first:
        return 1
    following = next((i for i, w in enumerate(arguments[1:]) if w.startswith("--")), len(arguments) - 1)
    if is_switch:
        return 1 + (following > 0 and arguments[1].lower() in ("true", "false"))
    return 1 + (following if _is(tuple, hint) or _is(dict, hint) else min(1, following))
