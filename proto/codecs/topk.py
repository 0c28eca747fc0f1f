"""The largest few of many numbers in 2 bits each, with their places. Pure functions, shapes by suffix.

C chunks of W numbers, of which k are kept (chunked top-k as in SparseLoCo, arXiv:2508.15706). A chunk's
record has R bytes, the same for all chunks of W:

    4 bytes      two magnitudes, bfloat16 as in `blocks`: the lower, then the higher
    k bits       1 where a kept number has the higher magnitude
    k bits       1 where it is negative
    k l bits     the lower l bits of the places, in ascending order
    the rest     their upper bits: as many zeros as the upper part grows by, then a one, for each place

The last three are Elias-Fano coding: 6.3 bits per place for 192 of 4096, where log2 of all subsets is 6.0 and
plain places have 12. Groups of bits begin at a byte, but for the two of the places; bits are filled from the
least significant one. Unused bits are 0. Encoding gives the same bits on every machine: no sum depends on the
order in which a processor adds, and of equal magnitudes the first ones are kept.
"""

import numpy as np
from numpy.typing import NDArray

from aedit.proto.codecs import blocks
from aedit.proto.codecs.blocks import Bytes, Floats, Scales

WIDTH = 4096
KEPT = 192

Places = NDArray[np.intp]


def num_kept(width: int) -> int:
    """Return how many numbers of a chunk are kept; a short chunk keeps the same share, rounded up."""
    return -(-KEPT * width // WIDTH)


def record_bytes(width: int) -> int:
    """Return the length of a chunk's record."""
    kept = num_kept(width)
    return 4 + 2 * _up8(kept) + _up8(kept * _low_bits(width) + _upper_bits(width))


def encode_topk(x_CW: Floats) -> Bytes:
    """Return the records of the numbers of largest magnitude, [C, R].

    NaN and infinities are above all and make their chunk's magnitudes NOT_FINITE.
    """
    width = x_CW.shape[1]
    place_Ck = _largest(blocks.magnitudes(x_CW), num_kept(width))
    value_Ck = np.take_along_axis(x_CW, place_Ck, axis=1)
    size_Ck = np.abs(value_Ck)
    levels_C2 = _two_levels(size_Ck)
    middle_C1 = blocks.from_bf16(levels_C2).astype(np.float64).sum(1, keepdims=True) / 2
    high_Ck = size_Ck > middle_C1
    is_zero_Ck = np.where(high_Ck, levels_C2[:, 1:], levels_C2[:, :1]) == 0
    parts = (
        levels_C2.view(np.uint8),
        _packed(high_Ck),
        _packed(np.signbit(value_Ck) & ~is_zero_Ck),  # no -0: of numbers of size 0 the first are kept
        _packed(_place_bits(place_Ck, width)),
    )
    return np.concatenate(parts, axis=1)


def decode_topk(record_CR: Bytes, out_CW: Floats) -> None:
    """Write the kept numbers, and 0 elsewhere."""
    width = out_CW.shape[1]
    levels_C2, high_Ck, negative_Ck, bits_Cn = _parts(record_CR, width)
    level_C2 = blocks.from_bf16(levels_C2)
    value_Ck = np.where(high_Ck, level_C2[:, 1:], level_C2[:, :1])
    np.negative(value_Ck, out=value_Ck, where=negative_Ck.view(bool))
    out_CW.fill(0)
    np.put_along_axis(out_CW, _places(bits_Cn, width), value_Ck, axis=1)


def check_topk(record_CR: Bytes, width: int) -> None:
    """Raise ValueError unless each record is one that can be decoded."""
    levels_C2, high_Ck, negative_Ck, bits_Cn = _parts(record_CR, width)
    blocks.check_scales(levels_C2.reshape(-1), blocks.LARGEST_E3M0)
    broken_C2 = levels_C2 == blocks.NOT_FINITE
    if (levels_C2[:, 0] > levels_C2[:, 1]).any() or (broken_C2[:, 0] != broken_C2[:, 1]).any():
        raise ValueError("the lower of two magnitudes is above the higher one")
    kept = num_kept(width)
    if (bits_Cn[:, kept * _low_bits(width) :].sum(1, dtype=np.int64) != kept).any():
        raise ValueError(f"a chunk has not {kept} places")
    place_Ck = _places(bits_Cn, width)
    if (place_Ck >= width).any():
        raise ValueError(f"a place is beyond the {width} of its chunk")
    if (place_Ck[:, 1:] <= place_Ck[:, :-1]).any():
        raise ValueError("places of a chunk do not go up")
    groups = zip(_groups(record_CR, width), (high_Ck, negative_Ck, bits_Cn), strict=True)
    if any(_bits(group, 8 * group.shape[1])[:, bits.shape[1] :].any() for group, bits in groups):
        raise ValueError("unused bits of a record are not 0")


def _largest(bits_CW: blocks.Bits, kept: int) -> Places:
    """Return the places of the `kept` largest, ascending; of equal ones the first."""
    width = bits_CW.shape[1]
    least_C1 = np.partition(bits_CW, width - kept, axis=1)[:, width - kept, None]
    chosen_CW = bits_CW >= least_C1
    for row in np.flatnonzero(chosen_CW.sum(1) > kept):
        equal = np.flatnonzero(bits_CW[row] == least_C1[row])
        surplus = int(chosen_CW[row].sum()) - kept
        chosen_CW[row, equal[len(equal) - surplus :]] = False
    return np.nonzero(chosen_CW)[1].reshape(-1, kept)


def _two_levels(size_Ck: Floats) -> Scales:
    """Return the two magnitudes, [C, 2], closest to the kept ones: exact 2-means, rounded to bf16."""
    num, kept = size_Ck.shape
    sorted_Ck = np.sort(np.where(np.isfinite(size_Ck), size_Ck, np.float32(0)), axis=1)
    sum_Ck = np.cumsum(sorted_Ck, axis=1, dtype=np.float64)
    total_C1 = sum_Ck[:, -1:]
    mean_C2 = np.repeat(total_C1, 2, axis=1) / kept
    if kept > 1:
        lower_s = np.arange(1, kept)
        between_Cs = sum_Ck[:, :-1] ** 2 / lower_s + (total_C1 - sum_Ck[:, :-1]) ** 2 / (kept - lower_s)
        at_C = between_Cs.argmax(1)
        low_C = sum_Ck[np.arange(num), at_C]
        mean_C2 = np.stack([low_C / (at_C + 1), (total_C1[:, 0] - low_C) / (kept - 1 - at_C)], axis=1)
        mean_C2[:, 1] = np.maximum(mean_C2[:, 0], mean_C2[:, 1])  # if all are equal, rounding may differ
    top_C2 = mean_C2.astype(np.float32).view(np.uint32)
    top_C2[~np.isfinite(size_Ck).all(1)] = blocks.INFINITE
    return blocks.scales(top_C2, np.float32(1), blocks.LARGEST_E3M0)


def _low_bits(width: int) -> int:
    """Return the number of lower bits of a place that takes the fewest bits in all."""
    kept = num_kept(width)
    return min(range(width.bit_length()), key=lambda low: kept * low + ((width - 1) >> low))


def _upper_bits(width: int) -> int:
    return num_kept(width) + ((width - 1) >> _low_bits(width))


def _place_bits(place_Ck: Places, width: int) -> Bytes:
    """Return places as bits, [C, n]."""
    low, kept = _low_bits(width), place_Ck.shape[1]
    low_Ckl = (place_Ck[:, :, None] >> np.arange(low)) & 1
    upper_Cu = np.zeros((len(place_Ck), _upper_bits(width)), np.uint8)
    np.put_along_axis(upper_Cu, (place_Ck >> low) + np.arange(kept), 1, axis=1)
    return np.concatenate([low_Ckl.astype(np.uint8).reshape(len(place_Ck), kept * low), upper_Cu], axis=1)


def _places(bits_Cn: Bytes, width: int) -> Places:
    """Return the places; each row has as many ones in its upper part as there are places."""
    low, kept = _low_bits(width), num_kept(width)
    low_Ckl = bits_Cn[:, : kept * low].reshape(len(bits_Cn), kept, low)
    upper_Ck = np.nonzero(bits_Cn[:, kept * low :])[1].reshape(-1, kept) - np.arange(kept)
    found_Ck: Places = (upper_Ck << low) + low_Ckl @ (1 << np.arange(low))
    return found_Ck


def _parts(record_CR: Bytes, width: int) -> tuple[Scales, Bytes, Bytes, Bytes]:
    """Return levels_C2, high_Ck, negative_Ck and the bits of the places."""
    kept = num_kept(width)
    levels_C2 = np.ascontiguousarray(record_CR[:, :4]).view(np.uint16)
    high, negative, places = _groups(record_CR, width)
    count = kept * _low_bits(width) + _upper_bits(width)
    return levels_C2, _bits(high, kept), _bits(negative, kept), _bits(places, count)


def _groups(record_CR: Bytes, width: int) -> list[Bytes]:
    """Return the groups of bits of the records: which are high, which are negative, and the places."""
    step = _up8(num_kept(width))
    return np.split(record_CR[:, 4:], [step, 2 * step], axis=1)


def _packed(bits_Cn: NDArray[np.generic]) -> Bytes:
    return np.packbits(bits_Cn.astype(bool), axis=1, bitorder="little")


def _bits(packed: Bytes, count: int) -> Bytes:
    return np.unpackbits(packed, axis=1, count=count, bitorder="little")


def _up8(bits: int) -> int:
    return -(-bits // 8)
