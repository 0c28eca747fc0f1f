"""Imports point down only, the folders of the checkout are no packages, and configuration needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "launch": {"edit", "spec_rollout", "async_sgd", "proto", "types", "clock"},
    "edit": {"async_sgd", "proto", "types", "clock"},
    "spec_rollout": {"async_sgd", "proto", "types", "clock"},
    "async_sgd": {"types", "clock"},
    "proto": {"types", "clock"},
}
FILES_MAY_IMPORT = {"async_sgd/inprocess.py": {"proto"}}
"""What single files may import besides: a hub in process offers the `Link` of proto."""


def imported(source):
    """Every module that `source` may import: of `from a import b`, `a.b`; relative ones keep their dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_arrows(source, part, file=""):
    """Imports of our own modules that a file of `part` must not have."""
    allowed = MAY_IMPORT[part] | {part} | FILES_MAY_IMPORT.get(file, set())
    for name in imported(source):
        first, _, rest = name.partition(".")
        up = first == "aedit" and rest and rest.split(".")[0] not in allowed
        if up or first in {"", *MAY_IMPORT}:
            yield name


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_down(part):
    files = sorted((ROOT / part).rglob("*.py"))
    assert files
    names = {file: str(file.relative_to(ROOT)) for file in files}
    wrong = {names[file]: [*wrong_arrows(file.read_text(), part, names[file])] for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("edit", "from aedit.launch.config import RunConfig"),
        ("edit", "import aedit.launch.config"),
        ("edit", "from aedit import launch"),
        ("edit", "from ..launch import config"),
        ("edit", "from . import units"),
        ("edit", "def late():\n    import aedit.spec_rollout"),
        ("proto", "from aedit.async_sgd import outer"),
        ("async_sgd", "from aedit.proto.transport import Transport"),
        ("launch", "from edit.units import find_units"),
    ],
)
def test_an_import_that_points_up_or_past_the_package_is_seen(part, line):
    assert list(wrong_arrows(line, part))


@pytest.mark.parametrize(
    "line", ["from aedit.types import Round", "from aedit.edit import units", "import torch", "import aedit"]
)
def test_an_import_that_points_down_is_allowed(line):
    assert list(wrong_arrows(line, "edit")) == []


def test_types_need_only_the_standard_library():
    names = imported((ROOT / "src" / "aedit" / "types.py").read_text())
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_every_part_has_its_place_in_the_order():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"}
    assert folders == set(MAY_IMPORT)


def python(program):
    """What a fresh interpreter in the checkout prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_folders_of_the_checkout_refuse_to_be_imported():
    refusals = python(
        "import importlib\n"
        f"for part in {list(MAY_IMPORT)}:\n"
        "    try: importlib.import_module(part)\n"
        "    except ImportError as error: print(error)\n"
    )
    assert refusals == [
        f"this is the checkout folder: import aedit.{part} instead of {part}" for part in MAY_IMPORT
    ]


@pytest.mark.parametrize("module", ["aedit.launch.config", "aedit.launch.cli"])
def test_configuration_and_command_line_need_no_torch(module):
    loaded = python(f"import sys, {module}\nprint(*sys.modules, sep='\\n')")
    assert module in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded
