"""Tests that every library module is reached from the command line, public API or a documented example."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "aedit"
PARTS = ("edit", "async_sgd", "proto", "spec_rollout", "launch")

ENTRIES = ("aedit", "aedit.__main__", "aedit.launch.cli.__main__", *(f"aedit.{part}" for part in PARTS))
PLUG_IN = ("aedit.spec_rollout.vllm.weights",)
"""What vLLM imports by a name that the plug-in registers."""

# Migration between ranks: tested and measured, and not part of any run yet.
ROLLOUT_ONLY = ("spec_rollout.remote.rank_transfer",)


def modules():
    """Return dotted name and file of each handwritten module."""
    files = [*SRC.glob("*.py"), *(file for part in PARTS for file in (SRC / part).rglob("*.py"))]
    names = {".".join(["aedit", *file.relative_to(SRC).with_suffix("").parts]): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items() if "_pb2" not in name}


def mentioned(source, package=""):
    """Return the dotted names that `source` imports or names in a string, as a lazy export or `-m` does.

    package: that of the source, which relative imports refer to.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {f"{package}.{each}" for each in (node.module, *(a.name for a in node.names)) if each}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"aedit(?:\.\w+)+", node.value))
    return names


def documented():
    """Return what examples and the pages' code blocks import, and what the shipped configurations name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    programs = [file.read_text() for file in (ROOT / "examples").rglob("*.py")]
    configs = [file.read_text() for file in (ROOT / "configs").glob("*.toml")]
    named = {name for text in configs for name in re.findall(r"aedit(?:\.\w+)+", text)}
    return named | {name for program in (*blocks, *programs) for name in mentioned(program)}


def reached(known, entries):
    seen, waiting = set(), list(entries)
    while waiting:
        name = waiting.pop()
        if name not in known or name in seen:
            continue
        seen.add(name)
        package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
        waiting += mentioned(known[name].read_text(), package)
        waiting += [name.rpartition(".")[0], f"{name}.__main__"]
    return seen


def test_an_entry_point_reaches_every_module():
    known = modules()
    assert len(known) > 150
    missed = set(known) - reached(known, (*ENTRIES, *PLUG_IN, *documented()))
    later = {name for name in missed if name.removeprefix("aedit.").startswith(ROLLOUT_ONLY)}
    assert sorted(missed - later) == []


def test_a_module_that_nothing_imports_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("import aedit.b")
    (tmp_path / "b.py").write_text("")
    (tmp_path / "c.py").write_text("import aedit.b")
    known = {f"aedit.{name}": tmp_path / f"{name}.py" for name in "abc"}
    assert reached(known, ["aedit.a"]) == {"aedit.a", "aedit.b"}
