"""Admission of members: who may join, and under which index."""

from dataclasses import dataclass
from hashlib import sha256

from aedit.async_sgd.hub.members import CERTIFIED, Member
from aedit.async_sgd.hub.state import Denied, HubState
from aedit.async_sgd.rules import Founded, HubConfig, Joined, Leased, Left, Record
from aedit.types import Layout, model_sha256, name_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The description that a node gives of itself when it joins."""

    name: str
    layout: Layout
    facts: tuple[tuple[str, str], ...]
    """Names and values of the settings that must be equal on all nodes."""
    num_samples: int
    """Training samples of the corpus."""
    donor: str = ""
    """HOST:PORT where it gives anchors to others."""
    session: int = 0
    """Fingerprint of the session of this very process, if it was a member before; else 0."""
    process: int = 0
    """Fingerprint of a number drawn by the node's process at its start: who joins again because a reply was
    lost is the same. 0: unknown."""
    prefers: int | None = None
    """The index it would like to have, if it is new and the index is free."""
    voter: int = 0
    """Identity under which it votes in a failover; 0: it does not vote."""
    new_session: int = 0
    """Fingerprint of its new session, which the hub has drawn. 0: the number of joins of the run."""
    proof: str = ""
    """Shows that it is the same node as one that has joined before: `CERTIFIED`, or the fingerprint of a
    secret that it keeps over restarts. Empty: it shows nothing."""
    origin: str = ""
    """Certificate, token or host from which it comes: one origin can take only so many names."""
    most_names: int = 0
    """Names that its origin may have taken, members or not, its own included; 0: any number."""


def joining(state: HubState, joiner: Joiner, config: HubConfig, elapsed_s: float) -> list[Record]:
    """Return the records of a join.

    Founded, if it is the first node; Left, if it replaces a process that seems alive; the leases that it had
    when it was given up as silent, unless others have them since; and Joined.
    """
    if fault := name_fault(joiner.name):
        raise Denied("different", f"node's name {fault}: choose another one with --as")
    decided: list[Record] = []
    if state.layout is None:
        described = Founded(joiner.layout, tuple(sorted(joiner.facts)), joiner.num_samples)
        decided.append(check_model(state, described, config))
    else:
        _compare(state, joiner)
    node = state.names.get(joiner.name, _new_index(state, joiner.prefers, config))
    known = node < len(state.members) and state.members[node].name
    member = state.members[node] if known else None
    if member and member.excluded:
        raise Denied("excluded", f"{joiner.name} was excluded: {member.gone}")
    if len(state.live) - (node in state.live) >= config.limits.nodes:
        raise Denied("full", f"this hub takes {config.limits.nodes} nodes (hub.limits.nodes)")
    same = member is not None and (  # the process that was a member before
        (joiner.process != 0 and member.process == joiner.process)
        or (joiner.session != 0 and member.session == joiner.session)
    )
    if member is None:
        _check_origin(state, joiner)
    else:
        _check_proof(member, joiner, same, config)
    if member and member.live and not same:
        decided.append(Left(node, "another process of this node has joined"))
    if member and not member.live and same:
        decided += [
            Leased(node, max(start, first), min(end, last))
            for start, end in state.lost.get(node, [])
            for first, last in state.pool.returned  # what is still free of it
            if max(start, first) < min(end, last)
        ]
    session = joiner.new_session or state.sessions + 1
    proofs = (joiner.process, joiner.proof, joiner.origin, joiner.voter)
    return [*decided, Joined(joiner.name, node, session, joiner.donor, elapsed_s, *proofs)]


def _check_proof(member: Member, joiner: Joiner, same: bool, config: HubConfig) -> None:
    """Raise Denied unless the joiner may take the name of a node that has joined before."""
    if same or (joiner.proof and joiner.proof == member.proof) or joiner.proof == CERTIFIED:
        return
    if member.proof == CERTIFIED:
        raise Denied("foreign", f"{joiner.name} has keys of its own: join with these, or under another name")
    if member.live:
        raise Denied(
            "taken",
            f"a node {joiner.name} is in the run, and nothing shows that this is the same one: start it from"
            f" its own run directory, choose another name (--as), or wait until {config.expire_s:g} s after"
            " the other process has ended",
        )


def _check_origin(state: HubState, joiner: Joiner) -> None:
    """Raise Denied if the origin of a new name was excluded under another one, or has enough names."""
    known = [member for member in state.members if member.name and member.origin == joiner.origin]
    if not joiner.origin:
        return
    for member in known:
        if member.excluded:
            raise Denied(
                "excluded",
                f"{member.name} of {joiner.origin} was excluded, and no new name is taken from there:"
                f" {member.gone}",
            )
    if joiner.most_names and len(known) >= joiner.most_names:
        raise Denied(
            "full",
            f"{joiner.origin} has taken {len(known)} names in this run (hub.limits.names): give each node"
            " keys of its own, or come back under one of these names",
        )


def _new_index(state: HubState, prefers: int | None, config: HubConfig) -> int:
    """Return the next free index, or the one that the node prefers if that is free.

    An index that is skipped stays free for a node that prefers it.
    """
    new = state.free[0] if state.free else len(state.members)
    if prefers is None or not 0 <= prefers < config.limits.nodes:
        return new
    is_free = prefers >= len(state.members) or not state.members[prefers].name
    return prefers if is_free else new


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


def check_model(state: HubState, described: Founded, config: HubConfig) -> Founded:
    """Return the record of the first node's description. Raises Denied if the run cannot have this model."""
    layout = described.layout
    names = [unit.name for unit in layout.units]
    if not names or len(set(names)) != len(names) or any(unit.numel < 1 for unit in layout.units):
        raise Denied(
            "different", "a layout has at least one unit, each with a name of its own and parameters"
        )
    part, parts = state.part
    if state.apart.issuperset(names[part::parts]):  # a budget counts steps of the model: it would not end
        raise Denied(
            "different",
            f"hub process {part} of {parts} would own no unit of the model: give hub.address fewer addresses",
        )
    if described.num_samples < 1:
        raise Denied("different", "there are no training samples")
    digest = model_sha256(layout, described.facts, described.num_samples)
    if config.model_sha256 and digest != config.model_sha256:
        raise Denied("different", f"this model is {digest}, and hub.model_sha256 is {config.model_sha256}")
    if config.anchors_sha256 and len(config.anchors_sha256) != len(names):
        wanted = len(config.anchors_sha256)
        raise Denied("different", f"this model has {len(names)} units, and hub.anchors_sha256 is of {wanted}")
    return described


def check_first_anchor(config: HubConfig, unit: int, data: memoryview) -> None:
    """Raise ValueError if these bytes, fp32, are not the first anchor that the configuration names."""
    wanted = config.anchors_sha256[unit] if config.anchors_sha256 else ""
    if wanted and (found := sha256(data).hexdigest()) != wanted:
        raise ValueError(f"first anchor of unit {unit} is {found}, and hub.anchors_sha256 names {wanted}")
