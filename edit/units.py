"""What travels together: one transformer block each, and `rest` for what no block owns."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from aedit.edit.shards import local

REST = "rest"


class SyncUnit:
    """Trainable parameters that are exchanged together, as this rank holds them, and the module they land
    before."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.modules = [module]
        """The unit must have landed before any of these runs."""
        self.params: list[nn.Parameter] = []
        self.names: list[str] = []
        """Names of `params` in the model."""
        self.sent: Tensor | None = None
        """Snapshot of the parameters as the round under way has them (`arrival` landing only)."""

    @property
    def numel(self) -> int:
        """Parameters of the whole unit, over all ranks of the node."""
        return sum(p.numel() for p in self.params)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """A new fp32 vector of this rank's part, parameters in registration order."""
        return torch.cat([local(p).reshape(-1).float() for p in self.params])

    def value(self) -> Tensor:
        """What this node brings to the round under way: the snapshot, or the parameters as they are."""
        return self.flat() if self.sent is None else self.sent

    @torch.no_grad()
    def representable(self, flat: Tensor) -> Tensor:
        """`flat` as the parameters hold it after `adopt`: rounded where they are not fp32."""
        if all(p.dtype == torch.float32 for p in self.params):
            return flat
        return torch.cat([part.to(p.dtype).float() for p, part in self.split(flat)])

    @torch.no_grad()
    def adopt(self, flat: Tensor) -> None:
        """Make `flat` the parameters."""
        for p, part in self.split(flat):
            local(p).copy_(part.view_as(local(p)))

    @torch.no_grad()
    def follow(self, anchor: Tensor) -> None:
        """Move by what `anchor` is ahead of the snapshot, so that what was learned since then stays. Where
        nothing was, the parameters become the anchor to the last bit."""
        assert self.sent is not None, "nothing is under way"
        now = self.flat()
        self.adopt(torch.where(now == self.sent, anchor, now + (anchor - self.sent)))

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """A new fp32 vector of this rank's gradients, zeros where there are none."""
        parts = (torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.params)
        return torch.cat([part.reshape(-1).float() for part in parts])

    @torch.no_grad()
    def set_gradient(self, flat: Tensor) -> None:
        """Replace the gradients that exist."""
        for p, part in self.split(flat):
            if p.grad is not None:
                local(p.grad).copy_(part.view_as(local(p.grad)))

    def split(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """`flat` cut into one vector per parameter."""
        return zip(self.params, torch.split(flat, [local(p).numel() for p in self.params]), strict=True)


def find_units(model: nn.Module, spec: Literal["auto", "model"] | Iterable[str] = "auto") -> list[SyncUnit]:
    """Split the trainable parameters of `model` into units, in the order in which they land.

    `auto` takes the blocks of a transformers model (`_no_split_modules`), else the members of its lists of
    equal modules, else its children; `model` is one unit; names (`*` allowed) choose modules. Tied and
    shared parameters belong to the unit that lands first, frozen ones to none. Raises ValueError if a name
    matches nothing.
    """
    if spec == "model":
        blocks: list[tuple[str, nn.Module]] = []
    else:
        blocks = _auto(model) if spec == "auto" else _named(model, tuple(spec))
    name = "model" if spec == "model" else REST
    units = [SyncUnit(name, model), *(SyncUnit(n, m) for n, m in blocks)]
    for unit, param_name, param in _owners(model, units):
        unit.names.append(param_name)
        unit.params.append(param)
    units[0].modules += _holders(model, set(units[0].params))
    units = [unit for unit in units if unit.params]
    if not units:
        raise ValueError("nothing to train: every parameter of the model is frozen")
    return units


def _owners(model: nn.Module, units: list[SyncUnit]) -> Iterator[tuple[SyncUnit, str, nn.Parameter]]:
    first_to_land: dict[nn.Parameter, int] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        inside = (i for i, unit in enumerate(units[1:], 1) if name.startswith(unit.name + "."))
        first_to_land[p] = min(first_to_land.get(p, len(units)), next(inside, 0))
    for name, p in model.named_parameters():
        if p.requires_grad:
            yield units[first_to_land[p]], name, p


def _holders(model: nn.Module, params: set[nn.Parameter]) -> list[nn.Module]:
    """Modules inside `model` that hold any of `params` themselves: somebody may run them without running
    `model`, which may even be a container that cannot run."""
    return [m for m in model.modules() if m is not model and params & set(m.parameters(recurse=False))]


def _auto(model: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [(n, m) for n, m in model.named_modules() if n and type(m).__name__ in kinds]
    found = found or [(n, m) for n, m in model.named_modules() if n and _is_list_member(model, n)]
    found = found or [(n, m) for n, m in model.named_children() if _runs(m)]
    return _outermost(found)


def _named(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    names = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"edit.units: no module is called {pattern!r}; modules are like {_examples(names)}"
            )
    found = [(n, m) for n, m in names.items() if n and any(fnmatchcase(n, pattern) for pattern in patterns)]
    for name, module in found:
        if not _runs(module):
            raise ValueError(
                f"edit.units: {name} is a container without a forward of its own; name its members"
            )
    return _outermost(found)


def _examples(names: Iterable[str]) -> str:
    return ", ".join([name for name in names if name][:3])


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in found if not any(n.startswith(other + ".") for other, _ in found)]


def _is_list_member(model: nn.Module, name: str) -> bool:
    parent = model.get_submodule(name.rpartition(".")[0])
    return (
        isinstance(parent, nn.ModuleList) and len(parent) > 1 and len({type(child) for child in parent}) == 1
    )


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
