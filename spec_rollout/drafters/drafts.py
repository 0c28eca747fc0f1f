"""Arms, drafts and drafters: what is guessed, how much of it, and by whom.

Shapes: B live rows of the engine, N drafted nodes of a row, q = N + 1 tokens that the policy verifies (the
last emitted token is the root, node n is verified token n + 1), V vocabulary, d hidden size.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

DrafterKind = Literal["none", "layer", "suffix", "custom"]
"""Who drafts; `custom` is a drafter of your own."""

_ARM = re.compile(r"(layer|suffix|custom):(?:(\d+)|(\d+)x(\d+)x(\d+))")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to speculate."""

    drafter: DrafterKind = "none"
    depth: int = 0
    """Most drafted tokens in a line."""
    width: int = 1
    """Children that are looked at under each node; 1 is a chain."""
    nodes: int = 0
    """Drafted nodes that are verified; a chain's are its depth."""

    @property
    def is_off(self) -> bool:
        return self.drafter == "none"

    @property
    def is_chain(self) -> bool:
        return self.width == 1

    @property
    def verified(self) -> int:
        """Tokens of a row that the policy computes in one step: q."""
        return 1 + self.nodes

    def __str__(self) -> str:
        if self.is_off:
            return "off"
        return (
            f"{self.drafter}:{self.depth}"
            if self.is_chain
            else f"{self.drafter}:{self.depth}x{self.width}x{self.nodes}"
        )


OFF = Arm()


def parse_arm(text: str) -> Arm:
    """`off`, a chain such as `layer:4` or `suffix:8`, or a tree, depth x width x verified nodes, such as
    `layer:4x2x8`. ValueError if it is none of these."""
    if text == "off":
        return OFF
    found = _ARM.fullmatch(text)
    if found is None:
        raise ValueError(f"arm {text!r}: write off, layer:4, suffix:8 or layer:4x2x8 (depth x width x nodes)")
    kind: DrafterKind = "layer" if found[1] == "layer" else "custom" if found[1] == "custom" else "suffix"
    if found[2]:
        depth, width, nodes = int(found[2]), 1, int(found[2])
    else:
        depth, width, nodes = (int(found[i]) for i in (3, 4, 5))
    if not 1 <= depth <= nodes or width < 1 or (width == 1 and nodes != depth):
        raise ValueError(f"arm {text!r}: depth, width and nodes must be 1 or more, and nodes at least depth")
    return Arm(kind, depth, width, nodes)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter guesses for every row. Parents come before their children."""

    tokens_BN: Tensor
    """int64. What lies beyond `counts_B` is any valid token and is never accepted."""
    parents_BN: Tensor | None
    """int64: index of each node's parent, -1 for the root. None for a chain, where it is n - 1."""
    counts_B: Tensor | None
    """int64: real nodes of each row, which come first. None: all are."""
    scores_BN: Tensor
    """float32: log of the drafter's probability of the whole path to the node: a child's is not above its
    parent's."""
    logq_BNV: Tensor | None = None
    """float32: the log-probabilities each token was really drawn from, for a chain that is to be verified by
    rejection; None if it was drawn with the policy's noise, or is certain (a point mass)."""


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row that begins, or begins again on another engine."""

    row: int
    group: int
    tokens: Sequence[int]
    """Prompt and what has been emitted: the last one has not been through the policy yet."""
    features_Td: Tensor
    """The policy's last hidden states, after its final norm, of all tokens but the last; of fewer, the last
    ones, where keys and values came from another engine."""
    num_prompt: int = 0
    """How many of the tokens are the prompt's."""


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What one step has made of the rows 0..B-1, B of before the step."""

    tokens: Sequence[Sequence[int]]
    """The emitted tokens of each row, at least one."""
    features: Tensor
    """(B, m, d): the policy's last hidden states of the root and of the accepted nodes, in order, zeros after
    them; m is the longest. Row b has len(tokens[b]) of them: the one of the token before tokens[b][i] is
    features[b, i]. Together they are the pairs that a drafter learns from and goes on with."""


class Noise(Protocol):
    """The Gumbel noise of the rows, as `verify` uses it."""

    def at(self, rows: Sequence[int], first: Sequence[int], count: int) -> Tensor:
        """(len(rows), count, V), float32: row rows[i] at the absolute positions first[i], first[i] + 1, ...
        (the position of a token counts the prompt)."""


class Drafter(Protocol):
    """Guesses what the policy will say. It follows the engine's rows: `begin`, then `take` after each step,
    `move` when a row gets another number, `end`. It may be behind in its own computations, and catches up
    when it is asked to propose."""

    def begin(self, rows: Sequence[RowStart]) -> None: ...

    def update(self, update: StepUpdate) -> None: ...

    def move(self, source: int, target: int) -> None:
        """Row `source` is called `target` from now on; what was there has ended."""

    def end(self, row: int) -> None: ...

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        """Guess for rows 0..rows-1. temperature_B: float32, 0 is greedy."""


class FeatureSink(Protocol):
    """Keeps what the policy has computed anyway, for a drafter to learn from. It follows the engine's rows as
    a drafter does; `version` is that of the policy that made the features. New weights end all rows,
    unfinished, and begin them again."""

    def begin(self, rows: Sequence[RowStart], version: int) -> None: ...

    def update(self, update: StepUpdate, version: int) -> None: ...

    def move(self, source: int, target: int) -> None: ...

    def end(self, row: int, finished: bool) -> None:
        """finished: the text of the row is whole; else it goes on elsewhere, or with another policy."""

    def status(self) -> dict[str, object]:
        """What it keeps, and in how many bytes."""
