"""Tests that imports point down only, that checkout folders are no packages, and torch-free configuration."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WEIGHTS = ("weights",)
LIBRARY = ("edit", "spec_rollout", "async_sgd", "proto", "types", "system", "clock", "child", "traces")
WIRE = ("proto.rpc", "proto.codecs")

MAY_IMPORT = {
    "launch.cli": ("launch", *LIBRARY),
    "launch.processes": (
        "launch.swarm",
        "launch.serve",
        "launch.views",
        "launch.node",
        "launch.hub",
        "launch.records",
        "launch.data",
        "launch.config",
        *LIBRARY,
        *WEIGHTS,
    ),
    "launch.views": (
        "child",
        "launch.records",
        "launch.config",
        "proto.rpc",
        "spec_rollout.http",
        "types",
        "system",
    ),
    "launch.node": ("launch.records", "launch.data", "launch.config", *LIBRARY),
    "launch.hub": (
        "child",
        "traces",
        "launch.records",
        "launch.config",
        "async_sgd",
        "proto",
        "types",
        "system",
    ),
    "launch.swarm": (
        "child",
        "traces",
        "launch.hub",
        "launch.records",
        "launch.config",
        "async_sgd.service",
        "proto",
        "types",
        "system",
    ),
    "launch.data": (
        "launch.records",
        "launch.config",
        "edit",
        "spec_rollout.rl",
        "spec_rollout.sampling",
        "proto.agent",
        "types",
        "system",
    ),
    "launch.records": ("launch.config", "types", "system"),
    "launch.config": ("edit", "spec_rollout", "async_sgd.rules", "proto", "types", "system"),
    "edit": ("async_sgd.rules", "proto", "traces", "types", "system", *WEIGHTS),
    "launch.serve": (
        "launch.records",
        "launch.data",
        "launch.config",
        "launch.node",
        *LIBRARY,
        *WEIGHTS,
    ),
    "spec_rollout.http": (
        "traces",
        *(f"spec_rollout.{part}" for part in ("server", "engine", "sampling")),
        "types",
        "system",
    ),
    "spec_rollout.vllm": (),
    "spec_rollout.server": (
        "traces",
        *(f"spec_rollout.{part}" for part in ("audit", "training", "engine", "rl", "vllm")),
        *(f"spec_rollout.{part}" for part in ("choose", "sampling", "drafters", "model")),
        "child",
        "proto.versions",
        *WIRE,
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.remote": (
        "traces",
        *(f"spec_rollout.{part}" for part in ("server", "audit", "engine", "training", "rl")),
        *(f"spec_rollout.{part}" for part in ("choose", "sampling", "drafters", "model")),
        "child",
        "proto.versions",
        *WIRE,
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.audit": (
        *(f"spec_rollout.{part}" for part in ("engine", "rl", "sampling", "drafters", "model")),
        "proto.rpc",
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.engine": (
        *(f"spec_rollout.{part}" for part in ("choose", "sampling", "drafters", "model")),
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.training": (
        "child",
        *(f"spec_rollout.{part}" for part in ("sampling", "drafters", "model")),
        "types",
        "system",
    ),
    "spec_rollout.adapters": (
        *(f"spec_rollout.{part}" for part in ("rl", "engine", "sampling")),
        "types",
        "system",
    ),
    "spec_rollout.rl": ("child", "spec_rollout.sampling", "traces", "types", "system"),
    "spec_rollout.choose": ("spec_rollout.drafters", "types", "system"),
    "spec_rollout.sampling": ("spec_rollout.drafters", "spec_rollout.model", "types", "system"),
    "spec_rollout.drafters": ("spec_rollout.model", "types", "system", *WEIGHTS),
    "spec_rollout.model": ("types", "system", *WEIGHTS),
    "async_sgd.inprocess": ("async_sgd.hub", "async_sgd.rules", "proto.agent", "types", "clock"),
    "async_sgd.service": (
        "traces",
        "async_sgd.journal",
        "async_sgd.replication",
        "async_sgd.hub",
        "async_sgd.rules",
        *WIRE,
        "types",
        "system",
    ),
    "async_sgd.journal": ("async_sgd.hub", "async_sgd.rules", *WIRE, "traces", "types", "system"),
    "async_sgd.replication": (
        "traces",
        "async_sgd.journal",
        "async_sgd.hub",
        "async_sgd.rules",
        *WIRE,
        "types",
        "system",
    ),
    "async_sgd.hub": (
        "async_sgd.rules",
        "proto.rpc.generation_of",
        "proto.rpc.lineage",
        "proto.rpc.version_of",
        "types",
        "system",
    ),
    "async_sgd.rules": ("types", "system"),
    "proto.agent": ("child", "proto.codecs", "proto.swarm", "proto.rpc", "traces", "types", "system"),
    "proto.dht": ("child", "proto.swarm", "types", "system"),
    "proto.swarm": ("proto.rpc", "types", "system"),
    "proto.versions": ("proto.codecs", "proto.rpc", "types", "system"),
    "proto.transports": ("proto.rpc", "types", "system", "clock"),
    "proto.codecs": ("types", "system"),
    "proto.rpc": ("traces", "types", "system"),
}
"""Sub-packages that the files of each sub-package may import, besides their own."""

ALONE = ("spec_rollout.vllm",)
"""Packages that are also installed alone, under another name: their files import each other relatively."""

PARTS = ("launch", "edit", "spec_rollout", "async_sgd", "proto")


@functools.cache
def import_statements(source):
    """Return all import statements of a source, once for all tests: parsing takes most of their time."""
    nodes = ast.walk(ast.parse(source))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(source):
    """Return every module that `source` may import: of `from a import b`, `a.b`.

    Relative ones keep their dots.
    """
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name, places):
    return any(name == place or name.startswith(f"{place}.") for place in places)


def wrong_arrows(source, place):
    """Return the imports of the project's modules that a file of `place` must not have."""
    for name in imported(source):
        first, _, rest = name.partition(".")
        up = first == "aedit" and rest and not within(rest, (*MAY_IMPORT[place], place, "lazy"))
        if up or first in PARTS or (not first and place not in ALONE):
            yield name


@functools.cache
def exported(place):
    """Return the names that the `__init__` file of a package imports for type checkers and exports lazily."""
    path = ROOT / place.replace(".", "/") / "__init__.py"
    tree = ast.parse(path.read_text() if path.exists() else "")
    blocks = [block for block in tree.body if isinstance(block, ast.If)]
    own = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    return own | {
        alias.name
        for block in blocks
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def place_of(module):
    """Return the sub-package of `MAY_IMPORT` in which `aedit.<module>` is, or None."""
    return next(
        (place for place in sorted(MAY_IMPORT, key=len, reverse=True) if within(module, [place])), None
    )


def past_the_package(source, place):
    """Return the imports that reach into a module of another sub-package instead of what it exports."""
    for node in import_statements(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aedit."):
            module = node.module.removeprefix("aedit.")
            there = place_of(module)
            if there not in (None, place):
                yield from (
                    f"{module}.{alias.name}"
                    for alias in node.names
                    if (module != there or alias.name not in exported(there)) and not is_module(there)
                )


def is_module(place):
    return (ROOT / place.replace(".", "/")).with_suffix(".py").exists()


def files_of(place):
    path = ROOT / place.replace(".", "/")
    return sorted(path.rglob("*.py")) or [path.with_suffix(".py")]


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_imports_point_down(place):
    files = files_of(place)
    assert files
    wrong = {str(file.relative_to(ROOT)): [*wrong_arrows(file.read_text(), place)] for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_other_packages_are_used_by_what_they_export(place):
    past = {
        str(file.relative_to(ROOT)): [*past_the_package(file.read_text(), place)] for file in files_of(place)
    }
    assert {file: names for file, names in past.items() if names} == {}


def test_the_rules_have_no_cycle():
    graph = {a: {b for b in MAY_IMPORT if b != a and within(b, MAY_IMPORT[a])} for a in MAY_IMPORT}
    graph["launch.cli"].discard("launch.cli")
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("edit", "from aedit.launch.config.config import RunConfig"),
        ("edit", "import aedit.launch.config.config"),
        ("edit", "from aedit import launch"),
        ("edit", "from ..launch import config"),
        ("edit", "from . import units"),
        ("edit", "from aedit.async_sgd.hub.hub import Hub"),
        ("edit", "def late():\n    import aedit.spec_rollout"),
        ("proto.rpc", "from aedit.proto.agent import agent"),
        ("async_sgd.hub", "from aedit.async_sgd.journal import ledger"),
        ("spec_rollout.model", "from aedit.spec_rollout.engine.engine import Engine"),
        ("launch.node", "from edit.units import find_units"),
    ],
)
def test_an_import_that_points_up_or_past_the_package_is_seen(place, line):
    assert list(wrong_arrows(line, place))


@pytest.mark.parametrize(
    "line", ["from aedit.types import Round", "from aedit.edit import units", "import torch", "import aedit"]
)
def test_an_import_that_points_down_is_allowed(line):
    assert list(wrong_arrows(line, "edit")) == []


@pytest.mark.parametrize("name", ["types", "clock"])
def test_what_every_part_may_import_needs_only_the_standard_library(name):
    names = imported((ROOT / "src" / "aedit" / f"{name}.py").read_text())
    names = [name for name in names if not name.startswith("aedit.types.")]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_every_file_has_its_place_in_the_order():
    placed = {file for place in MAY_IMPORT for file in files_of(place)}
    tops = {ROOT / part / "__init__.py" for part in PARTS if part not in MAY_IMPORT}
    assert {file for part in PARTS for file in files_of(part)} - placed == tops


def python(program):
    """Return the output of a fresh interpreter in the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_folders_of_the_checkout_refuse_to_be_imported():
    refusals = python(
        "import importlib\n"
        f"for part in {list(PARTS)}:\n"
        "    try: importlib.import_module(part)\n"
        "    except ImportError as error: print(error)\n"
    )
    assert refusals == [
        f"this is the checkout folder: import aedit.{part} instead of {part}" for part in PARTS
    ]


@pytest.mark.parametrize("module", ["aedit.launch.config.config", "aedit.launch.cli"])
def test_configuration_and_command_line_need_no_torch(module):
    loaded = python(f"import sys, {module}\nprint(*sys.modules, sep='\\n')")
    assert module in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded
