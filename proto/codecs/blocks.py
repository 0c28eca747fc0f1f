"""Blocks of numbers as one scale and few bits each. Pure functions of NumPy arrays, shapes by suffix.

B blocks of K numbers. A scale is a positive bfloat16, held as its 16 bits: 8 significant bits, so that scale
times code is exact in fp32, and encoding decoded numbers gives the same bits. 0 stands for a block without
codes, NOT_FINITE for one with a NaN or an infinity in it: it decodes to NaN throughout, so that the receiver
sees the error.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.uint32]
Scales = NDArray[np.uint16]
Bytes = NDArray[np.uint8]

NOT_FINITE = 0x7FC0
"""The only NaN that is a scale."""

SMALLEST = (127 - 100) << 7
"""2^-100 as a scale: smaller ones become 0, so that no product is denormal."""

LARGEST_INT8 = 0x7C01
"""127 times this is the largest finite product."""
LARGEST_E3M0 = 0x7F7F

INFINITE = 0x7F800000
ABSOLUTE = 0x7FFFFFFF
EXPONENT_BIT = 23
PER_STEP = np.float32(1 / 127)
SQRT_HALF = np.float32(0.5**0.5)


def to_bf16(bits: Bits) -> Bits:
    """Round fp32 numbers, given as bits, to bfloat16's, to nearest, ties to even; not for NaN."""
    rounded = np.right_shift(bits, np.uint32(16))
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded


def from_bf16(scales_B: Scales) -> Floats:
    """Return the scales as fp32."""
    return (scales_B.astype(np.uint32) << 16).view(np.float32)


def scales(top_B: Bits, step: np.float32, largest: int) -> Scales:
    """Return one scale per block: `step` times its largest magnitude. top_B: bits of those magnitudes."""
    finite_B = top_B < INFINITE
    step_B = np.where(finite_B, top_B, 0).astype(np.uint32).view(np.float32) * step
    scale_B = np.minimum(to_bf16(step_B.view(np.uint32)), largest)
    scale_B[scale_B < SMALLEST] = 0
    scale_B[~finite_B] = NOT_FINITE
    return scale_B.astype(np.uint16)


def check_scales(scales_B: Scales, largest: int) -> None:
    """Raise ValueError unless each is 0, NOT_FINITE, or from SMALLEST to `largest`."""
    right = (scales_B >= SMALLEST) & (scales_B <= largest)
    right |= (scales_B == 0) | (scales_B == NOT_FINITE)
    if not right.all():
        raise ValueError(f"{np.count_nonzero(~right)} of {right.size} scales are none")


def magnitudes(x_BK: Floats) -> Bits:
    """Return the bits of |x|, which are in the same order as the numbers; NaN is above all."""
    return np.bitwise_and(x_BK.view(np.uint32), np.uint32(ABSOLUTE))


# --- int8: scale * -127..127


def encode_int8(x_BK: Floats, scales_B: Scales, codes_BK: NDArray[np.int8]) -> None:
    """Write round(x / scale), ties to even. Within 127: rounding the scale moves it by less than 2^-8."""
    usable_B = (scales_B != 0) & (scales_B != NOT_FINITE)
    divisor_B = np.where(usable_B, from_bf16(scales_B), np.float32(np.inf))
    if (scales_B == NOT_FINITE).any():
        x_BK = np.where(np.isfinite(x_BK), x_BK, np.float32(0))
    ratio_BK = x_BK / divisor_B[:, None]
    np.rint(ratio_BK, out=ratio_BK)
    np.copyto(codes_BK, ratio_BK, casting="unsafe")


def decode_int8(codes_BK: NDArray[np.int8], scales_B: Scales, out_BK: Floats) -> None:
    """Write scale times code."""
    np.copyto(out_BK, codes_BK)
    out_BK *= from_bf16(scales_B)[:, None]


def check_int8(codes: NDArray[np.int8]) -> None:
    """Raise ValueError for -128, which is no code."""
    if codes.size and codes.min() == -128:
        raise ValueError("-128 is no code")


# --- ternary: scale * (-1, 0 or 1), five to a byte


TRITS, TRIPLES = 5, (1, 3, 9, 27, 81)
"""Codes in a byte, and the weight of each: 243 of the 256 values are used."""


def ternary_scales(x_BK: Floats) -> Scales:
    """Return the scale a of each block for which its numbers as -a, 0 or a have the least squared error.

    That is the mean of the m largest magnitudes, with the m for which (their sum)^2 / m is largest. Sums are
    in float64 and in one order, so that every machine finds the same bits.
    """
    size_BK = np.abs(x_BK)
    finite_B = np.isfinite(size_BK).all(1)
    size_BK[~finite_B] = 0
    size_BK.sort(axis=1)
    sum_BK = np.cumsum(size_BK[:, ::-1], axis=1, dtype=np.float64)
    num_K = np.arange(1, x_BK.shape[1] + 1)
    at_B = (sum_BK * sum_BK / num_K).argmax(1)
    mean_B = (sum_BK[np.arange(len(at_B)), at_B] / num_K[at_B]).astype(np.float32)
    top_B = mean_B.view(np.uint32)
    top_B[~finite_B] = INFINITE
    return scales(top_B, np.float32(1), LARGEST_E3M0)


def encode_ternary(x_BK: Floats, scales_B: Scales) -> Bytes:
    """Return a code per number: 1 above half of the scale, 2 below minus half of it, else 0; [B, K]."""
    usable_B = (scales_B != 0) & (scales_B != NOT_FINITE)
    half_B1 = np.where(usable_B, from_bf16(scales_B) / 2, np.float32(np.inf))[:, None]
    code_BK = (x_BK > half_B1).view(np.uint8)
    code_BK += 2 * (x_BK < -half_B1).view(np.uint8)
    return code_BK


def pack_ternary(codes: Bytes) -> Bytes:
    """Return codes below 3 packed five to a byte, the first one with weight 1; their number is any."""
    five = np.zeros((-(-codes.size // TRITS), TRITS), np.uint8)
    five.reshape(-1)[: codes.size] = codes
    packed = five[:, 0].copy()
    for i in range(1, TRITS):
        packed += TRIPLES[i] * five[:, i]
    return packed


def decode_ternary(packed: Bytes) -> Floats:
    """Return the five numbers -1, 0 or 1 of each byte; those of a byte above 242 are 0."""
    return np.take(_FIVES, packed, axis=0, mode="clip").reshape(-1)


def _fives() -> Floats:
    """Return the five numbers of a byte, for each of the 256."""
    trits = np.arange(3**TRITS)[:, None] // np.array(TRIPLES) % 3
    fives = np.zeros((256, TRITS), np.float32)
    fives[: len(trits)] = np.array([0, 1, -1], np.float32)[trits]
    return fives


_FIVES = _fives()


# --- e3m0: scale * (0 or +-2^-6..2^0), two to a byte


def encode_e3m0(x_BK: Floats, scales_B: Scales, codes_BK: Bytes) -> None:
    """Write the nearest power of two in the logarithm, 3 bits and the sign above them.

    0 below scale * 2^-6.5.

    Between powers of two times t = scale / sqrt(2) the difference of the bits keeps its upper part, which is
    the exponent of x / t: floor(log2(x / t)) = round(log2(x / scale)), with no logarithm and no rounding.
    """
    usable_B = (scales_B != 0) & (scales_B != NOT_FINITE)
    bound_B = (from_bf16(scales_B) * SQRT_HALF).view(np.uint32) - np.uint32(7 << EXPONENT_BIT)
    bound_B = np.where(usable_B, bound_B, np.uint32(INFINITE))
    code_BK = np.maximum(magnitudes(x_BK), bound_B[:, None])
    code_BK -= bound_B[:, None]
    code_BK >>= EXPONENT_BIT
    sign_BK = x_BK.view(np.uint32) >> 28
    sign_BK &= 8
    code_BK |= sign_BK
    np.copyto(codes_BK, code_BK, casting="unsafe")


def pack_nibbles(codes: Bytes) -> Bytes:
    """Return codes below 16 packed two to a byte, the first one in the lower half.

    Their number must be even.
    """
    pairs = codes.view(np.uint16)
    return (pairs | pairs >> 4).astype(np.uint8)


def decode_e3m0(packed: Bytes, scales_B: Scales, out_BK: Floats) -> None:
    """Write scale times the decoded powers of two."""
    np.take(_PAIRS, packed, out=out_BK.reshape(-1).view(np.uint64), mode="clip")
    out_BK *= from_bf16(scales_B)[:, None]


def _pairs() -> NDArray[np.uint64]:
    """Return both numbers of a byte, for each of the 256."""
    values = np.array([0, *(2.0 ** (code - 7) for code in range(1, 8))], np.float32)
    values = np.concatenate([values, -values])
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.uint64).reshape(-1)


_PAIRS = _pairs()
