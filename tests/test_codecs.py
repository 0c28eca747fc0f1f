"""Tests codecs: bounded loss, NaN stays visible, malformed data is refused, equal bits on all machines."""

from math import ceil, frexp, log2

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aedit.proto.codecs import Feedback, codec, topk
from aedit.proto.codecs.codecs import GRAIN

NAMES = ("fp32", "bf16", "int8", "e3m0", "ternary", "topk")
COARSE = ("e3m0", "ternary", "topk")
BLOCK = {"fp32": 1, "bf16": 1, "int8": 256, "e3m0": 256, "ternary": 256, "topk": 4096}
LARGEST = 1.5 * 2.0**127  # bf16 calls what is above 3.39e38 infinite
NEGLIGIBLE = 127 * 2.0**-100

each = pytest.mark.parametrize("name", NAMES)


def random_numbers(seed, numel, spread):
    """Return normal numbers times e to a normal power, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(numel) * np.exp(spread * rng.standard_normal(numel)) * 1e-3
    return np.where(rng.random(numel) < 0.05, 0, x).astype(np.float32)


RANDOM = st.builds(
    random_numbers,
    st.integers(0, 2**32),
    st.sampled_from((1, 2, 31, 255, 256, 257, 1000, 4095, 4096, 4097, 12301)),
    st.sampled_from((0.0, 1.0, 6.0)),
)
ANY = arrays(np.float32, st.integers(1, 600), elements=st.floats(-LARGEST, LARGEST, width=32))
FINITE = st.one_of(RANDOM, ANY)


def through(name, x):
    """Return `x` after encoding and decoding."""
    how = codec(name)
    payload = how.encode(x)
    how.is_valid(payload, x.size)
    return how.decode(payload, x.size, 0, x.size)


def by_block(name, x):
    return [x[start : start + BLOCK[name]] for start in range(0, x.size, BLOCK[name])]


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32).tolist()


# --- a reference: one number at a time, in float64


def as_bf16(value):
    """Return the nearest number of 8 significant bits, ties to even."""
    fraction, exponent = frexp(value)
    return round(fraction * 256) / 256 * 2.0**exponent


def scale_of(top, step):
    scale = as_bf16(float(np.float32(top) * np.float32(step)))
    return scale if scale >= 2.0**-100 else 0.0


def int8_reference(block):
    scale = scale_of(np.abs(block).max(), 1 / 127)
    return [round(float(x) / scale) * scale if scale else 0.0 for x in block]


def e3m0_reference(block):
    scale = min(scale_of(np.abs(block).max(), 1.0), float.fromhex("0x1.FEp127"))
    return [power_of_two(float(x), scale) for x in block]


def power_of_two(x, scale):
    if scale == 0 or x == 0:
        return 0.0
    octave = log2(abs(x) / scale)
    if abs(octave % 1 - 0.5) < 1e-6:
        return None  # in the middle, as near as fp32 can tell
    return np.sign(x) * scale * 2.0 ** round(octave) if round(octave) > -7 else 0.0


def kept_of(width):
    return ceil(192 * width / 4096)


def topk_reference(chunk):
    """Try every split of the sorted magnitudes; keep the one with the least squared error."""
    size = np.abs(chunk.astype(np.float64))
    largest = sorted(range(len(chunk)), key=lambda i: (-size[i], i))[: kept_of(len(chunk))]
    order = np.sort(size[largest])
    splits = [(order[:at], order[at:]) for at in range(1, len(order))] or [(order, order)]
    low, high = min(splits, key=lambda split: sum(((part - part.mean()) ** 2).sum() for part in split))
    levels = [scale_of(part.mean(), 1.0) for part in (low, high)]
    kept = {i: np.sign(chunk[i]) * levels[int(size[i] > sum(levels) / 2)] for i in largest}
    return [kept.get(i, 0.0) for i in range(len(chunk))]


def ternary_reference(block):
    """Try every number of kept magnitudes; keep the one with the least squared error."""
    size = np.sort(np.abs(block.astype(np.float64)))[::-1]
    size = np.concatenate([size, np.zeros(256 - len(size))])  # a short block counts as a whole one

    def error(m):
        return ((size[:m] - size[:m].mean()) ** 2).sum() + (size[m:] ** 2).sum()

    scale = scale_of(size[: min(range(1, 257), key=error)].mean(), 1.0)
    return [np.sign(x) * scale if scale and abs(float(x)) > scale / 2 else 0.0 for x in block]


REFERENCE = {
    "int8": int8_reference,
    "e3m0": e3m0_reference,
    "ternary": ternary_reference,
    "topk": topk_reference,
}


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_each_number_is_what_a_reference_in_float64_says(name, spread):
    x = random_numbers(7, 5000, spread)
    expected = [value for block in by_block(name, x) for value in REFERENCE[name](block)]
    clear = [i for i, value in enumerate(expected) if value is not None]
    assert len(clear) > 4990
    np.testing.assert_array_equal(
        through(name, x)[clear], np.array(expected, object)[clear].astype(np.float64)
    )


@given(arrays(np.uint32, st.integers(1, 300), elements=st.integers(0, 2**32 - 1)))
def test_bf16_is_what_torch_makes_of_any_bits(any_bits):
    x = any_bits.view(np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(through("bf16", x), expected)


def test_bf16_rounds_what_lies_in_the_middle_to_even():
    between = np.array([0x3F808000, 0x3F818000, 0x3F828000], np.uint32).view(np.float32)
    assert bits(through("bf16", between)) == [0x3F800000, 0x3F820000, 0x3F820000]


# --- what is lost


@pytest.mark.parametrize("name", REFERENCE)
@given(x=FINITE)
@settings(max_examples=60, deadline=None)
def test_what_is_lost_is_bounded(name, x):
    for block, decoded in zip(by_block(name, x), by_block(name, through(name, x)), strict=True):
        assert np.all(np.abs(block.astype(np.float64) - decoded) <= bound(name, block))


def bound(name, block):
    """Return the largest permitted error of each number of a block."""
    size = np.abs(block.astype(np.float64))
    top = size.max()
    half_a_scale = top / 127 * (1 + 2**-8) / 2
    if name == "int8":
        return np.full(len(block), half_a_scale) + NEGLIGIBLE
    if name == "e3m0":
        # sqrt(2) either way, and the scale itself is rounded by 2^-8; zero below scale * 2^-6.5
        return np.maximum(size * (2**0.5 - 1), 2**-6.5 * top) * (1 + 2**-7) + NEGLIGIBLE
    if name == "ternary":  # a mean of some of them; what is below half of it becomes 0
        return np.maximum(top - size, size) * (1 + 2**-8) + NEGLIGIBLE
    kept = np.sort(size)[-kept_of(len(size)) :]
    between = (kept[-1] - kept[0]) * (1 + 2**-8) + kept[-1] * 2**-8
    return np.where(size > kept[0], between, size + between) + NEGLIGIBLE


@each
@given(x=FINITE)
@example(x=np.array([0.0, -2.6e-42], np.float32))
@settings(max_examples=40, deadline=None)
def test_encoding_what_was_decoded_changes_no_bit(name, x):
    once = through(name, x)
    assert bits(through(name, once)) == bits(once)


@each
@given(x=FINITE)
@settings(max_examples=30, deadline=None)
def test_the_opposite_decodes_to_the_opposite(name, x):
    if name == "topk":  # any of several equal magnitudes may be kept
        x = x[np.unique(np.abs(x), return_index=True)[1]]
    np.testing.assert_array_equal(through(name, -x), -through(name, x))


@each
def test_zeros_stay_zeros(name):
    x = random_numbers(3, 10_000, 1.0)
    x[512:5000] = 0
    assert np.all(through(name, x)[512:5000] == 0)
    assert bits(through(name, np.zeros(777, np.float32))) == [0] * 777


@each
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1.0, 3.38e38])
def test_numbers_of_any_size_come_through_finite(name, size):
    x = (random_numbers(5, 5000, 0.0) / 5e-3).clip(-1, 1).astype(np.float64) * size
    decoded = through(name, x.astype(np.float32))
    assert np.all(np.abs(decoded.astype(np.float64)) <= size * 1.01)


# --- what is not finite


@each
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 9999])
def test_what_is_not_finite_stays_visible_and_harms_no_other_block(name, poison, place):
    x = random_numbers(1, 10_001, 1.0)
    healthy = through(name, x)
    x[place] = poison
    poisoned = through(name, x)
    start = place // BLOCK[name] * BLOCK[name]
    assert not np.isfinite(poisoned[start : start + BLOCK[name]]).all()
    if name in ("fp32", "bf16", "int8", "e3m0", "ternary"):
        assert not np.isfinite(poisoned[place])
    elsewhere = np.ones(x.size, bool)
    elsewhere[start : start + BLOCK[name]] = False
    np.testing.assert_array_equal(poisoned[elsewhere], healthy[elsewhere])


def test_bits_that_rounding_would_carry_into_a_number_stay_a_nan():
    all_ones = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(through("bf16", all_ones)).all()


# --- payloads


@each
@given(numel=st.integers(1, 40_000))
@settings(max_examples=30, deadline=None)
def test_a_payload_has_the_announced_length_and_decodes_in_slices_as_in_whole(name, numel):
    how, x = codec(name), random_numbers(numel, numel, 1.0)
    payload = how.encode(x)
    assert payload.nbytes == how.num_bytes(numel)
    whole = how.decode(payload, numel, 0, numel)
    for step in (GRAIN, 3 * GRAIN):
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            room = np.full(step + 5, 7, np.float32)
            got = how.decode(payload, numel, start, stop, room)
            assert bits(got) == bits(whole[start:stop])
            assert np.shares_memory(got, room)
            assert np.all(room[stop - start :] == 7)


@each
def test_a_payload_may_be_written_in_slices_into_a_place_that_is_there(name):
    how, x = codec(name), random_numbers(2, 50_001, 1.0)
    place = memoryview(bytearray(how.num_bytes(x.size)))
    for start in reversed(range(0, x.size, 5 * GRAIN)):
        how.encode_slice(x[start : start + 5 * GRAIN], place, x.size, start)
    assert bytes(place) == bytes(how.encode(x))
    assert bytes(how.encode(x, memoryview(bytearray(how.num_bytes(x.size))))) == bytes(place)


def test_what_is_decoded_belongs_to_the_caller():
    x = random_numbers(2, 5000, 1.0)
    payload = codec("fp32").encode(x)
    decoded = codec("fp32").decode(payload, x.size, 0, x.size)
    decoded += 1
    assert bits(codec("fp32").decode(payload, x.size, 0, x.size)) == bits(x)


@pytest.mark.parametrize(
    ("name", "most"),
    [("fp32", 4), ("bf16", 2), ("int8", 1.01), ("e3m0", 0.52), ("ternary", 0.21), ("topk", 0.05)],
)
def test_bytes_per_parameter_are_as_promised(name, most):
    assert codec(name).num_bytes(1_000_000) <= most * 1_000_000
    assert codec(name).feedback is (name in COARSE)


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(ValueError, match="zip"):
        codec("zip")


def spoiled(name, numel, place, value, width=np.uint8):
    """Return a payload in which the number at byte `place` is `value`."""
    payload = bytearray(codec(name).encode(random_numbers(4, numel, 1.0)))
    at = place % len(payload)
    payload[at : at + np.dtype(width).itemsize] = np.array([value], width).tobytes()
    return payload


NUMEL = 8193  # 33 blocks; two chunks of 4096 and one number
RECORD = 204  # bytes of a chunk of 4096: 4 of magnitudes, 24 + 24 of codes, 96 + 56 of places
UPPER = 4 + 48 + 96  # offset of the places' upper bits


@pytest.mark.parametrize(
    ("name", "payload", "reason"),
    [
        ("fp32", bytes(4 * NUMEL - 1), "bytes"),
        ("bf16", bytes(2 * NUMEL + 2), "bytes"),
        ("int8", b"", "bytes"),
        ("int8", spoiled("int8", NUMEL, 2, 0x7F80, np.uint16), "scales"),
        ("int8", spoiled("int8", NUMEL, 2, 0x7FC1, np.uint16), "scales"),
        ("int8", spoiled("int8", NUMEL, 2, 0xBF80, np.uint16), "scales"),
        ("int8", spoiled("int8", NUMEL, 2, 0x0001, np.uint16), "scales"),
        ("int8", spoiled("int8", NUMEL, 2, 0x7C02, np.uint16), "scales"),  # 127 of it are infinite
        ("int8", spoiled("int8", NUMEL, -9, -128, np.int8), "-128"),
        ("e3m0", spoiled("e3m0", NUMEL, 64, 0xFFC0, np.uint16), "scales"),
        ("e3m0", spoiled("e3m0", NUMEL, -1, 0x10), "after the last"),
        ("ternary", bytes(66 + 2 * 820), "bytes"),
        ("ternary", spoiled("ternary", NUMEL, 64, 0xFFC0, np.uint16), "scales"),
        ("ternary", spoiled("ternary", NUMEL, 66, 243), "above 242"),
        ("ternary", spoiled("ternary", NUMEL, 66 + 819, 3), "after the last"),  # 4096 = 5 * 819 + 1
        ("ternary", spoiled("ternary", NUMEL, -1, 3), "after the last"),
        ("topk", bytes(2 * RECORD - 1), "bytes"),
        ("topk", spoiled("topk", NUMEL, 0, 0x8000, np.uint16), "scales"),
        ("topk", spoiled("topk", NUMEL, RECORD, 0x7FC1, np.uint16), "scales"),
        ("topk", spoiled("topk", NUMEL, 2, 0x7FC0, np.uint16), "lower of two"),
        ("topk", spoiled("topk", NUMEL, 0, 0x7F7F, np.uint16), "lower of two"),
        ("topk", spoiled("topk", NUMEL, UPPER, 0, np.uint64), "192 places"),
        ("topk", spoiled("topk", NUMEL, UPPER, 2**64 - 1, np.uint64), "192 places"),
        ("topk", spoiled("topk", NUMEL, RECORD - 1, 0x80), "192 places|unused"),
    ],
)
def test_a_malformed_payload_is_refused_with_its_reason(name, payload, reason):
    with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
        codec(name).is_valid(payload, NUMEL)


def topk_payload(lower, upper, width=4096):
    """Return a payload of one chunk, of zeros at places given by their lower bits and upper bits' ones."""
    kept = kept_of(width)
    bits = np.zeros(8 * 152, np.uint8)
    for i, low in enumerate(lower):
        bits[4 * i : 4 * i + 4] = [low >> b & 1 for b in range(4)]
    bits[4 * kept + np.asarray(upper)] = 1
    return bytes(52) + np.packbits(bits, bitorder="little").tobytes()


def test_places_beyond_repeated_or_out_of_order_are_refused():
    first = list(range(192))  # places 0..191 by the lower bits of 16 at a time
    lower, upper = [i % 16 for i in first], [i // 16 + i for i in first]
    codec("topk").is_valid(topk_payload(lower, upper), 4096)
    with pytest.raises(ValueError, match="do not go up"):
        codec("topk").is_valid(topk_payload([0, 0, *lower[2:]], upper), 4096)
    with pytest.raises(ValueError, match="do not go up"):
        codec("topk").is_valid(topk_payload([1, 0, *lower[2:]], upper), 4096)
    with pytest.raises(ValueError, match="beyond"):  # place 47 of a chunk of 42
        codec("topk").is_valid(bytes.fromhex("803f00400202f309"), 42)


def test_a_ternary_payload_has_the_documented_bytes():
    """Scale 2.0 (0x4000); seven numbers 0 2 -2 0 0 | 2 0: 3 * 1 + 9 * 2 = 21, then 1."""
    x = np.array([0.5, 2, -2, 0, 0.9, 2, -0.1], np.float32)
    assert bytes(codec("ternary").encode(x)).hex() == "0040" + "15" + "01"
    assert through("ternary", x).tolist() == [0, 2, -2, 0, 0, 2, 0]


def damaged(name, seed, numel, flips):
    """Return a payload some of whose bits are flipped; None if it is refused."""
    how, rng = codec(name), np.random.default_rng(seed)
    payload = bytearray(how.encode(random_numbers(seed, numel, 1.0)))
    for at in rng.integers(0, 8 * len(payload), flips):
        payload[at // 8] ^= 1 << at % 8
    try:
        how.is_valid(payload, numel)
    except ValueError:
        return None
    return payload


@given(st.integers(0, 2**32), st.sampled_from((1, 42, 300, 4096, 8193)), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_damaged_ternary_payload_is_refused_or_decodes_to_numbers_of_its_scales(seed, numel, flips):
    how, payload = codec("ternary"), damaged("ternary", seed, numel, flips)
    if payload is None:
        return
    num = -(-numel // 256)
    scale = (np.frombuffer(payload, "<u2", num).astype(np.uint32) << 16).view(np.float32)
    size = np.abs(how.decode(payload, numel, 0, numel))
    of_scale = np.repeat(scale, 256)[:numel]
    assert np.all((size == 0) | (size == of_scale) | (np.isnan(size) & np.isnan(of_scale)))
    for start in range(0, numel, GRAIN):  # each part alone is what it is in the whole
        stop = min(start + GRAIN, numel)
        np.testing.assert_array_equal(np.abs(how.decode(payload, numel, start, stop)), size[start:stop])


def test_a_record_has_the_documented_bytes():
    """Magnitudes 1.0 (0x3F80) and 2.0 (0x4000), -2.0 among them: 42 numbers keep two, at 3 and 40."""
    x = np.zeros(42, np.float32)
    x[3], x[40] = 1.0, -2.0
    assert topk.num_kept(42) == 2
    # lower 4 bits: 3, 8 -> 0x83; upper parts 0 and 2: ones at 0 and 3 -> 0b1001
    assert bytes(codec("topk").encode(x)).hex() == "803f0040" + "02" + "02" + "8309"


def test_of_equal_magnitudes_the_first_are_kept_on_every_machine():
    x = np.ones(4096, np.float32) * np.where(np.arange(4096) % 2, 1, -1).astype(np.float32)
    kept = np.flatnonzero(through("topk", x))
    assert kept.tolist() == list(range(192))


@given(st.integers(0, 2**32), st.sampled_from((1, 42, 300, 4096, 8193)), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_damaged_topk_payload_is_refused_or_decodes_to_as_many_numbers(seed, numel, flips):
    payload = damaged("topk", seed, numel, flips)
    if payload is None:
        return
    decoded = codec("topk").decode(payload, numel, 0, numel)
    kept = 192 * (numel // 4096) + (kept_of(numel % 4096) if numel % 4096 else 0)
    assert np.count_nonzero(decoded) <= kept
    assert not np.isinf(decoded).any()


@each
@given(data=st.data(), numel=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_whatever_is_valid_decodes_without_a_warning_to_what_is_finite_or_nan(name, data, numel):
    how = codec(name)
    payload = data.draw(st.binary(min_size=how.num_bytes(numel), max_size=how.num_bytes(numel)))
    try:
        how.is_valid(payload, numel)
    except ValueError:
        return
    decoded = how.decode(payload, numel, 0, numel)
    assert name in ("fp32", "bf16") or not np.isinf(decoded).any()


@pytest.mark.parametrize("name", ["int8", "e3m0"])
def test_the_largest_scale_decodes_to_what_is_finite(name):
    decoded = through(name, np.full(256, np.finfo(np.float32).max, np.float32))
    assert np.isfinite(decoded).all()
    assert np.all(decoded > 3.3e38)


# --- error feedback


@pytest.mark.parametrize("name", COARSE)
@given(seed=st.integers(0, 2**32), numel=st.sampled_from((1, 300, 4096, 70_001)), rounds=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_all_that_was_decoded_is_all_that_was_given_less_what_is_owed(name, seed, numel, rounds):
    residual = np.zeros(numel, np.float32)
    feedback = Feedback(codec(name), residual)
    given, decoded, largest = np.zeros(numel), np.zeros(numel), 0.0
    for i in range(rounds):
        x = random_numbers(seed + i, numel, 1.0)
        payload = feedback.encode(x)
        feedback.taken(x, payload)
        given += x
        decoded += codec(name).decode(payload, numel, 0, numel)
        largest = max(largest, np.abs(x).max(), np.abs(given).max())  # the sum may cancel
    np.testing.assert_allclose(decoded + residual, given, rtol=0, atol=1e-5 * largest + 1e-12)


@pytest.mark.parametrize("name", COARSE)
def test_a_constant_push_arrives_in_full_over_time_and_only_with_feedback(name):
    x = random_numbers(11, 8192, 1.0)
    feedback = Feedback(codec(name), np.zeros(x.size, np.float32))
    arrived, rounds = np.zeros(x.size), 400
    for _ in range(rounds):
        payload = feedback.encode(x)
        feedback.taken(x, payload)
        arrived += codec(name).decode(payload, x.size, 0, x.size)
    missing = np.linalg.norm(arrived / rounds - x) / np.linalg.norm(x)
    without = np.linalg.norm(through(name, x) - x) / np.linalg.norm(x)
    assert missing < 0.25 * without


@pytest.mark.parametrize("name", COARSE)
def test_a_push_that_nobody_took_changes_nothing_and_comes_again_the_same(name):
    feedback = Feedback(codec(name), random_numbers(1, 5000, 0.0))
    before = feedback.residual.copy()
    x = random_numbers(2, 5000, 1.0)
    first = bytes(feedback.encode(x))
    assert bytes(feedback.encode(x)) == first
    assert bits(feedback.residual) == bits(before)


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_push_is_shown_once_and_owed_never(name, poison):
    feedback = Feedback(codec(name), np.zeros(5000, np.float32))
    x = random_numbers(2, 5000, 1.0)
    x[17] = poison
    payload = feedback.encode(x)
    assert not np.isfinite(codec(name).decode(payload, x.size, 0, x.size)).all()
    feedback.taken(x, payload)
    assert np.isfinite(feedback.residual).all()
