"""Measure how fast a hub checks, decodes and merges pushes and takes the outer step.

Part of `benchmarks.hub`.

The hub's own functions run in one thread, without a network: a push is checked and measured, judged,
accepted, merged and applied as in `launch.hub`, and its numbers are read from the journal's file.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.hub import Hub, Joiner
from aedit.async_sgd.journal import Journal, Payload
from aedit.async_sgd.rules import Codec, HubConfig, HubPlan, Merged, OuterConfig, PenaltyConfig, Push, Record
from aedit.async_sgd.service import tensor_norms
from aedit.proto.codecs import codec, codecs
from aedit.types import Layout, TensorLayout, UnitLayout

STEPS, TOKENS = 64, 64 * 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Configuration of a hub."""

    text: str
    codec: Codec
    quorum: int = 1
    codec_down: Codec = "fp32"

    @property
    def plan(self) -> HubPlan:
        """Return the preset `async`, or a quorum with all of EDiT's penalty."""
        alone = self.quorum == 1
        outer = OuterConfig(kind="delayed-nesterov" if alone else "nesterov")
        hub = HubConfig(
            quorum=self.quorum,
            grace=0.0,
            weights="uniform" if alone else "penalty",
            codec=self.codec,
            codec_down=self.codec_down,
        )
        penalty = PenaltyConfig(clip=None) if alone else PenaltyConfig()
        return HubPlan(hub=hub, outer=outer, penalty=penalty, every=STEPS, steps=10**9)


@dataclass(frozen=True, slots=True)
class Speeds:
    """GB of fp32 per second of one core; the whole path is the last two in sequence."""

    encode_gb_s: float
    decode_gb_s: float
    check_gb_s: float
    """Check of form and norms of a push."""
    merge_gb_s: float
    """From the decision on the pushes to the next anchor."""

    @property
    def path_gb_s(self) -> float:
        return 1 / (1 / self.check_gb_s + 1 / self.merge_gb_s)


def speeds(kind: Kind, numel: int, rounds: int) -> Speeds:
    """Return the speeds for a unit of `numel` parameters, as the median over `rounds` versions."""
    layout = _layout(numel)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder), 1, fsync=False)
        arrived = [_stored(journal, kind.codec, x) for x in _gradients(numel, max(1, kind.quorum))]
        hub = _founded(kind, layout)
        taken = [_round(hub, kind, layout, arrived) for _ in range(1 + rounds)][1:]
    check_s, merge_s = np.median(np.array(taken), axis=0) / len(arrived)
    encode_s, decode_s = _codec_seconds(kind.codec, next(_gradients(numel, 1)), rounds)
    return Speeds(*(4e-9 * numel / seconds for seconds in (encode_s, decode_s, check_s, merge_s)))


def _layout(numel: int) -> UnitLayout:
    """Return a unit like a transformer block: mostly a few matrices, and small vectors."""
    width = 256
    rows = numel // width // 4
    shapes = [(rows, width)] * 3 + [(width,)]
    shapes.append((numel - 3 * rows * width - width,))
    return UnitLayout("blocks.0", tuple(TensorLayout(f"p{i}", shape) for i, shape in enumerate(shapes)))


def _gradients(numel: int, count: int) -> Iterator[codecs.Floats]:
    """Yield pseudo-gradients that partly agree, as those of correct nodes do."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(numel, np.float32)
    for _ in range(count):
        yield (common + rng.standard_normal(numel, np.float32)) * np.float32(1e-4)


def _stored(journal: Journal, name: str, x: codecs.Floats) -> Payload:
    data = codec(name).encode(x)
    return Payload(name, x.size, zlib.crc32(data), *journal.store(data), len(data))


class _Whole:
    """Numbers in memory."""

    def __init__(self, x: codecs.Floats) -> None:
        self._x = x

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._x[start:stop].copy()


def _founded(kind: Kind, layout: UnitLayout) -> Hub:
    """Return a hub with as many nodes as it merges at a time, and a first anchor."""
    quantiser = None if kind.codec_down == "fp32" else codec(kind.codec_down)
    hub = Hub(kind.plan, quantiser)
    for node in range(kind.quorum):
        joiner = Joiner(name=f"node{node}", layout=Layout((layout,)), facts=(), num_samples=10**6)
        _apply(hub, hub.join(joiner, 0.0))
    first = np.random.default_rng(1).standard_normal(layout.numel, np.float32) * np.float32(0.02)
    lengths = tuple(float(np.linalg.norm(piece)) for piece in _pieces(first, layout))
    push = Push(node=0, unit=0, seq=1, base=0, steps=0, tokens=0, values=_Whole(first), norms=lengths)
    _apply(hub, hub.offer(push, 0.0))
    _apply(hub, hub.tick(0.0))
    return hub


def _pieces(x: codecs.Floats, layout: UnitLayout) -> list[codecs.Floats]:
    return np.split(x, np.cumsum([tensor.numel for tensor in layout.tensors])[:-1])


def _apply(hub: Hub, decided: Sequence[Record]) -> list[Record]:
    for record in decided:
        hub.apply(record, hub.compute(record))
    return list(decided)


def _round(hub: Hub, kind: Kind, layout: UnitLayout, arrived: Sequence[Payload]) -> tuple[float, float]:
    """Let every node push once; return the CPU seconds to check the pushes and to make the next version."""
    check_s = merge_s = 0.0
    version, how = hub.state.units[0].version, codec(kind.codec)
    for node, payload in enumerate(arrived):
        began = time.process_time()
        data = payload.view()
        how.is_valid(data, layout.numel)
        lengths = tensor_norms(data, how, layout)
        check_s += time.process_time() - began
        began = time.process_time()
        seq = hub.state.members[node].received.get(0, 0) + 1
        push = Push(
            node=node,
            unit=0,
            seq=seq,
            base=version,
            steps=STEPS,
            tokens=TOKENS,
            values=payload,
            norms=lengths,
        )
        _apply(hub, hub.offer(push, float(version)))
        merge_s += time.process_time() - began
    began = time.process_time()
    decided = _apply(hub, hub.tick(float(version)))
    merge_s += time.process_time() - began
    assert any(isinstance(record, Merged) for record in decided), f"version {version} was the last"
    return check_s, merge_s


def _codec_seconds(name: str, x: codecs.Floats, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds to encode x, and to decode it slice by slice as a merge does."""
    how, room = codec(name), np.empty(codecs.SLICE, np.float32)
    payload = how.encode(x)

    def decode() -> None:
        for start, stop in codecs.slices(x.size):
            how.decode(payload, x.size, start, stop, room)

    times = []
    for _ in range(rounds):
        began = time.process_time()
        how.encode(x, payload)
        middle = time.process_time()
        decode()
        times.append((middle - began, time.process_time() - middle))
    encode_s, decode_s = np.median(np.array(times), axis=0)
    return float(encode_s), float(decode_s)
