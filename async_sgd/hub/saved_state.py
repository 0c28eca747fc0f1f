"""State of a hub as plain numbers and arrays, unit by unit, for snapshots."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields, replace
from operator import attrgetter
from typing import Any

from aedit.async_sgd.hub.members import CERTIFIED, LastDecision, Member
from aedit.async_sgd.hub.outer_step import Anchor
from aedit.async_sgd.hub.pool import Pool
from aedit.async_sgd.hub.state import HubState, Unit
from aedit.async_sgd.rules import (
    Banned,
    Contribution,
    OuterState,
    Push,
    PushTimes,
    SizeHistory,
    Vector,
    configured,
)
from aedit.types import Layout, TensorLayout, UnitLayout, Verdict


@dataclass(frozen=True, slots=True)
class SavedUnit:
    """State of one unit. The arrays are the hub's own and never change.

    They may be written while it goes on.
    """

    index: int
    numbers: dict[str, Any]
    """Fit for JSON."""
    arrays: dict[str, Vector]
    pending: tuple[Push, ...]
    """In the order of arrival."""


Saved = tuple[dict[str, Any], Iterable[SavedUnit]]
"""Everything that is journaled, at one moment: numbers fit for JSON, and the units that the hub owns."""

_PLAIN = ("num_samples", "founder", "term", "sessions", "round", "round_at_s", "elapsed_s", "steps", "tokens")
_APART = ("refused", "received", "decisions", "earlier", "era")
_MEMBER = [field.name for field in fields(Member) if field.name not in _APART]
_UNIT = ("merged_at_s", "usual_s", "sent_at", "steps", "apart")
_contribution = attrgetter(*(field.name for field in fields(Contribution)))
_push_times = attrgetter(*(field.name for field in fields(PushTimes)))


def frozen(state: HubState) -> HubState:
    """Return the state as it is now, for `save_state`, while the hub goes on with the other one.

    Takes a few milliseconds with 10,000 members, as `save_state` takes a second. Members and arrays are
    shared: a member is copied before it changes, arrays never change.
    """
    state.era += 1
    pool = state.pool
    leases = {node: dict(blocks) for node, blocks in pool.leases.items()}
    units = {
        index: replace(
            unit,
            pending=dict(unit.pending),
            brought=dict(unit.brought),
            times=dict(unit.times),
            missed=dict(unit.missed),
        )
        for index, unit in state.units.items()
    }
    return replace(
        state,
        members=list(state.members),
        departed=dict(state.departed),
        excluded=dict(state.excluded),
        free=list(state.free),
        lost=dict(state.lost),
        pool=replace(pool, returned=list(pool.returned), leases=leases),
        banned=list(state.banned),
        units=units,
    )


def save_state(state: HubState) -> Saved:
    """Return the state as numbers and units. Copies no array and reads no payload."""
    return (save_numbers(state), tuple(save_unit(index, unit) for index, unit in state.units.items()))


def save_numbers(state: HubState) -> dict[str, Any]:
    """Return everything but the units, fit for JSON."""
    pool = state.pool
    numbers = {name: getattr(state, name) for name in (*_PLAIN, "mean_steps")}
    numbers["layout"] = None if state.layout is None else layout_rows(state.layout)
    numbers["facts"] = dict(state.facts)
    numbers["members"] = [
        {name: getattr(member, name) for name in _MEMBER}
        | {
            "refused": dict(member.refused),
            "received": [[unit, seq] for unit, seq in member.received.items()],
            "told": [[unit, one.seq, int(one.verdict), one.reason] for unit, one in member.decisions.items()],
        }
        for member in state.members
    ]
    numbers["lost"] = [
        [node, [list(block) for block in blocks]] for node, blocks in sorted(state.lost.items())
    ]
    numbers["pool"] = {
        "watermark": pool.watermark,
        "returned": [list(block) for block in pool.returned],
        # In order: that of the hub's tables depends on how often it was restarted.
        "leases": sorted(
            [node, start, *lease] for node, leases in pool.leases.items() for start, lease in leases.items()
        ),
    }
    for name in ("departed", "excluded", "free"):
        numbers[name] = list(getattr(state, name))
    numbers["banned"] = [astuple(ban) for ban in state.banned]
    numbers["configs"] = [asdict(config) for config in state.configs]
    return numbers


def load_state(saved: Saved, state: HubState) -> None:
    """Load `saved` into the fresh state of a hub with the same plan. Takes ownership of the arrays."""
    (numbers, saved_units), pool = saved, saved[0]["pool"]
    for name in (*_PLAIN, "mean_steps"):
        setattr(state, name, numbers[name])
    state.layout = None if numbers["layout"] is None else layout_from_rows(numbers["layout"])
    state.facts = dict(numbers["facts"])
    state.members = []
    for saved_member in numbers["members"]:
        member = Member(**{name: saved_member[name] for name in _MEMBER if name in saved_member})
        member.refused, member.received = dict(saved_member["refused"]), dict(saved_member["received"])
        for unit, seq, verdict, reason in saved_member["told"]:
            member.decisions[unit] = LastDecision(seq, Verdict(verdict), reason)
        state.members.append(member)
    gone = [member.node for member in state.members if member.name and not (member.live or member.excluded)]
    state.departed = dict.fromkeys(numbers.get("departed", gone))
    out = [member.node for member in state.members if member.excluded and member.proof != CERTIFIED]
    state.excluded = dict.fromkeys(numbers.get("excluded", out))
    state.free = list(numbers.get("free", ()))
    state.lost = {node: [(start, end) for start, end in blocks] for node, blocks in numbers["lost"]}
    state.pool = Pool(pool["watermark"], [(start, end) for start, end in pool["returned"]])
    for node, start, used, end in pool["leases"]:
        state.pool.leases.setdefault(node, {})[start] = (used, end)
    state.banned = [Banned(*ban) for ban in numbers.get("banned", ())]
    state.configs = tuple(configured(config) for config in numbers.get("configs", ()))
    units = {unit.index: _unit_in(unit) for unit in saved_units}
    state.units = {index: units[index] for index in sorted(units)}
    state.index()


def layout_rows(layout: Layout) -> list[Any]:
    """Return a layout as lists: name of each unit, with name and shape of each of its tensors."""
    return [[unit.name, [[t.name, list(t.shape)] for t in unit.tensors]] for unit in layout.units]


def layout_from_rows(rows: Iterable[Any]) -> Layout:
    """Return the layout that `layout_rows` was given."""
    return Layout(
        tuple(
            UnitLayout(name, tuple(TensorLayout(tensor, tuple(shape)) for tensor, shape in tensors))
            for name, tensors in rows
        )
    )


def save_unit(index: int, unit: Unit) -> SavedUnit:
    """Return the state of a unit. Copies no array and reads no payload."""
    numbers: dict[str, Any] = {name: getattr(unit, name) for name in _UNIT}
    numbers["history"] = unit.history.numbers()
    numbers["version"] = unit.version
    numbers["missed"] = [[node, count] for node, count in sorted(unit.missed.items())]
    numbers["brought"] = [[node, *_contribution(one)] for node, one in sorted(unit.brought.items())]
    numbers["times"] = [[node, *_push_times(one)] for node, one in sorted(unit.times.items())]
    arrays: dict[str, Vector] = {}
    if unit.anchor:
        numbers["count"] = unit.anchor.outer.count
        arrays = {"values": unit.anchor.values, "momentum": unit.anchor.outer.momentum}
        pending, handed = unit.anchor.outer.pending, unit.anchor.handed
        arrays |= {} if pending is None else {"pending": pending}
        arrays |= {} if handed is None else {"handed": handed}
    if unit.up is not None:
        arrays["up"] = unit.up
    if unit.sent is not None:
        arrays["sent"] = unit.sent
    return SavedUnit(index, numbers, arrays, tuple(unit.pending.values()))


def _unit_in(saved: SavedUnit) -> Unit:
    numbers, arrays = saved.numbers, saved.arrays
    unit = Unit(history=SizeHistory.of(numbers["history"]))
    for name in _UNIT:
        setattr(unit, name, numbers[name])
    unit.missed = dict(numbers.get("missed", ()))
    unit.brought = {node: Contribution(*one) for node, *one in numbers["brought"]}
    unit.times = {node: PushTimes(*one) for node, *one in numbers.get("times", ())}
    for array in arrays.values():
        array.flags.writeable = False
    if numbers["version"]:
        outer = OuterState(arrays["momentum"], arrays.get("pending"), numbers["count"])
        unit.anchor = Anchor(numbers["version"], arrays["values"], outer, arrays.get("handed"))
    unit.up, unit.sent = arrays.get("up"), arrays.get("sent")
    unit.pending = {(push.node, push.seq): push for push in saved.pending}
    return unit
