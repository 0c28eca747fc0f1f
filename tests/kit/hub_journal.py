"""Compare what a hub's journal has accepted and merged with what its nodes have added."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aedit.async_sgd.rules.records import Accepted, Founded, Merged
from aedit.launch.hub.replay import anchors_of, records_of, replayed


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


def by_name(directory: Path, vectors: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the vectors of the units of a hub as parameters by name."""
    layout, found = replayed(directory).state.layout, {}
    for unit, one in enumerate(layout.units):
        parts = np.split(vectors[unit], np.cumsum([tensor.numel for tensor in one.tensors])[:-1])
        found |= {t.name: part.reshape(t.shape) for t, part in zip(one.tensors, parts, strict=True)}
    return found
