"""From one version of a unit's anchor to the next. Pure and heavy: meant to run outside of every lock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from aedit.async_sgd.rules import (
    THIRD,
    MergePart,
    OuterOptimizer,
    OuterState,
    Push,
    Values,
    Vector,
    merge,
    norm,
    unit_slices,
)
from aedit.types import UnitLayout


class Quantiser(Protocol):
    """Codec of the changes of an anchor on their way to the nodes; `aedit.proto.codecs.codecs` has some."""

    feedback: bool
    """True if the rounding error is added to the next value (error feedback); for codecs below 8 bits."""

    def encode(self, x: Vector) -> bytes | memoryview:
        """Return x in fewer bytes."""

    def decode(self, data: bytes | memoryview, numel: int, start: int, stop: int) -> Vector:
        """Return elements start..stop of the `numel` encoded ones, as fp32."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """One version of one unit. Its arrays never change, so readers may keep them."""

    version: int
    values: Vector
    outer: OuterState[Vector]
    handed: Vector | None = None
    """Values that nodes hold where a coarse codec makes them differ from `values`; else None."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a Merged or Mixed record."""

    anchor: Anchor
    delta: bytes = b""
    """Encoded change of what nodes hold since the version before; empty: they need the whole."""
    ignored: tuple[tuple[int, int], ...] = ()
    """Pushes (node, seq) that pointed away from the others and did not count."""
    norm: float = 0.0
    """Norm of the merged pseudo-gradient before it is clipped."""
    up: Vector | None = None
    """Two levels: what the parent hub thinks this unit is, after its anchor has been mixed in."""


@dataclass(frozen=True, slots=True)
class AdvanceRule:
    """Rules by which a unit advances: merge, outer optimizer, quantiser."""

    outer: OuterOptimizer
    merge: str
    """Name of the merge rule; see `rules.merge.merge`."""
    clip: float | None
    quantiser: Quantiser | None
    cut: float = THIRD
    """Share of the pushes that a robust rule leaves out; see `rules.merge.merge`."""

    def factor(self, share: float | None) -> float:
        """Return the factor of a clipped mean that makes up this share of a round.

        An optimizer with a `delay` divides what it is given by that number, as its delay is meant to be the
        updates of a round: its share is given to it times `delay`, so that it is not divided twice.
        """
        return 1.0 if share is None else share * getattr(self.outer, "delay", 1)

    def outer_for(self, share: float | None) -> OuterOptimizer:
        """Return the outer optimizer of a merge that makes up this share of a round."""
        change = getattr(self.outer, "for_share", None)
        if share is None or change is None:
            return self.outer
        changed: OuterOptimizer = change(share)
        return changed


def founded(values: Values, layout: UnitLayout, rule: AdvanceRule) -> Computed:
    """Return version 1: the values that the founding node has brought."""
    first = np.empty(layout.numel, np.float32)
    for start, stop in unit_slices(layout.numel):
        first[start:stop] = values.read(start, stop)
    apart = rule.quantiser is not None and rule.quantiser.feedback
    return Computed(_frozen(Anchor(1, first, rule.outer.init(first), first if apart else None)))


def merged(
    old: Anchor,
    pushes: Sequence[tuple[Push, MergePart]],
    layout: UnitLayout,
    rule: AdvanceRule,
    share: float | None = None,
) -> Computed:
    """Return the next version after the outer step with the merged pushes, which are `share` of a round.

    If nothing of weight remains, or the result is not finite, anchor and momentum stay as they are, under the
    next version.
    """
    if not any(part.weight > 0 for _, part in pushes):
        return _unchanged(old)
    mean = merge(pushes, layout, rule.merge, rule.cut)
    length = norm(mean)
    scale = 1.0 if rule.clip is None else min(1.0, rule.clip / max(length, 1e-30))
    if correct := getattr(rule.outer, "correct", None):  # a mean of whole tensors, whatever its share
        mean *= np.float32(scale)
        correct(mean, old.outer, layout.tensors)
        scale = 1.0
    scale *= rule.factor(share)  # after clipping: a limit for a round is none for its parts together
    if scale != 1.0:
        mean *= np.float32(scale)
    new = mean  # each slice in the place of the mean that it is made of: one array less
    wholes: list[Vector | None] = [None for _ in old.outer.arrays]
    count = old.outer.count
    outer = rule.outer_for(share)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
        for start, stop in unit_slices(layout.numel):
            before = old.outer.map(lambda array, at=slice(start, stop): array[at])  # type: ignore[misc]
            step, after = outer.update(mean[start:stop], before)
            np.subtract(old.values[start:stop], step, out=new[start:stop])
            for i, (piece, same) in enumerate(zip(after.arrays, before.arrays, strict=True)):
                if piece is same:  # delayed momentum, most of the time: no need of another array
                    continue
                whole = wholes[i]
                wholes[i] = whole = np.empty_like(new) if whole is None else whole
                whole[start:stop] = piece
            count = after.count
    if not np.isfinite(new).all():
        return _unchanged(old)
    arrays = (a if whole is None else whole for a, whole in zip(old.outer.arrays, wholes, strict=True))
    state = replace(old.outer.with_arrays(*arrays), count=count)
    return replace(handed_out(old, new, state, rule), norm=length)


def mixture(x: Vector, values: Values, mix: float) -> Vector:
    """Return (1 - mix) x + mix values, a new array; x is not read if mix is 1."""
    new = np.empty_like(x)
    for start, stop in unit_slices(len(x)):
        new[start:stop] = values.read(start, stop)
        if mix != 1.0:
            new[start:stop] *= np.float32(mix)
            new[start:stop] += np.float32(1 - mix) * x[start:stop]
    return new


def handed_out(old: Anchor, new: Vector, state: OuterState[Vector], rule: AdvanceRule) -> Computed:
    """Return the new version as nodes will hold it.

    With a quantiser, nodes and hub take the same coarse step. The remainder is kept in `values`, so that the
    next step makes up for it, or is dropped on both sides where the quantiser is fine enough.
    """
    version = old.version + 1
    if rule.quantiser is None:
        return Computed(_frozen(Anchor(version, new, state)))
    held = old.values if old.handed is None else old.handed
    delta = bytes(rule.quantiser.encode(new - held))
    handed = np.empty_like(held)
    for start, stop in unit_slices(len(held)):
        decoded = rule.quantiser.decode(delta, len(held), start, stop)
        np.add(held[start:stop], decoded, out=handed[start:stop])
    if old.handed is None:
        return Computed(_frozen(Anchor(version, handed, state)), delta)
    return Computed(_frozen(Anchor(version, new, state, handed)), delta)


def _unchanged(old: Anchor) -> Computed:
    return Computed(replace(old, version=old.version + 1))


def _frozen(anchor: Anchor) -> Anchor:
    for array in (anchor.values, *anchor.outer.arrays, anchor.handed):
        if array is not None:
            array.flags.writeable = False
    return anchor
