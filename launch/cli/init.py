"""`aedit init NAME`: write a configuration file from a preset."""

import re
from pathlib import Path

from aedit.launch.config import PREFIX, preset_names, preset_text
from aedit.types import UserError, name_fault

USUAL = "tiny"
"""The preset of a file whose name is none of a preset's."""

FOOTER = """
# Every other key has a default: `aedit config show {path}` prints them, `aedit run --help` explains them.
"""


def init(name: str, preset: str = "") -> Path:
    """Write NAME.toml for a run of that name, and return its path.

    Args:
        name: Of the run, with or without `.toml`; it may include a directory.
        preset: Source of the values; by default the preset of that name, or `tiny`.

    Raises:
        UserError: The file exists, there is no such preset, or the name is not valid for a run.
    """
    path = Path(name if name.endswith(".toml") else f"{name}.toml")
    if fault := name_fault(path.stem):
        raise UserError(f"NAME: {fault}")
    source = preset or (path.stem if path.stem in preset_names() else USUAL)
    text = re.sub(r'^name = ".*"', f'name = "{path.stem}"', preset_text(source), count=1, flags=re.M)

    def shipped(found: "re.Match[str]") -> str:
        return str(path) if found[1] == source else f"{PREFIX}{found[1]}"

    text = re.sub(r"configs/([\w-]+)\.toml", shipped, text) + FOOTER.format(path=path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists already: choose another NAME, or remove it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return path
