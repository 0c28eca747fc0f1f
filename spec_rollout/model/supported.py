"""Detection of models whose own forward pass computes something else than the fast path does.

The fast path reads parameters and calls no module. So it is right only for a model whose modules are exactly
those that `transformers` builds from the configuration. The check builds that model on the meta device, which
allocates nothing, and compares: classes, parameters and their shapes, settings such as the epsilon of a norm,
forward methods and forward hooks.
"""

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

HARMLESS_HOOKS = ("aedit.edit.", "transformers.modeling_utils", "transformers.utils.output_capturing")
"""Modules whose forward hooks change no output: landing of anchors, gradients of inputs, recorded outputs."""
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations of `transformers`, all of which compute the same function."""


def unsupported_reason(model: nn.Module) -> str:
    """Return why the model's own forward pass differs from what its configuration says; "" if it does not.

    One line that names the module, what was found and what was expected.
    """
    config: Any = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or config is None:
        return f"{type(model).__name__} of {type(model).__module__} is not a class of transformers"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a forward hook for all modules is registered: remove it"
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in ATTENTION:
        return f"attention implementation {attention!r} is not one of {', '.join(ATTENTION)}"
    reference = _as_configured(type(model), config)
    found = dict(model.named_modules())
    for name, expected in reference.named_modules():
        if name not in found:
            return f"{name} is missing: its configuration has a {type(expected).__name__} there"
        reason = _difference(found[name], expected)
        if reason:
            return f"{name or type(model).__name__} {reason}"
    return ""


def _as_configured(family: type[nn.Module], config: Any) -> nn.Module:
    """Return the model that `transformers` builds from the configuration, without memory."""
    with torch.device("meta"), torch.random.fork_rng(devices=()):
        return family(copy.deepcopy(config))


def _difference(module: nn.Module, expected: nn.Module) -> str:
    """Return the first difference of a module from the expected one, without their children; "" if none."""
    kind, wanted = type(module), type(expected)
    if kind is not wanted:
        return f"is a {kind.__name__} of {kind.__module__}: only {wanted.__name__} is supported"
    if _has_other_forward(module):
        return f"has another forward method than {kind.__name__} of {kind.__module__}"
    hook = next(_changing_hooks(module), None)
    if hook is not None:
        return f"has a forward hook, {_name(hook)}: remove it"
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) != len(expected):  # type: ignore[arg-type]
        return f"has {len(module)} members: its configuration has {len(expected)}"  # type: ignore[arg-type]
    return _parameter_difference(module, expected) or _setting_difference(module, expected)


def _has_other_forward(module: nn.Module) -> bool:
    """Return true if forward was replaced, on the instance or in the class."""
    if "forward" in vars(module):
        return True
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return getattr(vars(owner)["forward"], "__module__", None) != owner.__module__


def _changing_hooks(module: nn.Module) -> Iterator[Any]:
    hooks: list[Mapping[int, Any]] = [module._forward_pre_hooks, module._forward_hooks]
    for hook in (hook for each in hooks for hook in each.values()):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not str(getattr(function, "__module__", "")).startswith(HARMLESS_HOOKS):
            yield hook


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _parameter_difference(module: nn.Module, expected: nn.Module) -> str:
    found, wanted = (
        {name: tuple(each.shape) for name, each in one._parameters.items() if each is not None}
        for one in (module, expected)
    )
    for name in sorted(found.keys() ^ wanted.keys()):
        where = "unlike" if name in found else "which is there in"
        return (
            f"has {'a' if name in found else 'no'} parameter {name}, {where} the model of its configuration"
        )
    for name, shape in found.items():
        if shape != wanted[name]:
            return f"has the parameter {name} of shape {shape}: its configuration says {wanted[name]}"
    return ""


def _setting_difference(module: nn.Module, expected: nn.Module) -> str:
    """Compare numbers, texts and flags that the module's forward may read."""
    if hasattr(expected, "post_init") or isinstance(expected, nn.Dropout):
        return ""  # whole models have settings of training; dropout is off when text is generated
    for name, wanted in vars(expected).items():
        plain = wanted is None or isinstance(wanted, bool | int | float | str)
        if not plain or name.startswith("_") or name in ("training", "gradient_checkpointing"):
            continue
        found = vars(module).get(name)
        if "dropout" not in name and not _is_same(found, wanted):
            return f"has {name} {found!r}: its configuration says {wanted!r}"
    return ""


def _is_same(found: object, wanted: object) -> bool:
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-12)
    return found is wanted or (isinstance(found, bool | int | float | str) and found == wanted)
