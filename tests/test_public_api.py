"""Tests the public API: it is complete, lazy and typed, and all that pages and examples use."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("aedit", "aedit.edit", "aedit.async_sgd", "aedit.proto", "aedit.spec_rollout")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROMISED = {
    "aedit": "LayerSync MeanExchange HubExchange EverySteps EverySeconds TorchTransport EditConfig",
    "aedit.async_sgd": "Hub HubConfig OuterOptimizer Nesterov InProcessHub",
    "aedit.proto": "Transport Link Codec HubClient Discovery",
    "aedit.spec_rollout": "Engine Prompt Sampling Rollout Drafter SuffixDrafter LayerDrafter ArmChooser "
    "Goodput PolicyLoss LossInputs LossSettings find_loss advantages",
}


def source(package):
    return Path(importlib.import_module(package).__file__).read_text()


def typed_imports(package):
    """Return name and module of what a type checker sees."""
    tree = ast.parse(source(package))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body]
    return {alias.name: node.module for node in imports for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_resolves_is_listed_and_is_what_a_type_checker_sees(package):
    module = importlib.import_module(package)
    typed = typed_imports(package)
    assert sorted(typed) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name, where in typed.items():
        found = getattr(module, name)
        if not inspect.ismodule(found):
            assert found is getattr(importlib.import_module(where), name)
            assert inspect.getdoc(found), name


@pytest.mark.parametrize("package", PROMISED)
def test_what_the_design_promises_is_exported(package):
    assert set(PROMISED[package].split()) <= set(importlib.import_module(package).__all__)


def test_a_name_that_is_not_there_says_which_are():
    import aedit

    with pytest.raises(AttributeError, match=r"'aedit' has no attribute 'LayerSynk'; it offers .*LayerSync"):
        _ = aedit.LayerSynk


def python(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_packages_imports_nothing_heavy():
    loaded = python(f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)")
    assert "aedit.spec_rollout" in loaded
    assert not {"torch", "numpy", "grpc", "transformers"} & set(loaded)
    assert "torch" not in python(
        "import sys\nfrom aedit.async_sgd import Hub, HubConfig\nprint(*sys.modules)"
    )


def foreign_imports(code):
    """Return what `code` imports of aedit that is not public."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("aedit") and a.name not in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aedit":
            public = importlib.import_module(node.module).__all__ if node.module in PACKAGES else ()
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public)


def test_an_import_of_an_internal_module_is_recognised():
    assert list(foreign_imports("from aedit.edit.sync import LayerSync")) == ["aedit.edit.sync.LayerSync"]
    assert list(foreign_imports("import aedit.edit.sync\nfrom aedit import find_units")) == [
        "aedit.edit.sync",
        "aedit.find_units",
    ]
    assert list(foreign_imports("import aedit\nfrom aedit.async_sgd import Nesterov\nimport torch")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_only(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for block in blocks for name in foreign_imports(block)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_examples_import_public_names_only(path):
    assert list(foreign_imports(path.read_text())) == []


@pytest.mark.timeout(420)  # mypy reads all of torch where it has no cache
def test_a_type_checker_sees_the_exports_and_misses_what_is_not_there(tmp_path):
    assert (ROOT / "src" / "aedit" / "py.typed").is_file()
    (tmp_path / "user.py").write_text(
        "from aedit import EverySteps, LayerSync\n"
        "from aedit.async_sgd import Nesterov\n"
        "import aedit.edit\n"
        "reveal_type(EverySteps(3))\n"
        "reveal_type(LayerSync.of)\n"
        "reveal_type(Nesterov().lr)\n"
        "reveal_type(aedit.edit.RoundSchedule)\n"
        "from aedit import LayerSynk\n"
        "EverySteps('three')\n"
    )
    words = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "user.py")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert 'note: Revealed type is "aedit.edit.schedule.EverySteps"' in told
    assert any("-> aedit.edit.sync.LayerSync" in line for line in told)
    assert 'note: Revealed type is "float"' in told or 'note: Revealed type is "builtins.float"' in told
    assert any("RoundSchedule" in line and "note" in line for line in told)
    errors = [line for line in told if line.startswith("error")]
    assert len(errors) == 2, done.stdout
    assert 'Module "aedit" has no attribute "LayerSynk"' in errors[0]
    assert 'incompatible type "str"; expected "int"' in errors[1]
