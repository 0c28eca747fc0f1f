"""Tests that private names of torch are few, and each is used in one place: another torch may lack them."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("edit", "async_sgd", "spec_rollout", "proto", "launch")
USED = {
    "DistributedDataParallel._get_active_ddp_module": "edit/hooks.py::_refuse_running_ddp",
    "_get_current_dispatch_mode_stack": "edit/apply_anchor.py::recorded",
    "torch._C._are_functorch_transforms_active": "edit/apply_anchor.py::recorded",
    "torch._C._dynamo.eval_frame": "edit/hooks.py::_is_compiled",
    "torch._C._get_mkldnn_enabled": "spec_rollout/model/layers.py::_without_onednn",
    "torch._C._has_mkldnn": "spec_rollout/model/layers.py",
    "torch._C._set_mkldnn_enabled": "spec_rollout/model/layers.py::_without_onednn",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "spec_rollout/model/layers.py::_packed_dtypes",
    "torch.ops.mkldnn._linear_pointwise": "spec_rollout/model/layers.py::_onednn",
    "torch_module._global_forward_hooks": "spec_rollout/model/families.py::unsupported_reason",
    "torch_module._global_forward_pre_hooks": "spec_rollout/model/families.py::unsupported_reason",
    "torch.ops.mkldnn._reorder_linear_weight": "spec_rollout/model/layers.py::_packed_copy",
}
"""The place of each private name. `make test-torch` shows whether another torch has them."""


def is_private(part):
    return part.startswith("_") and not part.startswith("__")


def dotted(node):
    """Return the name that an expression such as a.b.c spells, or nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) and parts else ""


def private_uses(tree):
    """Yield each private name of torch in a module, with the function that uses it."""
    names = {"torch"}
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
            hidden = any(map(is_private, node.module.split(".")))
            own |= {alias.asname or alias.name for alias in node.names if hidden or is_private(alias.name)}

    def visit(node, place):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = (*place, node.name)
        name = dotted(node)
        if name and name.split(".")[0] in names and any(map(is_private, name.split("."))):
            yield name, ".".join(place)
            return
        if isinstance(node, ast.Name) and node.id in own:
            yield node.id, ".".join(place)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, place)

    yield from visit(tree, ())


def test_each_private_name_of_torch_has_one_place():
    places = defaultdict(set)
    for part in PARTS:
        for file in sorted((ROOT / part).rglob("*.py")):
            for name, place in private_uses(ast.parse(file.read_text())):
                path = file.relative_to(ROOT).as_posix()
                places[name].add(f"{path}::{place}" if place else path)
    assert {name: sorted(found) for name, found in places.items()} == {
        name: [at] for name, at in USED.items()
    }
