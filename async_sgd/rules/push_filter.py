"""Decide which pushes are trusted, by size and direction.

Sizes are logarithms of norm / steps^0.75: a pseudo-gradient grows like its steps while gradients agree and
like their square root where they do not. Sizes are judged one-sided, against all nodes alike: each node
counts once, however often it pushes, so that less than half of the nodes cannot move the median. This keeps
out what is broken or crude; it does not stop many colluding nodes, or one that stays within the usual range.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules.config import PushFilterConfig
from aedit.async_sgd.rules.merge_rules import GRAIN
from aedit.async_sgd.rules.push_weights import push_norm
from aedit.async_sgd.rules.records import MergePart, Push
from aedit.types import UnitLayout

GROWTH = 0.75
"""Exponent of a norm over steps: 0.6 to 0.9 in small Llamas under AdamW, 1 in the learning rate's rise."""

SPREAD = 0.3
"""Least standard deviation of log-sizes. Honest nodes with like data differ by 0.05 to 0.15; sizes drift."""

WINDOW = 64
"""Pushes of all nodes that are remembered."""

PER_NODE = 4
"""Pushes of one node that count, the newest; only half of them once there are `ENOUGH` nodes, whose middle
says more than the past: sizes rise and fall with the learning rate."""

FIRST_RATIO = 10.0
"""Anchors' norms that a push may be long while little else is known: more is no training."""

PATIENCE = 3
"""Refused pushes in a row, of most of the nodes, after which what was usual is forgotten."""

ENOUGH = 4
"""Nodes, or pushes in a merge, that can be compared with each other."""

AGAINST = -0.1
"""Cosine of two pushes below which one undoes what the other does."""

SAMPLE_BLOCKS = 64
"""Blocks of 4096 elements, spread over the unit, that directions are compared on."""


@dataclass(frozen=True, slots=True)
class SizeHistory:
    """Sizes of one unit's accepted pushes, newest last."""

    sizes: tuple[tuple[int, float], ...] = ()
    """(node, log-size)."""
    anchor_norm: float = math.inf
    """Norm of the first anchor."""
    doubted: tuple[int, ...] = ()
    """Nodes refused for their size since the last accepted push."""

    @classmethod
    def of(cls, numbers: Any) -> "SizeHistory":
        """Return the history that `numbers` describes."""
        sizes = tuple((int(node), float(size)) for node, size in numbers["sizes"])
        anchor_norm = math.inf if numbers["anchor_norm"] is None else numbers["anchor_norm"]
        return cls(sizes, anchor_norm, tuple(numbers["doubted"]))

    def numbers(self) -> dict[str, Any]:
        """Return the history as values that JSON can hold."""
        anchor_norm = self.anchor_norm if math.isfinite(self.anchor_norm) else None
        return {"sizes": list(self.sizes), "anchor_norm": anchor_norm, "doubted": list(self.doubted)}

    def with_push(self, push: Push) -> "SizeHistory":
        """Return the history after an accepted push.

        The push that founds the unit gives the anchor's norm.
        """
        if push.base == 0:
            return replace(self, anchor_norm=push_norm(push) or math.inf)
        sizes = (*self.sizes, (push.node, log_size(push))) if push_norm(push) > 0 else self.sizes
        return replace(self, sizes=sizes[-WINDOW:], doubted=())

    def with_refusal(self, node: int) -> "SizeHistory":
        """Return the history after a push that was refused for its size.

        When most nodes are refused, the history is wrong: a new learning rate or new data must not lock
        everyone out.
        """
        doubted = (*self.doubted, node)[-WINDOW:]
        most = 2 * len(set(doubted)) > len(self.by_node())
        lost = len(doubted) >= PATIENCE and most
        return replace(self, sizes=(), doubted=()) if lost else replace(self, doubted=doubted)

    def by_node(self) -> dict[int, list[float]]:
        """Return each node's newest sizes."""
        found: dict[int, list[float]] = {}
        for node, size in reversed(self.sizes):
            found.setdefault(node, []).append(size)
        count = PER_NODE // 2 if len(found) >= ENOUGH else PER_NODE
        return {node: sizes[:count] for node, sizes in found.items()}


def log_size(push: Push) -> float:
    """Return log(norm / steps^0.75); -inf for a push of zeros."""
    length = push_norm(push)
    return math.log(length) - GROWTH * math.log(max(1, push.steps)) if length > 0 else -math.inf


def judge_push(push: Push, history: SizeHistory, config: PushFilterConfig) -> str | None:
    """Return why a push is distrusted (its norm, and what it was compared with), or None.

    Uses only what is known when the push arrives.
    """
    length = push_norm(push)
    if not math.isfinite(length):
        return "not finite"
    nodes = history.by_node().keys()
    is_unknown = len(nodes) < 2 and push.node not in nodes  # one other node is too few to say what is usual
    if is_unknown and length > FIRST_RATIO * history.anchor_norm:
        return f"{length:.3g}, and the anchor's is {history.anchor_norm:.3g}"
    if not nodes:
        return None
    usual, spread, rounds = _usual(history)
    excess = log_size(push) - usual
    if excess <= config.threshold * spread * _slack(len(nodes), rounds) * (2 if is_unknown else 1):
        return None
    times = math.exp(min(excess, 100.0))
    return f"{length:.3g}, {times:.3g} times what is usual for {push.steps} steps"


def shortening(push: Push, history: SizeHistory, config: PushFilterConfig) -> float:
    """Return the factor that shortens a push to at most `clip` usual norms.

    Looser in the first round, when sizes still grow with the learning rate, and while few nodes are known.
    """
    if config.clip is None or not history.sizes or not push_norm(push) > 0:
        return 1.0
    usual, _, rounds = _usual(history)
    loose = 2 if len(history.by_node()) >= ENOUGH else 4
    allowed = config.clip * (loose if rounds < 2 else 1)
    return math.exp(min(0.0, math.log(allowed) + usual - log_size(push)))


def outliers(pushes: Sequence[Push], config: PushFilterConfig) -> tuple[bool, ...]:
    """Return which pushes of one merge are far longer than the others of it.

    Fewer than four are not compared.
    """
    sizes = [log_size(push) for push in pushes]
    if len(sizes) < ENOUGH:
        return (False,) * len(sizes)
    found = []
    for i, size in enumerate(sizes):
        others = [other for j, other in enumerate(sizes) if j != i and other > -math.inf]
        usual, spread = _median_and_spread(others or [size])
        found.append(size - usual > config.threshold * spread)
    return tuple(found)


def directions(
    parts: Sequence[tuple[Push, MergePart]], layout: UnitLayout, config: PushFilterConfig
) -> tuple[bool, ...]:
    """Return which pushes of one merge point away from every other one, or against most of them.

    Away: even the largest cosine is below 0. Against: the cosine is below `AGAINST` with more than half of
    the others, so that liars who agree with each other are found, too; if that were half of all pushes or
    more, there is no majority and it counts for nothing. Only pushes with weight take part, and at least four
    of them; a large unit is compared on a sample. Nodes with data of their own differ honestly: their cosines
    are near 0.
    """
    at = [i for i, (_, part) in enumerate(parts) if part.weight > 0]
    if not config.cosine or len(at) < ENOUGH:
        return (False,) * len(parts)
    cosines_NN, numel = _cosines([parts[i][0] for i in at], layout.numel)
    np.fill_diagonal(cosines_NN, -1.0)
    agreement_N = cosines_NN.max(axis=1)
    chance = 2 / math.sqrt(numel)
    away = {i for i, agreement in zip(at, agreement_N, strict=True) if agreement < -chance}
    np.fill_diagonal(cosines_NN, 0.0)
    opposed_N = (cosines_NN < min(AGAINST, -chance)).sum(axis=1)
    against = {i for i, opposed in zip(at, opposed_N, strict=True) if 2 * opposed > len(at) - 1}
    away |= against if 2 * len(against) < len(at) else set()
    return tuple(i in away for i in range(len(parts)))


def _cosines(pushes: Sequence[Push], numel: int) -> tuple[NDArray[np.float64], int]:
    """Return the cosine of every pair and the number of elements compared.

    Rounded, so that another BLAS comes to the same decision.
    """
    num_blocks = -(-numel // GRAIN)
    blocks = np.unique(np.linspace(0, num_blocks - 1, min(num_blocks, SAMPLE_BLOCKS)).astype(int))
    lengths_N1 = np.array([[max(push_norm(push), 1e-300)] for push in pushes])
    products_NN, seen = np.zeros((len(pushes), len(pushes))), 0
    for block in blocks.tolist():
        start, stop = block * GRAIN, min((block + 1) * GRAIN, numel)
        pieces_NE = np.stack([push.values.read(start, stop).astype(np.float64) for push in pushes])
        units_NE = pieces_NE / lengths_N1
        products_NN += units_NE @ units_NE.T
        seen += stop - start
    length_N = np.sqrt(np.maximum(np.diag(products_NN), 1e-300))
    return np.round(products_NN / length_N / length_N[:, None], 6), seen


def _slack(num_nodes: int, rounds: int) -> float:
    """Return the extra width of a limit while few nodes or rounds are known.

    The median of few numbers is uncertain. That of four nodes is not; but while the learning rate rises,
    honest sizes treble from the first round to the second.
    """
    return 1 + 1 / (rounds + 2) if num_nodes >= ENOUGH else 1 + 1 / rounds


def _usual(history: SizeHistory) -> tuple[float, float, int]:
    """Return median log-size over nodes, its robust standard deviation, and the number of rounds."""
    by_node = history.by_node().values()
    usual, spread = _median_and_spread([median(sizes) for sizes in by_node])
    return usual, spread, int(median(len(sizes) for sizes in by_node))


def _median_and_spread(sizes: Sequence[float]) -> tuple[float, float]:
    middle = median(sizes)
    return middle, max(SPREAD, 1.4826 * median(abs(size - middle) for size in sizes))
