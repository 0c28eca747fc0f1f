"""Interfaces of speculation: arms, drafts, drafters, feature sinks.

Shapes: B running rows of the engine, N drafted nodes of a row, q = N + 1 tokens that the policy verifies (the
last emitted token is the root, node n is verified token n + 1), V vocabulary, d hidden size.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from aedit.types import checked

DrafterKind = Literal["none", "layer", "suffix", "custom"]
"""Kind of drafter; `custom` is one of your own."""

_ARM = re.compile(r"(layer|suffix|custom):(?:(\d+)|(\d+)x(\d+)x(\d+))")


@checked()
@dataclass(frozen=True, slots=True)
class Arm:
    """One speculation setting."""

    drafter: DrafterKind = "none"
    depth: int = 0
    """Upper limit of drafted tokens in a path."""
    width: int = 1
    """Children that are considered under each node; 1 is a chain."""
    nodes: int = 0
    """Drafted nodes that are verified; equal to `depth` for a chain."""

    @property
    def is_off(self) -> bool:
        """Return true if nothing is drafted."""
        return self.drafter == "none"

    @property
    def is_chain(self) -> bool:
        """Return true if each node has one child."""
        return self.width == 1

    @property
    def verified(self) -> int:
        """Return the number of tokens of a row that the policy computes in one step, q."""
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
    """Return the arm of a text such as `off`, `layer:4`, `suffix:8` or `layer:4x2x8`.

    A tree is written depth x width x verified nodes.

    Raises:
        ValueError: The text is none of these.
    """
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


@checked()
@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of every row. Parents precede their children."""

    tokens_BN: Tensor
    """int64. Entries beyond `counts_B` are any valid token and are never accepted."""
    parents_BN: Tensor | None
    """int64: index of each node's parent, -1 for the root. None for a chain, where it is n - 1."""
    counts_B: Tensor | None
    """int64: number of real nodes of each row, which come first. None if all are real."""
    scores_BN: Tensor
    """float32: log-probability, under the drafter, of the whole path to the node. A child's is not above its
    parent's."""
    logq_BNV: Tensor | None = None
    """float32: log-probabilities that each token of a chain was drawn from, for verification by rejection.
    None if tokens were drawn with the policy's noise or are certain (a point mass)."""


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sample that starts in a row, or continues there from another engine."""

    row: int
    group: int
    tokens: Sequence[int]
    """Prompt and emitted tokens. The last one has not been through the policy yet."""
    features_Td: Tensor
    """The policy's last hidden states, after its final norm, of all tokens but the last. Where keys and
    values came from another engine, only of the last ones."""
    num_prompt: int = 0
    """Number of prompt tokens."""


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """Result of one step, or of several ones, for the rows 0 .. B - 1 as they were before."""

    tokens: Sequence[Sequence[int]]
    """Emitted tokens of each row, at least one."""
    features: Tensor
    """(B, m, d): the policy's last hidden states of the root and of the accepted nodes, in order, then zeros;
    m is the largest number of tokens. features[b, i] belongs to the token before tokens[b][i]. These pairs
    are what a drafter learns from and continues with."""


class Noise(Protocol):
    """Gumbel noise of the rows, as `verify` uses it."""

    def at(self, rows: Sequence[int], first: Sequence[int], count: int) -> Tensor:
        """Return the noise of some rows, (len(rows), count, V), float32.

        Row rows[i] starts at the absolute position first[i]; the position of a token counts the prompt.
        """


class Drafter(Protocol):
    """Predicts the next tokens of the policy.

    A drafter follows the engine's rows: `begin`, then `update` after each step, `move` when a row gets
    another number, `end`. It may defer its own computations until `propose`. If it has an attribute
    `needs_features` that is false, the features that it gets are empty, and one `update` may have the tokens
    of several steps: it comes before `propose` and before rows begin, move or end.
    """

    def begin(self, rows: Sequence[RowStart]) -> None:
        """Add samples that start in these rows."""

    def update(self, update: StepUpdate) -> None:
        """Receive the tokens and features of one step."""

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""

    def end(self, row: int) -> None:
        """Remove the sample of `row`."""

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        """Return a draft for the rows 0 .. rows - 1.

        Args:
            arm: Speculation setting; `arm.drafter` names this drafter.
            rows: Number of rows B.
            noise: Noise of the rows.
            temperature_B: float32; 0 is greedy.
        """


@runtime_checkable
class PolicyReader(Protocol):
    """A drafter that computes with the policy's own embedding and output head."""

    def read_policy(self, embedding: Tensor, head: Tensor) -> None:
        """Compute with these tensors from now on. Called when the policy's weights have been replaced."""


class FeatureSink(Protocol):
    """Stores hidden states of the policy for drafter training.

    A sink follows the engine's rows like a drafter; `version` is the version of the policy that computed the
    features. New weights end all rows, unfinished, and begin them again.

    It may have two attributes. While `collects` is false, samples that start are left out: they are not
    begun, moved or ended, and their rows in an update are to be ignored. `max_share` is the largest share of
    the cost of steps on a CPU that `update` may take: beyond it samples are left out in the same way.
    """

    def begin(self, rows: Sequence[RowStart], version: int) -> None:
        """Add samples that start in these rows."""

    def update(self, update: StepUpdate, version: int) -> None:
        """Receive the tokens and features of one step."""

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""

    def end(self, row: int, finished: bool) -> None:
        """Remove the sample of `row`.

        Args:
            row: Row of the engine.
            finished: The text is complete; else it continues elsewhere or with another policy.
        """

    def status(self) -> dict[str, object]:
        """Return contents and memory use."""
