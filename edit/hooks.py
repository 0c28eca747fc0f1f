"""Forward hooks that torch.compile, torch.save and copy.deepcopy can all live with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class Hook:
    """Call `act` without arguments, whatever the module passes.

    Opaque to torch.compile: what lands must not become part of a graph. A saved or copied model gets
    `NoHook` in its place, because only the model that is attached takes part in the run.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        """Run the action."""
        self._act()

    def __reduce__(self) -> tuple[type["NoHook"], tuple[()]]:
        """Return what `torch.save` and `copy.deepcopy` put in this hook's place."""
        return NoHook, ()


class NoHook:
    """Do nothing: the hook of a copy."""

    def __call__(self, *args: Any) -> None:
        """Ignore the forward pass."""


def attach_hooks(
    model: nn.Module,
    before: Sequence[tuple[Sequence[nn.Module], Callable[[], None]]],
    after: Callable[[], None],
) -> list[RemovableHandle]:
    """Register forward hooks and return their handles.

    Args:
        model: The model whose end of a forward pass calls `after`.
        before: Modules, and what to do before any of them runs, ahead of other hooks.
        after: What to do when `model` has run.
    """
    forget_graphs_without([module for modules, _ in before for module in modules], model)
    handles = [model.register_forward_pre_hook(Hook(_refuse_running_ddp), prepend=True)]
    handles += [
        module.register_forward_pre_hook(Hook(act), prepend=True)
        for modules, act in before
        for module in modules
    ]
    return [*handles, model.register_forward_hook(Hook(after))]


def refuse_ddp(module: nn.Module) -> None:
    """Raise ValueError if `module` averages gradients over processes."""
    if isinstance(module, DistributedDataParallel) and (size := module.process_group.size()) > 1:
        raise ValueError(
            f"the model is in a DistributedDataParallel that averages gradients over {size} processes at "
            "every step, so there would be no local steps: train the module without it. In several processes "
            "give accelerate's prepare() or Fabric's setup() no model"
        )


def _refuse_running_ddp() -> None:
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is not None:
        refuse_ddp(ddp)


def forget_graphs_without(hooked: Iterable[nn.Module], model: nn.Module) -> None:
    """Drop compiled code in which the hooks of `hooked` would not run.

    torch.compile inlines submodules and does not look again for hooks that are registered later, so a model
    that has run compiled before would run on without them.
    """
    inside = set(hooked)
    for module in model.modules():
        if _is_compiled(module) and any(child in inside for child in module.modules() if child is not module):
            torch.compiler.reset()
            return


def _is_compiled(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    entries = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    return code is not None and entries is not None and bool(entries(code))
