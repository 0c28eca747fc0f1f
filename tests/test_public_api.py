"""Tests the public API: it is complete, lazy and typed, and all that pages and examples use."""

import ast
import dataclasses
import importlib
import inspect
import math
import pickle
import re
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

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
    """Return name and module of what a type checker sees as public: not `X as X`, which our packages use."""
    tree = ast.parse(source(package))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body]
    return {alias.name: node.module for node in imports for alias in node.names if alias.asname is None}


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


def test_the_type_checker_reads_the_program_of_a_user():
    """It is checked with the package, as mypy reads all of torch for it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["modules"] == ["kit.user_program"]
    assert settings["strict"], "an unused `ignore` is an error"
    assert (ROOT / "src" / "aedit" / "py.typed").is_file()


# --- arguments of public constructors

UNCHECKED = {
    "Codec": "an interface, without arguments",
    "PeersMissing": "an exception",
    "RoundOutcome": "decisions that an exchange reports; the norm of a distrusted node may be NaN",
    "OuterState.momentum": "an array of NumPy or torch",
    "OuterState.pending": "an array of NumPy or torch",
    "Sampling.allowed": "a tensor; workers of rewards import no torch, and Engine.add checks it",
    "TrlWorker.tokenizer": "any tokenizer of transformers, which is no dependency",
    "WorkerSource.policy": "any model of transformers, maybe wrapped",
    "WorkerSource.drafter": "a DraftLayer or an OnlineDrafter",
}
"""Classes and parameters that are not checked, each with the reason."""

UNBOUNDED = {
    "Prompt.group": "a negative number means no group",
    "Prompt.rollout": "a key may be negative; Engine.add checks that it has 64 bits",
    "Prompt.sample": "as Prompt.rollout",
    "RewardSpec.weight": "a negative weight is a penalty",
    "Rollout.advantage": "a rollout that is worse than the others has a negative one",
    "VirtualClock.now_s": "a clock may begin anywhere",
}
"""Numbers without bounds, each with the reason."""

TABLES = {"EditConfig": "edit", "PenaltyConfig": "edit.penalty", "OuterConfig": "outer", "HubConfig": "hub"}
"""Configuration whose messages name the TOML table instead of the class."""


def public_classes():
    """Return the exported classes that users construct, by name."""
    named = {name: getattr(importlib.import_module(p), name) for p in PACKAGES for name in public(p)}
    found = {name: value for name, value in named.items() if inspect.isclass(value)}
    return {name: cls for name, cls in found.items() if not getattr(cls, "_is_protocol", False)}


def public(package):
    return importlib.import_module(package).__all__


def parameters():
    """Yield class, name of a parameter, and its annotation without bounds."""
    for name, cls in sorted(public_classes().items()):
        if name not in UNCHECKED:
            hints = typing.get_type_hints(cls.__init__, None, {"Tensor": torch.Tensor})
            for parameter in list(inspect.signature(cls.__init__).parameters)[1:]:
                yield cls, parameter, hints[parameter]


def kinds(hint):
    """Return the types and choices of an annotation: `int | None` has two."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for arg in typing.get_args(hint) for kind in kinds(arg)]
    return [hint]


class Foreign:
    """An object that no constructor can use."""


def wrong_values(where, hint):
    """Yield values that a parameter must refuse, and what the message must have beside its name."""
    among = kinds(hint)
    yield Foreign(), "got"
    if type(None) not in among:
        yield None, "got None"
    if str not in among:
        yield "1", 'got "1"' if Path not in among else None
    for kind in among:
        if kind is bool:
            yield from ((value, f"true or false, got {value}") for value in (1, 0.0, 2))
        if kind is int:
            yield from ((value, "whole number") for value in (2.5, 2.0, True, math.nan, math.inf))
        if kind is float:
            yield from ((value, "finite number") for value in (True, math.nan, math.inf, -math.inf))
        if kind in (int, float) and where not in UNBOUNDED:
            yield -(10**9), "got -1000000000"
        if typing.get_origin(kind) is typing.Literal:
            for choice in filter(None, typing.get_args(kind)):
                if len(choice) > 3:  # of shorter ones, none is nearest
                    yield choice.swapcase() + choice[-1], "did you mean" if choice.islower() else "got"
                    yield choice[1:] + choice[0], "got"
                    yield choice[:-1], f"did you mean {choice}?"


WALK = [pytest.param(*one, id=f"{one[0].__name__}.{one[1]}") for one in parameters()]


@pytest.mark.parametrize(("cls", "parameter", "hint"), WALK)
def test_every_public_constructor_refuses_wrong_values_by_name(cls, parameter, hint):
    where = f"{cls.__name__}.{parameter}"
    if where in UNCHECKED:
        return
    named = (
        f"{TABLES[cls.__name__]}.{parameter}" if cls.__name__ in TABLES else f"{cls.__name__}: {parameter}"
    )
    for value, said in wrong_values(where, hint):
        if said is not None:
            with pytest.raises(ValueError, match=re.escape(named)) as refused:
                cls(**{parameter: value})
            assert said in str(refused.value)


def test_exemptions_name_what_there_is():
    classes = public_classes()
    there = {*classes, *(f"{cls.__name__}.{parameter}" for cls, parameter, _ in parameters())}
    assert {*UNCHECKED, *UNBOUNDED} <= there


def test_numbers_of_numpy_and_paths_as_text_are_taken_as_what_they_equal():
    from aedit import EditConfig, EverySteps
    from aedit.async_sgd import Nesterov
    from aedit.proto import DhtSettings, PeerFile

    assert [type(EverySteps(number).every) for number in (np.int64(4), np.uint8(4), 4)] == [int, int, int]
    assert type(Nesterov(np.float32(0.5)).lr) is float
    assert Nesterov(np.float32(0.5)).lr == 0.5
    assert EditConfig(offload=np.bool_(True), landing=np.str_("arrival")) == EditConfig(
        offload=True, landing="arrival"
    )
    assert DhtSettings(run="r", identity="a/b").identity == Path("a/b")
    assert DhtSettings(run="r", listen=["x"]).listen == ("x",)
    assert PeerFile("peers").found() == ()


def test_a_constructor_with_checks_keeps_its_signature_its_errors_and_its_pickle():
    from aedit import EditConfig, EverySteps

    assert list(inspect.signature(EverySteps).parameters) == ["every"]
    with pytest.raises(TypeError, match="missing 1 required"):
        EverySteps()
    with pytest.raises(TypeError, match="unexpected keyword"):
        EverySteps(4, evry=4)
    config = EditConfig(every=8)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, fragments=4).fragments == 4
    with pytest.raises(ValueError, match=r"edit\.fragments must be at least 1, got 0"):
        dataclasses.replace(config, fragments=0)


def test_objects_that_are_taken_without_a_check_would_pass_it_unchanged():
    from aedit.types import ImportPath, _exact_types, accepted

    values = (0, True, 1.5, math.inf, "a", "a:b", None, torch.zeros(2), Path("a"), (1,), [1], {}, b"x", print)
    hints = (
        *(int, bool, float, str, Path, ImportPath, torch.Tensor, list, dict, None, typing.Any),
        *(torch.Tensor | None, int | None, Path | str, str | Path, float | int, bool | int, int | bool),
        *(str | None, tuple[int, ...], typing.Literal["a"], typing.Sized, torch.Tensor | tuple[int, ...]),
    )
    taken = [(v, hint) for hint in hints for v in values if type(v) in _exact_types(hint)]
    assert len(taken) > 8
    for value, hint in taken:
        assert accepted(value, hint) is value, (value, hint)
