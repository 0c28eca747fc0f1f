"""A module that is trained apart from the model, and shared with the other nodes as a sync unit of its own.

Its anchor is zero until a node has trained it. Each node contributes its module, weighted by its training
steps. The merged module is offered to the user of the module, such as the engine, which may reject it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from aedit.edit.exchange import check_new, mark_taken
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit

if TYPE_CHECKING:
    from aedit.edit.hub_exchange import HubExchange
    from aedit.edit.mean_exchange import MeanExchange


class TrainedApart(Protocol):
    """The user of the module on one rank, such as an `aedit.spec_rollout.OnlineDrafter`."""

    @property
    def shared_steps(self) -> int:
        """Return the training steps that are in the module in use: a running total."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the module in use."""

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on, unless they are worse."""


class SharedModule:
    """Sync unit of a module that is trained apart from the model."""

    def __init__(
        self, name: str, shapes: Mapping[str, torch.Size], device: torch.device | None = None
    ) -> None:
        """Make the unit.

        Args:
            name: Name of the unit, which selects its rule.
            shapes: Shapes of the module's tensors by name.
            device: Device of the model's parameters; None: the CPU.
        """
        self.unit = SyncUnit(name, nn.Module())
        self.unit.modules = []
        self._names = list(shapes)
        for key, shape in shapes.items():
            self.unit.names.append(f"{name}.{key}")
            zeros = torch.zeros(shape, dtype=torch.float32, device=device)
            self.unit.params.append(nn.Parameter(zeros, requires_grad=False))
        self.unit.before_round, self.unit.after_landing = self._refresh, self._offer
        self._total = 0
        """Training steps of all ranks of the node that were brought to rounds."""
        self._user: TrainedApart | None = None
        self._shards, self._seen = Shards(), 0

    def attach(self, exchange: "MeanExchange | HubExchange") -> None:
        """Exchange the unit through `exchange`. Call it before `LayerSync.of`.

        Raises:
            ValueError: Another exchange has the unit already.
        """
        check_new(self, "make a new one for each exchange")
        exchange.apart = [*exchange.apart, self.unit]
        exchange.unit_steps.register(self.unit.name, lambda: self._total)
        mark_taken(self)

    def connect(self, user: TrainedApart, shards: Shards) -> None:
        """Exchange the module of `user` from now on. All ranks of the node, before the first step."""
        self._user, self._shards, self._seen = user, shards, 0
        self._offer()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Make the unit's value the mean of the ranks' modules, weighted by their training steps."""
        if self._user is None:
            return
        steps, own = self._user.shared_steps, self._user.tensors()
        new, self._seen = max(0, steps - self._seen), steps
        total = int(self._shards.sum(torch.tensor([new]))[0])
        self._total += total
        weight = new / total if total else float(self._shards.leads)
        for name, p in zip(self._names, self.unit.params, strict=True):
            value = own[name].to(p)
            p.copy_(value if self._shards.size == 1 else self._shards.sum(value * weight))

    def _offer(self) -> None:
        """Offer the unit's value to the user, unless no node has trained it, or it is the user's own."""
        found = dict(zip(self._names, self.unit.params, strict=True))
        if self._user is None or not any(bool(p.any()) for p in found.values()):
            return
        own = self._user.tensors()
        if not all(torch.equal(own[name].to(p), p) for name, p in found.items()):
            self._user.take_shared({name: p.detach().clone() for name, p in found.items()})
