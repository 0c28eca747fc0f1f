"""Norms of the tensors of a push, as measured by the hub."""

from math import sqrt

import numpy as np

from aedit.proto.codecs import Codec, Payload, slices
from aedit.types import UnitLayout


def tensor_norms(data: Payload, codec: Codec, layout: UnitLayout) -> tuple[float, ...]:
    """Return the Euclidean norm of each tensor, slice by slice; NaN or infinite if an element is."""
    ends = np.cumsum([tensor.numel for tensor in layout.tensors])
    squares = [0.0] * len(layout.tensors)
    tensor = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in slices(layout.numel):
            values = codec.decode(data, layout.numel, start, stop)
            at = start
            while at < stop:
                while ends[tensor] <= at:
                    tensor += 1
                until = min(stop, int(ends[tensor]))
                piece = values[at - start : until - start]
                squares[tensor] += float(np.dot(piece, piece))
                at = until
    return tuple(sqrt(square) if square >= 0 else square for square in squares)
