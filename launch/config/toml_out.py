"""A configuration as TOML text that `load` reads back to the same value."""

import json
import re
from typing import Any

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import NONE, values


def to_toml(config: RunConfig) -> str:
    """Every value of the configuration, table by table."""
    tables: dict[str, list[str]] = {}
    for name, value in values(config):
        table, key = _split(name)
        tables.setdefault(table, []).append(f"{_key(key)} = {literal(value)}")
    blocks = [[f"[{table}]"] * bool(table) + lines for table, lines in tables.items()]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def literal(value: Any) -> str:
    """One value as TOML writes it; None as the text `none`, which TOML lacks a word for."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(literal(v) for v in value)}]"
    return repr(value)


def _split(name: str) -> tuple[str, str]:
    """Table and key. A size's own name may hold anything, so it is cut at the first dots, not the last."""
    if name.startswith("model.sizes."):
        return "model.sizes", name.removeprefix("model.sizes.")
    table, _, key = name.rpartition(".")
    return table, key


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else literal(key)
