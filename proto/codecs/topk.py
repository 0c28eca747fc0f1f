"""The largest few of many numbers, with their places. Pure functions of NumPy arrays, shapes by suffix.

C chunks of W numbers, of which k are kept; their places within the chunk ascend. Kept numbers travel as int8
with a scale per chunk (see `blocks`).
"""

import numpy as np
from numpy.typing import NDArray

from aedit.proto.codecs import blocks
from aedit.proto.codecs.blocks import Floats, Scales

WIDTH = 4096
KEPT = 32

Places = NDArray[np.uint16]
Codes = NDArray[np.int8]


def num_kept(width: int) -> int:
    """Return how many numbers of a chunk are kept; a short one keeps as many as a long one, or all it has."""
    return min(KEPT, width)


def encode(x_CW: Floats) -> tuple[Scales, Places, Codes]:
    """Return scales_C, places_Ck and codes_Ck of the numbers of largest magnitude.

    NaN and infinities are above all and make their chunk's scale NOT_FINITE.
    """
    bits_CW = blocks.magnitudes(x_CW)
    width, kept = x_CW.shape[1], num_kept(x_CW.shape[1])
    place_Ck = np.argpartition(bits_CW, width - kept, axis=1)[:, width - kept :]
    place_Ck.sort(axis=1)
    value_Ck = np.take_along_axis(x_CW, place_Ck, axis=1)
    scales_C = blocks.scales(blocks.magnitudes(value_Ck).max(1), blocks.PER_STEP, blocks.LARGEST_INT8)
    codes_Ck = np.empty(value_Ck.shape, np.int8)
    blocks.encode_int8(value_Ck, scales_C, codes_Ck)
    return scales_C, place_Ck.astype(np.uint16), codes_Ck


def decode(scales_C: Scales, places_Ck: Places, codes_Ck: Codes, out_CW: Floats) -> None:
    """Write the kept numbers, and 0 elsewhere."""
    value_Ck = np.empty(codes_Ck.shape, np.float32)
    blocks.decode_int8(codes_Ck, scales_C, value_Ck)
    out_CW.fill(0)
    np.put_along_axis(out_CW, places_Ck.astype(np.intp), value_Ck, axis=1)


def check_places(places_Ck: Places, width: int) -> None:
    """Raise ValueError if a place is not in the chunk or there twice."""
    if (places_Ck >= width).any():
        raise ValueError(f"a place is beyond the {width} of its chunk")
    if (places_Ck[:, 1:] <= places_Ck[:, :-1]).any():
        raise ValueError("places of a chunk do not go up")
