"""Records: everything that happens to a hub, as values.

The same records in the same order give the same bits.

A hub decides (reading the time and its state), writes the decision down as records, and only then applies
them. The journal is the list of records; a restart, a replay and a standby only apply it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aedit.types import Layout

Vector = NDArray[np.float32]
Array = NDArray[np.float64]


class Values(Protocol):
    """The numbers of one unit, in memory or encoded in a file. May be read repeatedly."""

    def read(self, start: int, stop: int) -> Vector:
        """Return elements start..stop as fp32; both are multiples of 4096 or the end.

        The caller may change them.
        """


@dataclass(frozen=True, slots=True)
class ArrayValues:
    """`Values` of a push in memory."""

    array: Vector

    def read(self, start: int, stop: int) -> Vector:
        """Return a copy of the elements start..stop."""
        return self.array[start:stop].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A pseudo-gradient of one unit from one node."""

    node: int
    unit: int
    seq: int
    """Counts the node's pushes of this unit, from 1."""
    base: int
    """Version of the anchor it was measured from; 0: the values are the first anchor itself."""
    steps: int
    tokens: int
    values: Values
    norms: tuple[float, ...]
    """Norm of each tensor of the unit, as measured on arrival. Not finite: the push is refused."""


# --- records


@dataclass(frozen=True, slots=True)
class Founded:
    """The first node has described the model: layout, facts and number of samples."""

    layout: Layout
    facts: tuple[tuple[str, str], ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has become a member. A name that was a member before keeps its index."""

    name: str
    node: int
    session: int
    """Fingerprint of its session: a reader of the journal cannot act as the node."""
    donor: str
    at_s: float
    process: int = 0
    """Fingerprint of the number of its process."""
    proof: str = ""
    origin: str = ""
    voter: int = 0
    """Identity under which the node votes in a failover; 0: it does not vote."""


@dataclass(frozen=True, slots=True)
class Left:
    """A node is no longer a member: it left, was silent too long, or was excluded."""

    node: int
    reason: str
    excluded: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """A push was accepted: it will be merged, whatever happens."""

    push: Push


@dataclass(frozen=True, slots=True)
class Refused:
    """A push was distrusted, or arrived too late."""

    node: int
    unit: int
    seq: int
    reason: str
    distrusted: bool
    """The node is asked to take the anchor as it is; otherwise it keeps its progress."""
    violation: bool


@dataclass(frozen=True, slots=True)
class Garbled:
    """A push was damaged on the way, or did not match its header. It may come again under the same number."""

    node: int
    unit: int
    reason: str


@dataclass(frozen=True, slots=True)
class MergePart:
    """One push in a merge."""

    node: int
    seq: int
    weight: float
    scale: float = 1.0
    """Factor by which the push is shortened if it is too long."""
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class Merged:
    """A unit has its next version.

    `parts` are all pending pushes that it consumes, also those of weight 0.
    """

    unit: int
    version: int
    parts: tuple[MergePart, ...]
    at_s: float
    share: float | None = None
    """Share of a round that these pushes make up, in (0, 1]. None: they are a round, and the outer optimizer
    takes their mean as it is."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A unit has its next version by mixing in the parent hub's anchor."""

    unit: int
    version: int
    values: Values
    mix: float


@dataclass(frozen=True, slots=True)
class SentUp:
    """Version `version` of a unit was sent to the parent hub."""

    unit: int
    version: int


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """Pace by seconds: a round is due."""

    round: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Leased:
    """Positions start..end of the endless stream of samples belong to this node."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Used:
    """Positions of a lease below `upto` are used.

    They are in an accepted push: that of the record Accepted which was decided together with it, or others.
    """

    node: int
    start: int
    upto: int


@dataclass(frozen=True, slots=True)
class Led:
    """A hub leads under this term."""

    term: int


@dataclass(frozen=True, slots=True)
class Configured:
    """The leader of a term asks the voters to agree on the replicas that hold every acknowledged record.

    Later configurations have a greater ballot. See `docs/protocol.md`, "Failover".
    """

    term: int
    number: int
    """Counts the configurations of the term, from 1."""
    leader: int
    replicas: tuple[int, ...]
    """Identities of the hubs that must have a record on disk before it is acknowledged; sorted."""
    electors: tuple[int, ...] = ()
    """Identities of the nodes that break ties; sorted."""

    @property
    def ballot(self) -> tuple[int, int]:
        """Return (term, number), by which configurations are ordered."""
        return self.term, self.number


def configured(plain: Mapping[str, Any]) -> Configured:
    """Return the configuration with these fields, in which JSON has lists for tuples."""
    lists = {name: tuple(plain[name]) for name in ("replicas", "electors")}
    return Configured(plain["term"], plain["number"], plain["leader"], **lists)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The voters have agreed on the configuration with this ballot; older ones are void."""

    term: int
    number: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """The run has lasted this long, outages of the hub not counted."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Banned:
    """A rollout server serves this run no more, neither under its name nor with its key."""

    server: str
    public_key: str
    """In hexadecimal digits."""
    reason: str
    at_s: float


Record = (
    Founded
    | Joined
    | Left
    | Accepted
    | Refused
    | Garbled
    | Merged
    | Mixed
    | SentUp
    | RoundOpened
    | Leased
    | Used
    | Led
    | Configured
    | Agreed
    | Ticked
    | Banned
)
