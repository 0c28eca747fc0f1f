"""Tests that imports point down only, that checkout folders are no packages, and torch-free configuration."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WEIGHTS = ("weight_watch", "weight_gather")
LIBRARY = ("edit", "spec_rollout", "async_sgd", "proto", "types", "system", "clock")
WIRE = ("proto.wire", "proto.codecs")

MAY_IMPORT = {
    "launch.cli": ("launch", *LIBRARY),
    "launch.local": (
        "launch.child",
        "launch.swarm",
        "launch.serve",
        "launch.views",
        "launch.node",
        "launch.hub",
        "launch.rundir",
        "launch.data",
        "launch.config",
        *LIBRARY,
        *WEIGHTS,
    ),
    "launch.views": ("launch.rundir", "launch.config", "proto.wire", "types", "system"),
    "launch.node": ("launch.rundir", "launch.data", "launch.config", *LIBRARY),
    "launch.hub": (
        "launch.stop_signals",
        "launch.rundir",
        "launch.config",
        "async_sgd",
        "proto",
        "types",
        "system",
    ),
    "launch.swarm": (
        "launch.child",
        "launch.stop_signals",
        "launch.rundir",
        "launch.config",
        "async_sgd.service",
        "proto",
        "types",
        "system",
    ),
    "launch.child": ("types", "system"),
    "launch.stop_signals": (),
    "launch.data": (
        "launch.rundir",
        "launch.config",
        "edit",
        "spec_rollout.rl",
        "spec_rollout.sampling",
        "proto.agent",
        "types",
        "system",
    ),
    "launch.rundir": ("launch.config", "types", "system"),
    "launch.config": ("edit", "spec_rollout", "async_sgd.rules", "proto", "types", "system"),
    "edit": ("async_sgd.rules", "proto", "types", "system", "lazy", *WEIGHTS),
    "launch.serve": (
        "launch.stop_signals",
        "launch.rundir",
        "launch.data",
        "launch.config",
        "launch.node",
        *LIBRARY,
        *WEIGHTS,
    ),
    "spec_rollout.service": (
        *(f"spec_rollout.{part}" for part in ("audit", "learning", "migration", "engine", "idle", "rl")),
        *(f"spec_rollout.{part}" for part in ("arms", "sampling", "drafters", "model")),
        "proto.versions",
        *WIRE,
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.servers": (
        *(f"spec_rollout.{part}" for part in ("audit", "workers", "migration", "engine", "idle", "rl")),
        *(f"spec_rollout.{part}" for part in ("arms", "sampling", "drafters", "model")),
        "proto.versions",
        *WIRE,
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.audit": (
        *(f"spec_rollout.{part}" for part in ("migration", "engine", "rl", "sampling", "drafters", "model")),
        "proto.wire",
        "types",
        "system",
    ),
    "spec_rollout.workers": (
        *(f"spec_rollout.{part}" for part in ("migration", "engine", "idle", "rl")),
        *(f"spec_rollout.{part}" for part in ("arms", "sampling", "drafters", "model")),
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.migration": ("spec_rollout.engine", "spec_rollout.sampling", "types", "system"),
    "spec_rollout.engine": (
        *(f"spec_rollout.{part}" for part in ("arms", "sampling", "drafters", "model")),
        "types",
        "system",
        *WEIGHTS,
    ),
    "spec_rollout.learning": (
        *(f"spec_rollout.{part}" for part in ("idle", "sampling", "drafters", "model")),
        "types",
        "system",
    ),
    "spec_rollout.adapters": (
        *(f"spec_rollout.{part}" for part in ("rl", "engine", "sampling")),
        "types",
        "system",
    ),
    "spec_rollout.rl": ("spec_rollout.sampling", "types", "system"),
    "spec_rollout.arms": ("spec_rollout.drafters", "types", "system"),
    "spec_rollout.sampling": ("spec_rollout.drafters", "spec_rollout.model", "types", "system"),
    "spec_rollout.drafters": ("spec_rollout.model", "types", "system"),
    "spec_rollout.idle": ("types", "system"),
    "spec_rollout.model": ("types", "system", *WEIGHTS),
    "async_sgd.inprocess": ("async_sgd.hub", "async_sgd.rules", "proto.agent", "types", "clock"),
    "async_sgd.service": (
        "async_sgd.journal",
        "async_sgd.leadership",
        "async_sgd.hub",
        "async_sgd.rules",
        *WIRE,
        "types",
        "system",
    ),
    "async_sgd.journal": ("async_sgd.hub", "async_sgd.rules", *WIRE, "types", "system"),
    "async_sgd.leadership": ("async_sgd.rules", "proto.wire"),
    "async_sgd.hub": ("async_sgd.rules", "proto.wire.lineage", "types", "system"),
    "async_sgd.rules": ("types", "system"),
    "proto.agent": ("proto.codecs", "proto.swarm", "proto.wire", "types", "system"),
    "proto.swarm": ("proto.wire", "types", "system"),
    "proto.versions": ("proto.codecs", "proto.wire", "types", "system"),
    "proto.transports": ("proto.wire", "types", "system", "clock"),
    "proto.codecs": ("types", "system"),
    "proto.wire": ("types", "system"),
}
"""Sub-packages that the files of each sub-package may import, besides their own."""

PARTS = ("launch", "edit", "spec_rollout", "async_sgd", "proto")


def imported(source):
    """Return every module that `source` may import: of `from a import b`, `a.b`.

    Relative ones keep their dots.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name, places):
    return any(name == place or name.startswith(f"{place}.") for place in places)


def wrong_arrows(source, place):
    """Return the imports of the project's modules that a file of `place` must not have."""
    for name in imported(source):
        first, _, rest = name.partition(".")
        up = first == "aedit" and rest and not within(rest, (*MAY_IMPORT[place], place))
        if up or first in {"", *PARTS}:
            yield name


def files_of(place):
    path = ROOT / place.replace(".", "/")
    return sorted(path.rglob("*.py")) or [path.with_suffix(".py")]


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_imports_point_down(place):
    files = files_of(place)
    assert files
    wrong = {str(file.relative_to(ROOT)): [*wrong_arrows(file.read_text(), place)] for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


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
        ("proto.wire", "from aedit.proto.agent import agent"),
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
