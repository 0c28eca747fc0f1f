"""Tests of transfers: they restore every bit, their format is fixed, and no bytes make them do harm."""

import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from aedit.proto.versions import PATTERNS, patch, patterns
from aedit.proto.versions.patch import unit_hash

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38)


def restored(values, base):
    data, needs_base = patch.encode_transfer(values, base)
    assert len(data) <= patch.most_bytes(values.size, values.itemsize)
    out = np.zeros_like(values)
    patch.decode_transfer(memoryview(data), base if needs_base else None, out)
    return data, out


def drawn(rng, dtype, size):
    return rng.integers(0, 2 ** (8 * PATTERNS[dtype].itemsize), size, PATTERNS[dtype])


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 1000, 2**20 + 1])
def test_a_transfer_restores_every_bit_from_its_base_and_from_nothing(dtype, share, size):
    rng = np.random.default_rng(size)
    base = drawn(rng, dtype, size)
    values = np.where(rng.random(size) < share, drawn(rng, dtype, size), base)
    for before in (base, None):
        _, out = restored(values, before)
        np.testing.assert_array_equal(out, values)


def test_signs_of_zero_nan_payloads_and_infinities_are_values_like_any_other():
    base = np.array(SPECIAL * len(SPECIAL), np.float32)
    values = np.repeat(np.array(SPECIAL, np.float32), len(SPECIAL))
    values.view(np.uint32)[3] = 0x7FC12345  # a NaN with a payload
    for dtype in ("fp32", "bf16"):
        wanted = patterns(values, dtype)
        _, out = restored(wanted, patterns(base, dtype))
        assert out.tobytes() == wanted.tobytes()


def test_patterns_are_those_of_torch():
    rng = np.random.default_rng(0)
    drawn_bits = rng.integers(0, 2**32, 1_100_000, np.uint32)
    values = np.concatenate([drawn_bits, np.array(SPECIAL, np.float32).view(np.uint32)]).view(np.float32)
    theirs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    ours, is_nan = patterns(values, "bf16"), np.isnan(values)
    np.testing.assert_array_equal(ours[~is_nan], theirs[~is_nan])
    assert is_nan.sum() > 1000
    assert set(ours[is_nan].tolist()) == {0x7FC0}, "one NaN, whatever it was"
    np.testing.assert_array_equal(patterns(values.reshape(2, -1), "fp32"), values.view(np.uint32))
    assert unit_hash(patterns(values, "fp32")) == unit_hash(values.view(np.uint32))
    with pytest.raises(ValueError, match="values are float64, expected float32 for bf16"):
        patterns(values.astype(np.float64), "bf16")


def test_the_shortest_encoding_is_taken_by_measured_size():
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, 2**20).astype(np.float32)

    def size(lr, dtype="bf16"):
        moved = (weights + rng.normal(0, 0.8 * lr, weights.size)).astype(np.float32)
        return len(restored(patterns(moved, dtype), patterns(weights, dtype))[0]) / (2 * weights.size)

    assert size(0) < 1e-4
    assert size(1e-6) < 0.02
    assert size(1e-5) < 0.1
    assert size(1e-4) < 0.3
    whole = patterns(weights, "bf16")
    dense = len(patch.encode_transfer(whole)[0])
    assert dense < 0.7 * whole.nbytes, "exponents take few bits"
    noise = drawn(rng, "bf16", 2**20)
    assert len(patch.encode_transfer(noise)[0]) == noise.nbytes + 1, (
        "what cannot be shortened is sent as it is"
    )
    assert patch.encode_transfer(noise, whole)[1] is False, "and needs no base"


def test_the_bytes_of_the_format_are_fixed():
    """docs/protocol.md describes them; they are written here by hand."""
    base = np.arange(0x4000, 0x4000 + 300, dtype="<u2")
    values = base.copy()
    values[2] += 1  # gap 2, z = 1 -> 1
    values[3] -= 1  # gap 0, z = -1 -> 0
    values[299] += 300  # gap 295 -> A7 02, z = 300 -> 599 -> D7 04
    gaps, differences = bytes([2, 0, 0xA7, 2]), bytes([1, 0, 0xD7, 4])
    expected = bytes([2]) + struct.pack("<5I", 3, 4, 4, 4, 4) + gaps + differences
    assert patch.encode_transfer(values, base) == (expected, True)
    out = np.zeros_like(values)
    patch.decode_transfer(memoryview(expected), base, out)
    np.testing.assert_array_equal(out, values)
    # The same numbers with zlib, and all values in planes and raw.
    squeezed = [zlib.compress(part) for part in (gaps, differences)]
    assert all(len(part) > 4 for part in squeezed), "too long for this format: refused"
    low, high = values.view(np.uint8)[::2].tobytes(), values.view(np.uint8)[1::2].tobytes()
    packed = zlib.compress(high)
    planes = bytes([1]) + struct.pack("<I", 300) + low + struct.pack("<I", len(packed)) + packed
    for data in (planes, bytes([0]) + values.tobytes()):
        out[:] = 0
        patch.decode_transfer(memoryview(data), None, out)
        np.testing.assert_array_equal(out, values)
    assert patch.encode_transfer(np.full(4, 0x1234, "<u2")) == (bytes([0]) + b"\x34\x12" * 4, False)


def test_variable_length_numbers_are_leb128():
    numbers = [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**20 - 1, 2**32 - 1, 2**63, 2**64 - 1]

    def leb(n):
        out = []
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        return [*out, n]

    rng = random.Random(0)
    numbers += [rng.getrandbits(rng.randrange(1, 65)) for _ in range(1000)]
    data = patch.encode_numbers(np.array(numbers, np.uint64))
    assert data.tolist() == [byte for n in numbers for byte in leb(n)]
    assert patch.decode_numbers(data, len(numbers), 64).tolist() == numbers
    for wrong, count, bits in (
        ([128], 1, 64),  # ends within a number
        ([1, 2], 1, 64),  # one more
        ([1], 2, 64),  # one less
        ([255] * 9 + [2], 1, 64),  # 65 bits
        ([255] * 10 + [1], 1, 64),
        ([255, 255, 4], 1, 16),  # 17 bits
    ):
        with pytest.raises(ValueError, match="number"):
            patch.decode_numbers(np.array(wrong, np.uint8), count, bits)


def patch_of(count, gaps, differences, sizes=None):
    sizes = sizes or (len(gaps), len(gaps), len(differences), len(differences))
    return bytes([2]) + struct.pack("<5I", count, *sizes) + gaps + differences


BOMB = zlib.compress(bytes(2**26), 9)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends at byte 0"),
        (b"\7", "kind 7"),
        (bytes([0]) + bytes(199), "ends at byte 200"),
        (bytes([0]) + bytes(201), "1 bytes follow"),
        (patch_of(101, bytes(101), bytes(101)), "101 changed elements of 100"),
        (patch_of(1, bytes([100]), b"\0"), "place 100 of 100"),
        (patch_of(2, bytes([99, 0]), b"\0\0"), "place 100 of 100"),
        (patch_of(1, b"\xff\xff\x40", b"\0"), "too large"),
        (patch_of(1, b"\0", b"\xff\xff\x03"), "difference is too large"),
        (patch_of(2, b"\0", b"\0\0"), "1 bytes for 2 numbers"),
        (patch_of(1, b"\0", b"\0", (2**32 - 1, 2**32 - 1, 1, 1)), "4294967295 bytes for 1 numbers"),
        (patch_of(1, b"\0", b"\0", (1, 2**32 - 1, 1, 1)), "ends at byte"),
        (patch_of(100, BOMB, b"\0", (300, len(BOMB), 100, 1)), "bytes of zlib for 300"),
        (patch_of(100, BOMB[:250], bytes(100), (300, 250, 100, 100)), "another length than 300"),
        (patch_of(3, b"abcd", b"\0\0\0", (9, 4, 3, 3)), "not zlib"),
        (bytes([1]) + struct.pack("<I", 90) + BOMB[:90], "ends at byte|another length than 100"),
        (bytes([1]) + struct.pack("<I", 2**32 - 1), "ends at byte 5"),
    ],
)
def test_what_no_encoder_writes_is_refused_before_memory_is_taken(data, reason):
    base, out = np.zeros(100, "<u2"), np.zeros(100, "<u2")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=reason):
            patch.decode_transfer(memoryview(data), base, out)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_patch_without_its_base_is_refused():
    with pytest.raises(ValueError, match="kind 2 without a base"):
        patch.decode_transfer(memoryview(patch_of(1, b"\0", b"\0")), None, np.zeros(100, "<u2"))


def test_random_and_damaged_bytes_give_values_or_a_value_error():
    rng = np.random.default_rng(2)
    base = drawn(rng, "bf16", 3000)
    values = np.where(rng.random(base.size) < 0.2, base + 1, base).astype("<u2")
    good, _ = patch.encode_transfer(values, base)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        cut = int(rng.integers(len(data))) if rng.random() < 0.3 else len(data)
        try:
            patch.decode_transfer(memoryview(data)[:cut], base, np.empty_like(base))
        except ValueError:
            refused += 1
    assert refused > 500
