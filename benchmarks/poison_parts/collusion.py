"""Liars that know every honest push of a round and act together."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from aedit.async_sgd.inprocess import make_push
from aedit.async_sgd.rules import Push, Vector
from aedit.types import UnitLayout
from benchmarks.poison_parts.attacks import values_of

Lie = Callable[[list[Vector], Vector, int, int], Vector]
"""(honest pushes, the liar's own honest push, number of liars, number of nodes) -> what each liar sends."""


def little_is_enough(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return mean - z deviation of each element (ALIE, Baruch et al. 2019, arXiv:1902.06156).

    z: of the paper, at least 1: with few nodes the paper's is near 0, and what hides within one deviation is
    hard to tell in any case.
    """
    needed = nodes // 2 + 1 - liars
    share = (nodes - liars - needed) / (nodes - liars)
    z = max(1.0, NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0)
    lie: Vector = (np.mean(honest, axis=0) - z * np.std(honest, axis=0)).astype(np.float32)
    return lie


def inner_product(epsilon: float) -> Lie:
    """Return the lie -epsilon times the mean (IPM, Xie et al. 2020, arXiv:1903.03936)."""

    def lie(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
        mean: Vector = np.mean(honest, axis=0)
        return (-epsilon * mean).astype(np.float32)

    return lie


def flipped_at_honest_length(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return the mean with its sign flipped, as long as an honest push."""
    mean: Vector = np.mean(honest, axis=0)
    usual = float(np.median([np.linalg.norm(x) for x in honest]))
    return (-mean * usual / max(float(np.linalg.norm(mean)), 1e-30)).astype(np.float32)


def random_at(times: float) -> Lie:
    """Return the lie of a random direction, the same for all liars, `times` as long as an honest push."""

    def lie(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
        noise = np.random.default_rng(len(own)).normal(size=len(own))
        usual = float(np.median([np.linalg.norm(x) for x in honest]))
        return (noise * times * usual / math.sqrt(len(own))).astype(np.float32)

    return lie


def just_below_the_limits(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return what the hub's filter lets pass: twice as long as honest, with a cosine of -0.09 to their mean.

    The rest is the same random direction in every round, so that it adds up.
    """
    usual = float(np.median([np.linalg.norm(x) for x in honest]))
    mean = np.mean(honest, axis=0, dtype=np.float64)
    mean /= max(float(np.linalg.norm(mean)), 1e-30)
    noise = np.random.default_rng(len(own)).normal(size=len(own))
    noise -= mean * (noise @ mean)
    noise /= np.linalg.norm(noise)
    return (2 * usual * (math.sqrt(1 - 0.09**2) * noise - 0.09 * mean)).astype(np.float32)


LIES: dict[str, Lie] = {
    "ALIE": little_is_enough,
    "IPM 0.5": inner_product(0.5),
    "sign flip": flipped_at_honest_length,
    "random, 60 times": random_at(60.0),
    "below the limits": just_below_the_limits,
}
CLAIMED_STEPS = 4096
"""By those who send a long vector, so that it looks short for its steps."""


class Collusion:
    """The liars of one run. They push after the honest nodes of a round and see what those have sent."""

    def __init__(self, name: str, liars: frozenset[int], nodes: int) -> None:
        self._lie, self._liars, self._nodes = LIES[name], liars, nodes
        self._claims = name.startswith("random")
        self._seen: dict[tuple[int, int], Vector] = {}

    def tamper(self, push: Push, layout: UnitLayout) -> Push:
        """Return what a node sends instead of its push: an honest one the same."""
        values = values_of(push, layout)
        if push.node not in self._liars:
            self._seen[push.unit, push.node] = values
            return push
        honest = [x for (unit, _), x in sorted(self._seen.items(), key=lambda e: e[0]) if unit == push.unit]
        if not honest:
            return push
        facts = {name: getattr(push, name) for name in ("node", "unit", "seq", "base", "steps", "tokens")}
        lied = make_push(self._lie(honest, values, len(self._liars), self._nodes), layout, **facts)
        return replace(lied, steps=CLAIMED_STEPS) if self._claims else lied
