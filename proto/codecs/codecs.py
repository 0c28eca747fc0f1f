"""Codecs: the numbers of a unit as fp32 or in fewer bits. NumPy only, for the hub and the node agent.

A payload has no header: its length follows from the number of elements, and it is little-endian.

    fp32, bf16   the numbers; bf16 rounds to nearest, ties to even
    int8         a scale (2 bytes) per 256 numbers, then a byte each: 1.008 bytes per number
    e3m0         a scale (2 bytes) per 256 numbers, then 4 bits each: sign and power of two, 0.508 bytes
                 (Streaming DiLoCo, arXiv:2501.18512, section 3.3)
    ternary      a scale (2 bytes) per 256 numbers, then -1, 0 or 1 times it, five to a byte: 0.208 bytes
    topk         the 192 largest of every 4096, each as one of two magnitudes with its sign: 0.0498 bytes
                 (chunked, with 2-bit values, as in SparseLoCo, arXiv:2508.15706)

What is not finite stays visible: it decodes to what is not finite, with its whole block of 256 (int8, e3m0,
ternary) or the kept ones of its chunk (topk). So the receiver can detect it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aedit.proto.codecs import blocks, topk
from aedit.types import imported, is_import_path

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Payload = bytes | bytearray | memoryview
T = TypeVar("T", bound=np.generic)

BLOCK = 256

GRAIN = 4096
"""Slices begin at multiples of this."""

SLICE = 16 * GRAIN
"""Elements worked on at a time: what a core's cache holds, with what is computed from them."""


def slices(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of all slices of `numel` elements, in order."""
    return ((start, min(start + SLICE, numel)) for start in range(0, numel, SLICE))


class Codec(ABC):
    """A stateless encoding of `numel` fp32 numbers as bytes."""

    name: str
    feedback = False
    """So coarse that its error must travel with the next push (see `Feedback`)."""

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Return the exact length of the payload."""

    @abstractmethod
    def encode_slice(self, x: Floats, out: memoryview, numel: int, start: int) -> None:
        """Write the elements start..start + len(x) into `out`, the payload of all `numel`.

        Both ends are multiples of GRAIN or the end.
        """

    @abstractmethod
    def decode(self, data: Payload, numel: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Return elements start..stop of a valid payload, in `out` or in a new array.

        Both ends are multiples of GRAIN or the end.
        """

    def encode(self, x: Floats, out: memoryview | None = None) -> memoryview:
        """Return the payload of the 1-d contiguous `x`, in `out` if given, of exactly `num_bytes`."""
        payload = np.empty(self.num_bytes(x.size), np.uint8).data if out is None else out
        for start, stop in slices(x.size):
            self.encode_slice(x[start:stop], payload, x.size, start)
        return payload

    def is_valid(self, data: Payload, numel: int) -> None:
        """Raise ValueError with the reason unless `data` is a payload of `numel` elements.

        Whether they are finite is for the receiver to check: a valid payload decodes to what is finite or
        NaN, never with a warning.
        """
        size = memoryview(data).nbytes
        if size != self.num_bytes(numel):
            raise ValueError(f"{self.name}: {size} bytes, {numel} elements have {self.num_bytes(numel)}")
        try:
            self._check(data, numel)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _check(self, data: Payload, numel: int) -> None:
        """Raise ValueError for an error other than the length."""
        return


def codec(name: str) -> Codec:
    """Return the codec of that name: fp32, bf16, int8, e3m0, ternary, topk, or a class by import path.

    Raises ValueError for other names, and for what cannot be imported or is no codec. Never call it with a
    name that a peer has chosen.
    """
    for kind in (Fp32, Bf16, Int8, E3M0, Ternary, TopK):
        if kind.name == name:
            return kind()
    if not is_import_path(name):
        known = "fp32, bf16, int8, e3m0, ternary, topk"
        raise ValueError(f"no codec is called {name!r}: {known} or package.module:Name")
    made: Codec = imported(name, "hub.codec", ("num_bytes", "encode_slice", "decode"))()
    made.name = name
    return made


def try_codec(path: str) -> None:
    """Encode and decode two grains and a rest with the codec `path`, before a run relies on it.

    Raises ValueError if lengths, shapes or dtypes are wrong, or if a NaN decodes to a
    number. Errors of its own pass.
    """
    made, numel = codec(path), 2 * GRAIN + 5
    x = np.linspace(-1, 1, numel, dtype=np.float32)
    payload = made.encode(x)
    if payload.nbytes != made.num_bytes(numel):
        raise ValueError(f"encode made {payload.nbytes} bytes, num_bytes says {made.num_bytes(numel)}")
    made.is_valid(payload, numel)
    for start, stop in ((0, numel), (GRAIN, 2 * GRAIN), (2 * GRAIN, numel)):
        for out in (None, np.empty(stop - start, np.float32)):
            found = made.decode(payload, numel, start, stop, out)
            kind = (type(found), getattr(found, "dtype", None), getattr(found, "shape", None))
            if kind != (np.ndarray, np.dtype(np.float32), (stop - start,)):
                raise ValueError(f"decode returned {kind}, expected a float32 array of {stop - start}")
            if not np.isfinite(found).all():
                raise ValueError("decode returned numbers that are not finite for numbers that are")
    x[7] = np.nan
    if np.isfinite(made.decode(made.encode(x), numel, 0, numel)).all():
        raise ValueError("a NaN was lost: what is not finite must decode to what is not finite")


class Fp32(Codec):
    """Numbers as they are."""

    name = "fp32"

    def num_bytes(self, numel: int) -> int:
        """See `Codec.num_bytes`."""
        return 4 * numel

    def encode_slice(self, x: Floats, out: memoryview, numel: int, start: int) -> None:
        """See `Codec.encode_slice`."""
        np.frombuffer(out, np.float32)[start : start + x.size] = x

    def decode(self, data: Payload, numel: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """See `Codec.decode`."""
        out = _room(out, stop - start)
        np.copyto(out, np.frombuffer(data, np.float32)[start:stop])
        return out


class Bf16(Codec):
    """The upper half of each number. Above 3.39e38 the nearest is infinite."""

    name = "bf16"

    def num_bytes(self, numel: int) -> int:
        """See `Codec.num_bytes`."""
        return 2 * numel

    def encode_slice(self, x: Floats, out: memoryview, numel: int, start: int) -> None:
        """See `Codec.encode_slice`."""
        to = np.frombuffer(out, np.uint16)[start : start + x.size]
        np.copyto(to, blocks.to_bf16(x.view(np.uint32)), casting="unsafe")
        nan = np.isnan(x)  # rounding may carry its bits over into a number
        if nan.any():
            to[nan] = blocks.NOT_FINITE

    def decode(self, data: Payload, numel: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """See `Codec.decode`."""
        out = _room(out, stop - start)
        bits = out.view(np.uint32)
        np.copyto(bits, np.frombuffer(data, np.uint16)[start:stop])
        bits <<= 16
        return out


class _Blocks(Codec):
    """A scale for every 256 numbers, all scales first."""

    step: np.float32
    largest: int

    def num_bytes(self, numel: int) -> int:
        return 2 * _up(numel, BLOCK) + self._code_bytes(numel)

    def encode_slice(self, x: Floats, out: memoryview, numel: int, start: int) -> None:
        scales, codes = self._parts(out, numel)
        x_BK = _padded(x, BLOCK).reshape(-1, BLOCK)
        scales_B = self._scales(x_BK)
        scales[start // BLOCK : start // BLOCK + len(scales_B)] = scales_B
        packed = self._pack(x_BK, scales_B)[: self._code_bytes(x.size)]
        first = self._code_bytes(start)
        codes[first : first + packed.size] = packed

    def decode(self, data: Payload, numel: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        scales, codes = self._parts(data, numel)
        size = stop - start
        out = _room(out, size)
        whole = out if size % BLOCK == 0 else np.empty(BLOCK * _up(size, BLOCK), np.float32)
        packed = codes[self._code_bytes(start) : self._code_bytes(stop)]
        self._unpack(
            _padded(packed, self._code_bytes(BLOCK)),
            scales[start // BLOCK : _up(stop, BLOCK)],
            whole.reshape(-1, BLOCK),
        )
        if whole is not out:
            np.copyto(out, whole[:size])
        return out

    def _parts(self, data: Payload, numel: int) -> tuple[NDArray[np.uint16], Bytes]:
        """Return scales and codes, as views."""
        num_scales = _up(numel, BLOCK)
        return np.frombuffer(data, np.uint16, num_scales), np.frombuffer(data, np.uint8)[2 * num_scales :]

    def _scales(self, x_BK: Floats) -> blocks.Scales:
        """Return the scale of each block."""
        return blocks.scales(blocks.magnitudes(x_BK).max(1), self.step, self.largest)

    def _check(self, data: Payload, numel: int) -> None:
        scales, codes = self._parts(data, numel)
        blocks.check_scales(scales, self.largest)
        self._check_codes(codes, numel)

    @abstractmethod
    def _code_bytes(self, numel: int) -> int: ...

    @abstractmethod
    def _check_codes(self, codes: Bytes, numel: int) -> None: ...

    @abstractmethod
    def _pack(self, x_BK: Floats, scales_B: blocks.Scales) -> Bytes: ...

    @abstractmethod
    def _unpack(self, packed: Bytes, scales_B: blocks.Scales, out_BK: Floats) -> None: ...


class Int8(_Blocks):
    """One byte per number: within half a scale, the scale being the block's largest magnitude / 127."""

    name = "int8"
    step, largest = blocks.PER_STEP, blocks.LARGEST_INT8

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _pack(self, x_BK: Floats, scales_B: blocks.Scales) -> Bytes:
        codes_BK = np.empty(x_BK.shape, np.int8)
        blocks.encode_int8(x_BK, scales_B, codes_BK)
        return codes_BK.reshape(-1).view(np.uint8)

    def _unpack(self, packed: Bytes, scales_B: blocks.Scales, out_BK: Floats) -> None:
        blocks.decode_int8(packed.view(np.int8).reshape(out_BK.shape), scales_B, out_BK)

    def _check_codes(self, codes: Bytes, numel: int) -> None:
        blocks.check_int8(codes.view(np.int8))


class E3M0(_Blocks):
    """Four bits per number: within a factor of sqrt(2); 0 below 1/90 of the block's largest magnitude."""

    name = "e3m0"
    feedback = True
    step, largest = np.float32(1), blocks.LARGEST_E3M0

    def _code_bytes(self, numel: int) -> int:
        return _up(numel, 2)

    def _pack(self, x_BK: Floats, scales_B: blocks.Scales) -> Bytes:
        codes_BK = np.empty(x_BK.shape, np.uint8)
        blocks.encode_e3m0(x_BK, scales_B, codes_BK)
        return blocks.pack_nibbles(codes_BK.reshape(-1))

    def _unpack(self, packed: Bytes, scales_B: blocks.Scales, out_BK: Floats) -> None:
        blocks.decode_e3m0(packed, scales_B, out_BK)

    def _check_codes(self, codes: Bytes, numel: int) -> None:
        if numel % 2 and codes[-1] >> 4:
            raise ValueError("something stands after the last number")


class Ternary(_Blocks):
    """One of three numbers, -a, 0 and a: a is the block's scale, for which the squared error is least.

    The codes of each GRAIN begin at a byte: five of them take one.
    """

    name = "ternary"
    feedback = True
    largest = blocks.LARGEST_E3M0

    def _scales(self, x_BK: Floats) -> blocks.Scales:
        return blocks.ternary_scales(x_BK)

    def _code_bytes(self, numel: int) -> int:
        grains, rest = divmod(numel, GRAIN)
        return grains * _up(GRAIN, blocks.TRITS) + _up(rest, blocks.TRITS)

    def _pack(self, x_BK: Floats, scales_B: blocks.Scales) -> Bytes:
        codes = blocks.encode_ternary(x_BK, scales_B).reshape(-1)
        return np.concatenate(
            [blocks.pack_ternary(codes[at : at + GRAIN]) for at in range(0, codes.size, GRAIN)]
        )

    def _unpack(self, packed: Bytes, scales_B: blocks.Scales, out_BK: Floats) -> None:
        out, per_grain = out_BK.reshape(-1), _up(GRAIN, blocks.TRITS)
        for i, start in enumerate(range(0, out.size, GRAIN)):
            numbers = blocks.decode_ternary(packed[i * per_grain : (i + 1) * per_grain])
            room = out[start : start + GRAIN]
            room[numbers.size :] = 0
            room[: numbers.size] = numbers[: room.size]
        out_BK *= blocks.from_bf16(scales_B)[:, None]

    def _check_codes(self, codes: Bytes, numel: int) -> None:
        if codes.size and codes.max() >= 3**blocks.TRITS:
            raise ValueError("a byte above 242 is no code")
        for start in range(0, numel, GRAIN):
            stop = min(start + GRAIN, numel)
            used = (stop - start) % blocks.TRITS
            if used and codes[self._code_bytes(stop) - 1] >= 3**used:
                raise ValueError("something stands after the last number of a grain")


class TopK(Codec):
    """The largest numbers of each chunk as one of two magnitudes and a sign; the rest is 0."""

    name = "topk"
    feedback = True

    def num_bytes(self, numel: int) -> int:
        """See `Codec.num_bytes`."""
        whole, rest = divmod(numel, topk.WIDTH)
        return whole * topk.record_bytes(topk.WIDTH) + (topk.record_bytes(rest) if rest else 0)

    def encode_slice(self, x: Floats, out: memoryview, numel: int, start: int) -> None:
        """See `Codec.encode_slice`."""
        for first, x_CW in _chunks(x):
            self._records(out, start + first, x_CW.shape)[:] = topk.encode_topk(x_CW)

    def decode(self, data: Payload, numel: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """See `Codec.decode`."""
        out = _room(out, stop - start)
        for first, out_CW in _chunks(out):
            topk.decode_topk(self._records(data, start + first, out_CW.shape), out_CW)
        return out

    def _check(self, data: Payload, numel: int) -> None:
        for start, stop in slices(numel):
            whole = stop - (stop - start) % topk.WIDTH
            for first, last, width in ((start, whole, topk.WIDTH), (whole, stop, stop - whole)):
                if first < last:
                    topk.check_topk(self._records(data, first, ((last - first) // width, width)), width)

    def _records(self, data: Payload, start: int, shape: tuple[int, ...]) -> Bytes:
        """Return the records of the chunks from element `start` on, [C, R], as a view. shape: (C, W)."""
        at = start // topk.WIDTH * topk.record_bytes(topk.WIDTH)
        size = topk.record_bytes(shape[1])
        return np.frombuffer(data, np.uint8, shape[0] * size, at).reshape(shape[0], size)


class Feedback:
    """Error feedback: the error of a coarse codec is added to a later push.

    e' = x + e - decode(encode(x + e)), so that the sum of all decoded values is the sum of all x, less the
    last e.

    residual: e, fp32, of as many elements as the unit; changed in place, and only by `taken`. A push that is
    refused or given up leaves it as it was.
    """

    def __init__(self, codec: Codec, residual: Floats) -> None:
        self.codec = codec
        self.residual = residual

    def encode(self, x: Floats, out: memoryview | None = None) -> memoryview:
        """Return the payload of x plus the residual."""
        numel = x.size
        payload = np.empty(self.codec.num_bytes(numel), np.uint8).data if out is None else out
        for start, stop in slices(numel):
            with np.errstate(over="ignore", invalid="ignore"):
                wanted = x[start:stop] + self.residual[start:stop]
            self.codec.encode_slice(wanted, payload, numel, start)
        return payload

    def taken(self, x: Floats, payload: Payload) -> None:
        """Update the residual: the receiver has `payload`, which `encode(x)` made.

        Values that are not finite were visible to the receiver and are dropped: one bad push does not spoil
        those after it.
        """
        for start, stop in slices(x.size):
            owed = self.residual[start:stop]
            with np.errstate(over="ignore", invalid="ignore"):
                owed += x[start:stop]
                owed -= self.codec.decode(payload, x.size, start, stop)
            np.copyto(owed, 0, where=~np.isfinite(owed))


def _room(out: Floats | None, size: int) -> Floats:
    return np.empty(size, np.float32) if out is None else out[:size]


def _up(numel: int, size: int) -> int:
    """Return how many pieces of `size` hold `numel`."""
    return -(-numel // size)


def _padded(x: NDArray[T], size: int) -> NDArray[T]:
    """Return `x` with zeros after it, up to a multiple of `size`."""
    missing = -x.size % size
    return np.concatenate([x, np.zeros(missing, x.dtype)]) if missing else x


def _chunks(x: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield the whole chunks of `x` as (C, W), then the short one at its end, each with its start."""
    whole = x.size // topk.WIDTH * topk.WIDTH
    if whole:
        yield 0, x[:whole].reshape(-1, topk.WIDTH)
    if whole < x.size:
        yield whole, x[whole:].reshape(1, -1)
