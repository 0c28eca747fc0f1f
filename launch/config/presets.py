"""Shipped configurations, also in the wheel: `preset:NAME` can replace any TOML file."""

from importlib.resources import files
from pathlib import Path

from aedit.types import UserError, suggest

PREFIX = "preset:"


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    found = files("aedit.launch").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """Return the TOML of one preset. Raises UserError for an unknown name."""
    known = preset_names()
    if name not in known:
        hint = suggest(name, known) or f"; there are {', '.join(known)}"
        raise UserError(f"no preset {name!r}{hint}")
    return files("aedit.launch").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


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
