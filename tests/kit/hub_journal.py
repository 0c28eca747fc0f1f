"""Compare what a hub's journal has accepted, merged and leased with what its nodes have added and trained."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from aedit.async_sgd.hub.pool import Pool
from aedit.async_sgd.rules import Accepted, Founded, Leased, Left, Merged, Record, Used
from aedit.launch.hub import anchors_of, records_of, replayed


def check_journal(directory: Path) -> dict[int, np.ndarray]:
    """Check that every accepted push is in one merge, and that the anchors are the sum of their shares.

    For a hub with the outer optimizer `average`, lr 1. Returns the sum of all accepted pushes by unit, each
    at its whole length, to the last bit if the numbers are small.
    """
    pushes, merges, layout, first, whole, shared = {}, Counter(), None, {}, {}, {}
    for record in records_of(directory):
        match record:
            case Founded(layout):
                pass
            case Accepted(push):
                values = push.values.read(0, layout.units[push.unit].numel).astype(np.float64)
                if push.base == 0:
                    first[push.unit] = values
                else:
                    pushes[push.node, push.unit, push.seq] = values
                    whole[push.unit] = whole.get(push.unit, 0) + values
            case Merged(unit, _, parts, _, share):
                for part in parts:
                    key = part.node, unit, part.seq
                    merges[key] += 1
                    if key in pushes:
                        assert share is None or 0 < share <= 1
                        part_of = (1.0 if share is None else share) / len(parts) * pushes[key]
                        shared[unit] = shared.get(unit, 0) + part_of
    assert [key for key in pushes if merges[key] != 1] == []
    for unit, anchor in anchors_of(directory).items():
        np.testing.assert_allclose(anchor, first[unit] - shared[unit], rtol=1e-5, atol=1e-4)
    return whole


def check_leases(records: Iterable[Record], pool: Pool, trained: Iterable[int]) -> None:
    """Check that each position of the stream has been trained once, or will be leased again, or is leased.

    records: of the whole run. pool: of the hub after them. trained: positions in the steps that the nodes
    have kept; all of these steps are in accepted pushes.
    """
    holders: dict[int, int] = {}
    used, top = set(), 0
    for record in records:
        match record:
            case Leased(node, start, end):
                assert start <= top, f"positions {top} to {start} were never leased"
                block, top = set(range(start, end)), max(top, end)
                assert not block & holders.keys(), f"{record}: another node has some of it"
                assert not block & used, f"{record}: some of it has been used"
                holders |= dict.fromkeys(block, node)
            case Used(node, start, upto):
                for position in range(start, upto):
                    if position not in used:
                        assert holders.pop(position) == node, f"{record}: {position} is not the node's"
                        used.add(position)
            case Left(node):
                holders = {position: holder for position, holder in holders.items() if holder != node}
    assert sorted(trained) == sorted(used), "trained twice, or not reported, or reported and not trained"
    returned = [position for block in pool.returned for position in range(*block)]
    held = {p: n for n in pool.leases for block in pool.outstanding(n) for p in range(*block)}
    assert held == holders
    assert sorted([*used, *held, *returned]) == list(range(top)), "lost, or in two places"
    assert pool.watermark == top


def by_name(directory: Path, vectors: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the vectors of the units of a hub as parameters by name."""
    layout, found = replayed(directory).state.layout, {}
    for unit, one in enumerate(layout.units):
        parts = np.split(vectors[unit], np.cumsum([tensor.numel for tensor in one.tensors])[:-1])
        found |= {t.name: part.reshape(t.shape) for t, part in zip(one.tensors, parts, strict=True)}
    return found
