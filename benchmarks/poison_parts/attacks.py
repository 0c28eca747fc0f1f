"""Pushes that a broken or malicious node may send instead of its pseudo-gradients."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from aedit.async_sgd.inprocess import make_push
from aedit.async_sgd.rules import ArrayValues, Push, Vector
from aedit.types import UnitLayout

Attack = Callable[[Push, UnitLayout], Push]


def values_of(push: Push, layout: UnitLayout) -> Vector:
    """Return all values of the push."""
    return push.values.read(0, layout.numel)


def _with(push: Push, layout: UnitLayout, values: Vector) -> Push:
    honest = {name: getattr(push, name) for name in ("node", "unit", "seq", "base", "steps", "tokens")}
    return make_push(values, layout, **honest)


def _set(number: float) -> Attack:
    def attack(push: Push, layout: UnitLayout) -> Push:
        values = values_of(push, layout)
        values[len(values) // 2] = number
        return _with(push, layout, values)

    return attack


def _times(factor: float) -> Attack:
    return lambda push, layout: _with(push, layout, values_of(push, layout) * np.float32(factor))


def _flipped_bits(push: Push, layout: UnitLayout) -> Push:
    """Flip a random bit of every thousandth number."""
    rng = np.random.default_rng(push.seq)
    values = values_of(push, layout)
    at = rng.integers(0, len(values), max(1, len(values) // 1000))
    values.view(np.uint32)[at] ^= np.uint32(1) << rng.integers(0, 32, len(at)).astype(np.uint32)
    return _with(push, layout, values)


class _Replay:
    """Sends the first push of each unit repeatedly under new numbers."""

    def __init__(self) -> None:
        self._first: dict[int, Vector] = {}

    def __call__(self, push: Push, layout: UnitLayout) -> Push:
        return _with(push, layout, self._first.setdefault(push.unit, values_of(push, layout)))


def _longer(push: Push, layout: UnitLayout) -> Push:
    values = np.concatenate([values_of(push, layout)] * 2)
    return replace(push, values=ArrayValues(values), norms=(*push.norms, 1.0))


def _other_model(push: Push, layout: UnitLayout) -> Push:
    return replace(push, norms=push.norms[:-1], values=ArrayValues(values_of(push, layout)[:-1]))


def _noise(push: Push, layout: UnitLayout) -> Push:
    noise = np.random.default_rng(push.seq).normal(size=layout.numel)
    return _with(push, layout, (noise * 1e6).astype(np.float32))


def attacks() -> dict[str, Attack]:
    """Return the attacks by name; each may be used by one node of one run."""
    return {
        "nan": _set(np.nan),
        "inf": _set(np.inf),
        "1000 times": _times(1000.0),
        "10 times": _times(10.0),
        "sign flipped": _times(-1.0),
        "sign flipped, 10 times": _times(-10.0),
        "noise": _noise,
        "flipped bits": _flipped_bits,
        "replay": _Replay(),
        "oversized": _longer,
        "other model": _other_model,
    }
