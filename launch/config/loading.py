"""Load a configuration from defaults, TOML files, presets and flags, with the origin of each value."""

import contextlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from aedit.launch.config.checks import check_effects, check_imports
from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import convert, hints, values, with_values
from aedit.launch.config.flags import flag_keys, flag_tree
from aedit.types import UserError, suggest

_WITHOUT_SPECIAL_TOKENS = {"data": {"special_tokens": "none"}}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for each dotted key its origin: `default`, `FILE:LINE` or `flag`."""

    config: RunConfig
    origin: dict[str, str]


def load(files: Path | Sequence[Path] | None, flags: list[str], *, strict: bool = False) -> Loaded:
    """Return the configuration: defaults < TOML files < flags such as `--edit.every 64`.

    Raises UserError, one line, for any error in them.

    Args:
        files: TOML files; a later file overrides an earlier one key by key. `preset:NAME` is a shipped one.
        flags: Dotted flags.
        strict: Raise also for a key that has no effect; for files that a user has written, not for the output
            of `to_toml`.
    """
    paths = [files] if isinstance(files, Path) else list(files or ())
    tree: dict[str, Any] = {}
    lines: dict[str, str] = {}
    layers: dict[str, int] = {}
    for layer_number, path in enumerate(paths, start=1):
        text = read_config(path)
        with _blaming(f"{path}: "):
            layer = tomllib.loads(text)
            tree = _over(tree, _converted(RunConfig, layer))
        numbers = _line_numbers(text)
        lines |= {key: f"{path}:{numbers[key]}" if key in numbers else str(path) for key in _keys(layer)}
        layers |= dict.fromkeys(_keys(layer), layer_number)
    flagged_tree = flag_tree(flags)
    with _blaming(f"{', '.join(map(str, paths))}: " if paths else ""):
        config = with_values(RunConfig(), _with_hub_defaults(tree, _over(tree, flagged_tree)))
    origin = dict.fromkeys((key for key, _ in values(config)), "default") | lines
    with _blaming(""):
        config = with_values(config, flagged_tree)
    named = flag_keys(flags)  # of a table such as `prompts.options` too, which is one flag
    flagged = [key for key, _ in values(config) if {key, key.rpartition(".")[0]} & named]
    origin |= dict.fromkeys(flagged, "flag")
    if strict:
        check_imports(config)
        check_effects(config, layers | dict.fromkeys(flagged, len(paths) + 1), origin)
    return Loaded(config, origin)


def load_run(path: Path) -> RunConfig:
    """Return the configuration that a run has written to `path`. Raises UserError as `load` does.

    Builds without the key `data.special_tokens` put none around texts.
    """
    loaded = load(path, [])
    is_older = loaded.origin["data.special_tokens"] == "default" and loaded.config.data.tokenizer != "byte"
    return with_values(loaded.config, _WITHOUT_SPECIAL_TOKENS) if is_older else loaded.config


def continued(config: RunConfig, run_toml: Path) -> RunConfig:
    """Return `config` as the run of `run_toml` goes on with it: a run without special tokens stays without.

    Says so on stderr where that changes it. Raises UserError as `load` does.
    """
    if load_run(run_toml).data.special_tokens != "none" or config.data.special_tokens == "none":
        return config
    print(
        f'aedit: {run_toml.parent}: goes on with data.special_tokens = "none", as it began',
        file=sys.stderr,
        flush=True,
    )
    return with_values(config, _WITHOUT_SPECIAL_TOKENS)


def parse_config(text: str, where: str) -> RunConfig:
    """Return the configuration in TOML text from `where`, such as a hub. Raises UserError as `load` does."""
    with _blaming(f"{where}: "):
        tree = _converted(RunConfig, tomllib.loads(text))
        return with_values(RunConfig(), _with_hub_defaults(tree, tree))


def _with_hub_defaults(tree: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` with the landing that a hub needs, if `whole` has a hub and `tree` sets no landing."""
    edit = tree.get("edit", {})
    has_hub = whole.get("hub", {}).get("address") or whole.get("swarm", {}).get("discovery")
    return tree | {"edit": {"landing": "arrival"} | edit} if has_hub else tree


@contextlib.contextmanager
def _blaming(where: str) -> Iterator[None]:
    """Raise the ValueError of a configuration check as UserError that begins with `where`."""
    try:
        yield
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}not valid TOML: {error}") from None
    except (ValueError, UserError) as error:
        raise UserError(f"{where}{error}") from None


def _converted(cls: Any, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a file converted to the types of the class.

    Raises UserError that names the key.
    """
    types = get_type_hints(cls)
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in types:
            known = [*hints(), *sorted({each.rpartition(".")[0] for each in hints() if "." in each})]
            # Those next to the misspelt one first.
            known.sort(key=lambda each: not each.startswith(prefix))
            raise UserError(f"unknown key {name}{suggest(name, known)}")
        if is_dataclass(types[key]):
            if not isinstance(value, dict):
                raise UserError(f"{name}: expected a table [{name}], got {value!r}")
            found[key] = _converted(types[key], value, f"{name}.")
        else:
            found[key] = convert(value, types[key], name)
    return found


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` updated with the values of `above`, table by table."""
    merged = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both_tables else value
    return merged


def _keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in tree.items()
        for name in (_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def _line_numbers(text: str) -> dict[str, int]:
    """Return the line of each `key =` by dotted name.

    tomllib keeps no positions; inline tables are not searched.
    """
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\- ]+)\]", line):
            table = header[1].replace(" ", "") + "."
        elif assigned := re.match(r"\s*([\w\-]+(?:\.[\w\-]+)*)\s*=", line):
            found.setdefault(table + assigned[1], number)
    return found


PREFIX = "preset:"
"""Of shipped configurations, also in the wheel: `preset:NAME` can replace any TOML file."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    found = resources.files("aedit.launch").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """Return the TOML of one preset. Raises UserError for an unknown name."""
    known = preset_names()
    if name not in known:
        hint = suggest(name, known) or f"; there are {', '.join(known)}"
        raise UserError(f"no preset {name!r}{hint}")
    return resources.files("aedit.launch").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def read_config(path: Path) -> str:
    """Return the text of a TOML file, or of a preset if `path` is `preset:NAME`. Raises UserError."""
    if str(path).startswith(PREFIX):
        return preset_text(str(path).removeprefix(PREFIX))
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_instead(path)}") from None
    except IsADirectoryError:
        inside = f"{path / 'run.toml'}" if (path / "run.toml").is_file() else "a TOML file or preset:NAME"
        raise UserError(f"{path} is a directory; name {inside} instead") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _instead(path: Path) -> str:
    if path.stem in preset_names():
        return f"did you mean {PREFIX}{path.stem}, which is shipped?"
    if hint := suggest(str(path), [str(other) for other in path.parent.glob("*.toml")]):
        return hint.removeprefix("; ")
    return f"shipped ones are {PREFIX}{f', {PREFIX}'.join(preset_names())}"
