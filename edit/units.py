"""Sync units: a transformer block each, `rest` for all other parameters, and their steps."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from aedit.edit.hooks import refuse_ddp
from aedit.edit.shards import Shards, local

if TYPE_CHECKING:
    from aedit.edit.optimizers import InnerOptimizers

REST = "rest"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SyncUnit:
    """Trainable parameters that are exchanged together, as this rank holds them.

    They land before `modules` run.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.modules = [module]
        """The unit must have landed before any of these runs."""
        self.params: list[nn.Parameter] = []
        self.names: list[str] = []
        """Names of `params` in the model."""
        self.sent: Tensor | None = None
        """Snapshot of the parameters as the round under way has them (`arrival` landing only)."""
        self.states: InnerOptimizers | None = None
        """State of the optimizers that holds weights, such as master weights."""
        self.before_round: Callable[[], None] = _nothing
        """Called on all ranks before a round of this unit is opened."""
        self.after_landing: Callable[[], None] = _nothing
        """Called after the next anchor has become the parameters."""

    def named(self, names: Collection[str]) -> list[nn.Parameter]:
        """Return the parameters that have one of these names in the model."""
        return [p for p, name in zip(self.params, self.names, strict=True) if name in names]

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole unit, over all ranks of the node."""
        return sum(p.numel() for p in self.params)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """Return a new fp32 vector of this rank's part, parameters in registration order.

        Of the optimizer's master weights where it has them.
        """
        return torch.cat([local(self._exact(p)).reshape(-1).float() for p in self.params])

    def value(self) -> Tensor:
        """Return this node's values for the round under way: the snapshot, or the current parameters."""
        return self.flat() if self.sent is None else self.sent

    @torch.no_grad()
    def representable(self, flat: Tensor) -> Tensor:
        """Return `flat` as `flat()` gives it back after `adopt`: rounded where that is not fp32."""
        dtypes = [self._exact(p).dtype for p in self.params]
        if all(dtype == torch.float32 for dtype in dtypes):
            return flat
        parts = (part for _, part in self.split(flat))
        return torch.cat([part.to(dtype).float() for part, dtype in zip(parts, dtypes, strict=True)])

    @torch.no_grad()
    def adopt(self, flat: Tensor) -> None:
        """Make `flat` the parameters, and let what the optimizer keeps beside them follow."""
        for p, part in self.split(flat):
            if self.states is not None:
                self.states.shift(p, part)
            exact = local(self._exact(p))
            exact.copy_(part.view_as(exact))
            local(p).copy_(part.view_as(local(p)))
        self.after_landing()

    @torch.no_grad()
    def follow(self, anchor: Tensor) -> None:
        """Move by the difference of `anchor` and the snapshot, so that later inner steps stay.

        Without later steps the parameters become the anchor to the last bit.
        """
        assert self.sent is not None, "nothing is under way"
        now = self.flat()
        self.adopt(torch.where(now == self.sent, anchor, now + (anchor - self.sent)))

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return a new fp32 vector of this rank's gradients, zeros where there are none."""
        parts = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.params]
        dense = (part.to_dense() if part.is_sparse else part for part in parts)
        return torch.cat([part.reshape(-1).float() for part in dense])

    @torch.no_grad()
    def set_gradient(self, flat: Tensor) -> None:
        """Replace the gradients that exist."""
        for p, part in self.split(flat):
            if p.grad is None:
                continue
            if p.grad.is_sparse:  # rows that any node has touched
                p.grad = part.view_as(p).to(p.grad.dtype).to_sparse(p.grad.sparse_dim())
            else:
                local(p.grad).copy_(part.view_as(local(p.grad)))

    def _exact(self, p: nn.Parameter) -> Tensor:
        return p if self.states is None else self.states.exact(p)

    def split(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of `flat`."""
        return zip(self.params, torch.split(flat, [local(p).numel() for p in self.params]), strict=True)


def _nothing() -> None:
    """Do nothing."""


def find_units(model: nn.Module, spec: Literal["auto", "model"] | Iterable[str] = "auto") -> list[SyncUnit]:
    """Split the trainable parameters of `model` into units, in the order in which they land.

    `auto` takes the blocks of a transformers model (`_no_split_modules`), else the members of its lists of
    equal modules, else its children; `model` is one unit; names (`*` allowed) choose modules. Tied and
    shared parameters belong to the unit that lands first, frozen ones to none. Raises ValueError if a name
    matches nothing, or if a DistributedDataParallel would average gradients over nodes.
    """
    for module in model.modules():
        refuse_ddp(module)
    if spec == "model":
        blocks: list[tuple[str, nn.Module]] = []
    else:
        blocks = _auto(model) if spec == "auto" else _named(model, tuple(spec))
    name = "model" if spec == "model" else REST
    units = [SyncUnit(name, model), *(SyncUnit(n, m) for n, m in blocks)]
    first_to_land: dict[nn.Parameter, int] = {}
    for param_name, p in model.named_parameters(remove_duplicate=False):
        inside = (i for i, unit in enumerate(units[1:], 1) if param_name.startswith(unit.name + "."))
        first_to_land[p] = min(first_to_land.get(p, len(units)), next(inside, 0))
    for param_name, p in model.named_parameters():
        if p.requires_grad:
            unit = units[first_to_land[p]]
            unit.names.append(param_name)
            unit.params.append(_supported(param_name, p))
    # Modules that hold any of the rest themselves may run without `model`, which may be a container.
    rest = set(units[0].params)
    units[0].modules += [
        m for m in model.modules() if m is not model and rest & set(m.parameters(recurse=False))
    ]
    for unit in units:
        unit.modules += [m for m in _gatherers(model, unit.names) if m not in unit.modules]
    units = [unit for unit in units if unit.params]
    if not units:
        raise ValueError("nothing to train: every parameter of the model is frozen")
    return units


def _supported(name: str, p: nn.Parameter) -> nn.Parameter:
    """Return `p`, or raise ValueError if an anchor in fp32 cannot stand for it."""
    if p.layout != torch.strided:
        raise ValueError(
            f"parameter {name} is stored as {p.layout}: make it dense, p.to_dense(), or freeze it"
        )
    if p.is_complex():
        remedy = (
            "keep its real and imaginary parts, torch.view_as_real(p), as the parameter, and view_as_complex"
        )
        raise ValueError(f"parameter {name} is {p.dtype}: anchors are fp32; {remedy} in forward")
    if p.dtype not in _DTYPES:
        raise ValueError(
            f"parameter {name} is {p.dtype}: anchors are fp32, so it must be float32, bfloat16 or float16 "
            "(model.float()), or frozen"
        )
    return p


def _gatherers(model: nn.Module, param_names: Iterable[str]) -> list[nn.Module]:
    """Return the FSDP2 modules that gather these parameters.

    A unit must land before they gather, and they must gather anew afterwards, also if they keep what they
    gathered (`reshard_after_forward=False`).
    """
    sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    found: set[str] = set()
    for name in param_names if sharded else ():
        while name and (name := name.rpartition(".")[0]) not in sharded:
            pass
        found |= {name} & sharded
    return [model.get_submodule(name) for name in sorted(found)]


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
            examples = ", ".join([name for name in names if name][:3])
            raise ValueError(f"edit.units: no module is called {pattern!r}; modules are like {examples}")
    found = [(n, m) for n, m in names.items() if n and any(fnmatchcase(n, pattern) for pattern in patterns)]
    for name, module in found:
        if not _runs(module):
            raise ValueError(
                f"edit.units: {name} is a container without a forward of its own; name its members"
            )
    return _outermost(found)


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in found if not any(n.startswith(other + ".") for other, _ in found)]


def _is_list_member(model: nn.Module, name: str) -> bool:
    parent = model.get_submodule(name.rpartition(".")[0])
    return (
        isinstance(parent, nn.ModuleList) and len(parent) > 1 and len({type(child) for child in parent}) == 1
    )


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def fragment(round_id: int, P: int, num_units: int) -> tuple[int, ...]:
    """Return the units of one round, every P-th: a fragment is spread over the depth (arXiv:2501.18512)."""
    return tuple(range((round_id - 1) % P, num_units, P))


class UnitSteps:
    """Count the training steps of each unit between two rounds."""

    def __init__(self) -> None:
        self._totals: dict[str, Callable[[], int]] = {}
        self._seen: dict[str, int] = {}

    def register(self, name: str, total: Callable[[], int]) -> None:
        """Count the steps of the unit `name` by `total` from now on, instead of by the inner steps of rounds.

        total: Running total of the unit's own training steps on this node, asked at each round; where a node
            has several ranks, the first one's counts.
        """
        self._totals[name], self._seen[name] = total, total()

    def __contains__(self, name: str) -> bool:
        """Return whether the unit `name` has steps of its own."""
        return name in self._totals

    def new(self, units: Sequence[SyncUnit], steps: int, shards: Shards) -> Tensor:
        """Return the steps of each unit since the last call, float64 of shape [L]; all ranks together.

        steps: inner steps since then.
        """
        new_L = torch.full((len(units),), float(steps), dtype=torch.float64)
        own = [i for i, unit in enumerate(units) if unit.name in self._totals]
        totals = shards.decide([self._totals[units[i].name]() for i in own]) if own else []
        for i, total in zip(own, totals, strict=True):
            name = units[i].name
            new_L[i], self._seen[name] = max(0, total - self._seen[name]), total
        return new_L
