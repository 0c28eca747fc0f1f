"""One configuration from defaults, a TOML file and flags; every value remembers where it came from."""

import contextlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import convert, hints, suggest, values
from aedit.launch.config.flags import flag_keys, with_flags
from aedit.types import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for each dotted key `default`, `FILE:LINE` or `flag`."""

    config: RunConfig
    origin: dict[str, str]


def load(path: Path | None, flags: list[str]) -> Loaded:
    """Defaults < TOML file < flags such as `--edit.every 64`. One line of UserError for whatever is wrong."""
    text = _read(path) if path else ""
    tree = _parse(text, path)
    with _blaming(f"{path}: " if path else ""):
        config = _merge(RunConfig(), _with_hub_defaults(tree, flag_keys(flags)))
    lines = _line_numbers(text)
    origin = dict.fromkeys((key for key, _ in values(config)), "default")
    for key in _keys(tree):
        origin[key] = f"{path}:{lines[key]}" if key in lines else str(path)
    with _blaming(""):
        config = with_flags(config, flags)
    origin |= dict.fromkeys((key for key, _ in values(config) if key in flag_keys(flags)), "flag")
    return Loaded(config, origin)


def parse(text: str, where: str) -> RunConfig:
    """A configuration that came as TOML text from `where`, such as a hub. UserError as of `load`."""
    with _blaming(f"{where}: "):
        return _merge(RunConfig(), _with_hub_defaults(_parse(text, where)))


def _with_hub_defaults(tree: dict[str, Any], flags: Iterable[str] = ()) -> dict[str, Any]:
    """Return `tree` with the landing that a hub needs, if there is a hub and nothing else is asked for."""
    hub, edit = tree.get("hub", {}), tree.get("edit", {})
    has_hub = "hub.address" in flags or (isinstance(hub, dict) and hub.get("address"))
    if not has_hub or not isinstance(edit, dict) or "landing" in edit:
        return tree
    return tree | {"edit": edit | {"landing": "arrival"}}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the shipped ones are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _parse(text: str, path: Path | str | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


@contextlib.contextmanager
def _blaming(where: str) -> Iterator[None]:
    """The checks of the configuration classes raise ValueError; here it becomes the person's own error."""
    try:
        yield
    except (ValueError, UserError) as error:
        raise UserError(f"{where}{error}") from None


def _merge(config: T, tree: Mapping[str, Any], prefix: str = "") -> T:
    types = get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in types:
            raise UserError(f"unknown key {name}{suggest(name, _names(prefix))}")
        if is_dataclass(types[key]):
            if not isinstance(value, dict):
                raise UserError(f"{name}: expected a table [{name}], got {value!r}")
            changes[key] = _merge(getattr(config, key), value, f"{name}.")
        else:
            changes[key] = convert(value, types[key], name)
    return replace(config, **changes)  # type: ignore[type-var]


def _names(prefix: str) -> list[str]:
    """Every key, those beside the misspelt one first, and every table."""
    known = list(hints())
    tables = sorted({key.rpartition(".")[0] for key in known if "." in key})
    return sorted([*known, *tables], key=lambda key: not key.startswith(prefix))


def _keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in tree.items()
        for name in (_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def _line_numbers(text: str) -> dict[str, int]:
    """Line of each `key =`, by dotted name. tomllib keeps no positions; inline tables are not looked into."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\- ]+)\]", line):
            table = header[1].replace(" ", "") + "."
        elif assigned := re.match(r"\s*([\w\-]+(?:\.[\w\-]+)*)\s*=", line):
            found.setdefault(table + assigned[1], number)
    return found
