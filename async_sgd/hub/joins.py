"""Admission of members: who may join, and under which index."""

from dataclasses import dataclass
from typing import Literal

from aedit.async_sgd.hub.members import Member
from aedit.async_sgd.hub.pool import Block
from aedit.async_sgd.hub.state import COUNT_BITS, HubState
from aedit.async_sgd.rules.config import HubConfig
from aedit.async_sgd.rules.records import Founded, Joined, Leased, Left, Record
from aedit.types import Layout

LONGEST_NAME = 128


class Denied(Exception):
    """A request that the hub refuses; says what the peer is told."""

    def __init__(
        self,
        kind: Literal["unknown", "replaced", "excluded", "full", "different", "taken", "foreign"],
        reason: str,
    ) -> None:
        """Create a refusal.

        kind: join again; end; end; come again later; can never succeed; somebody else has it until later; it
        belongs to somebody else.
        """
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The description that a node gives of itself when it joins."""

    name: str
    layout: Layout
    facts: tuple[tuple[str, str], ...]
    """What must be equal for nodes to train one thing."""
    num_samples: int
    """Training samples of the corpus."""
    donor: str = ""
    """HOST:PORT where it gives anchors to others."""
    session: int = 0
    """Of this very process, if it was a member before; else 0."""
    process: int = 0
    """Drawn by the node's process at its start: who joins again because a reply was lost is the same. 0: not
    told."""
    prefers: int | None = None
    """The index it would like to have, if it is new and nobody has that."""
    voter: int = 0
    """Identity under which it votes in a failover; 0: it does not vote."""
    secret: int = 0
    """Random bits for its new session, drawn by the hub: who has not been told cannot speak for the node."""


def joining(state: HubState, joiner: Joiner, config: HubConfig, elapsed_s: float) -> list[Record]:
    """Return the records of a join.

    Founded, if it is the first node; Left, if it replaces a process that seems alive; Joined; and the leases
    it had when it was given up as silent, unless others have them since.
    """
    if not joiner.name or len(joiner.name) > LONGEST_NAME or not joiner.name.isprintable():
        raise Denied("different", f"a node's name has 1 to {LONGEST_NAME} printable characters")
    decided: list[Record] = []
    if state.layout is None:
        decided.append(_founded(state, joiner))
    else:
        _compare(state, joiner)
    node = state.names.get(joiner.name, _new_index(state, joiner.prefers, config))
    member = state.members[node] if node < len(state.members) else None
    if member and member.excluded:
        raise Denied("excluded", f"{joiner.name} was excluded: {member.gone}")
    if len(state.live.keys() - {node}) >= config.limits.nodes:
        raise Denied("full", f"this hub takes {config.limits.nodes} nodes (hub.limits.nodes)")
    same = member is not None and _is_same(member, joiner)
    if member and member.live and not same:
        decided.append(Left(node, "another process of this node has joined"))
    session = state.sessions + 1 + (joiner.secret << COUNT_BITS)
    joined = Joined(joiner.name, node, session, joiner.donor, elapsed_s, joiner.process, voter=joiner.voter)
    decided.append(joined)
    if member and not member.live and same:
        decided += [Leased(node, start, end) for start, end in _still_free(state, node)]
    return decided


def _is_same(member: Member, joiner: Joiner) -> bool:
    """Return whether it is the process that was a member before."""
    told = joiner.process != 0 and member.process == joiner.process
    return told or member.session == joiner.session


def _new_index(state: HubState, prefers: int | None, config: HubConfig) -> int:
    """Return the next free index, or the one that the node prefers if that is free.

    An index that is skipped stays free for a node that prefers it.
    """
    if prefers is None or not 0 <= prefers < config.limits.nodes:
        return len(state.members)
    is_free = prefers >= len(state.members) or not state.members[prefers].name
    return prefers if is_free else len(state.members)


def _founded(state: HubState, joiner: Joiner) -> Founded:
    names = [unit.name for unit in joiner.layout.units]
    if not names or len(set(names)) != len(names) or any(unit.numel < 1 for unit in joiner.layout.units):
        raise Denied(
            "different", "a layout has at least one unit, each with a name of its own and parameters"
        )
    part, parts = state.part
    if state.apart.issuperset(names[part::parts]):  # a budget counts steps of the model: it would not end
        raise Denied(
            "different",
            f"hub process {part} of {parts} would own no unit of the model: give hub.address fewer addresses",
        )
    if joiner.num_samples < 1:
        raise Denied("different", "there are no training samples")
    return Founded(joiner.layout, tuple(sorted(joiner.facts)), joiner.num_samples)


def _compare(state: HubState, joiner: Joiner) -> None:
    facts = dict(joiner.facts)
    for name in sorted(state.facts.keys() | facts.keys()):
        here, there = state.facts.get(name, "not set"), facts.get(name, "not set")
        if here != there:
            raise Denied("different", f"{name} is {here} in this run and {there} on {joiner.name}")
    if joiner.num_samples != state.num_samples:
        counts = f"{state.num_samples} training samples, {joiner.name} has {joiner.num_samples}"
        raise Denied("different", f"this run's corpus has {counts}")
    assert state.layout is not None
    if joiner.layout != state.layout:
        raise Denied(
            "different", f"{joiner.name} has another model: {_difference(state.layout, joiner.layout)}"
        )


def _difference(here: Layout, there: Layout) -> str:
    """Return the first difference of two layouts, for a person."""
    for ours, theirs in zip(here.units, there.units, strict=False):
        if ours.name != theirs.name:
            return f"unit {theirs.name} where this run has {ours.name}"
        for a, b in zip(ours.tensors, theirs.tensors, strict=False):
            if a != b:
                return f"{ours.name}.{b.name} {b.shape} where this run has {a.name} {a.shape}"
        if len(ours.tensors) != len(theirs.tensors):
            return f"{len(theirs.tensors)} parameters in {ours.name}, {len(ours.tensors)} in this run"
    return f"{len(there.units)} units, {len(here.units)} in this run"


def _still_free(state: HubState, node: int) -> list[Block]:
    blocks = []
    for start, end in state.lost.get(node, []):
        for first, last in state.pool.returned:
            if max(start, first) < min(end, last):
                blocks.append((max(start, first), min(end, last)))
    return blocks
