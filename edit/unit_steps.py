"""Training steps of units: inner steps of the run, or own ones of a unit that is trained apart."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit


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
