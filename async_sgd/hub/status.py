"""Reports of a hub: to a node with every heartbeat, and to the views."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.hub.members import Member, NodeReport
from aedit.async_sgd.hub.state import HubState
from aedit.types import News

_FP32_BYTES = 4
MOST_SHOWN = 512
"""Members in a status and in a line of metrics, so that it fits into one message."""
MOST_GONE = 32
"""Most members among these that have left."""


def run_news(hub: Hub, node: int, now: float) -> News:
    """Return the state of the run for a member."""
    state, progress = hub.state, hub.progress(now)
    return News(
        age_s=0.0,
        round=state.round,
        pace_steps=hub.pace_steps(node),
        nodes=len(state.live),
        total_steps=state.total_steps,
        total_tokens=state.total_tokens,
        elapsed_s=hub.elapsed_s(now),
        progress=progress,
        finished=progress >= 1.0,
        evaluates=state.roster.order[:1] == [node],
    )


def hub_status(hub: Hub, now: float) -> dict[str, Any]:
    """Return everything that the views show, as values that JSON can hold; None where unknown."""
    return status_of_run(hub, now) | {"nodes": status_of_nodes(hub, listed_members(hub.state), now)}


def status_of_run(hub: Hub, now: float) -> dict[str, Any]:
    """Return the part of a status that does not name nodes."""
    state = hub.state
    layout = state.layout.units if state.layout else ()
    return {
        "term": state.term,
        "elapsed_s": hub.elapsed_s(now),
        "heartbeat_s": hub.heartbeat_s,
        "progress": hub.progress(now),
        "round": state.round,
        "total_steps": state.total_steps,
        "total_tokens": state.total_tokens,
        "num_samples": state.num_samples,
        "founder": state.founder if state.is_founded else None,
        "anchor_bytes": sum(_FP32_BYTES * layout[index].numel for index in state.units),
        "leased_upto": state.pool.watermark,
        "returned_samples": sum(end - start for start, end in state.pool.returned),
        "nodes_left_out": len(state.names) - len(listed_members(state)),
        "units": [
            {
                "unit": index,
                "name": layout[index].name,
                "version": unit.version,
                "pending": len(unit.pending),
                "usual_s": unit.usual_s,
                "norm": unit.norm,
            }
            for index, unit in state.units.items()
        ],
    }


def status_of_nodes(hub: Hub, nodes: Sequence[int], now: float) -> list[dict[str, Any]]:
    """Return the part of a status about these members."""
    paces = hub.paces([node for node in nodes if node in hub.state.live])
    return [_node_status(hub, hub.state.members[node], paces.get(node, 0), now) for node in nodes]


def listed_members(state: HubState) -> list[int]:
    """Return the members of a status: the live ones and the latest others, up to `MOST_SHOWN`, by index."""
    live = state.roster.order[:MOST_SHOWN]
    if len(live) == MOST_SHOWN:
        return live
    gone = [*state.roster.excluded[-MOST_GONE:], *state.departed]
    return sorted({*live, *gone[-min(MOST_GONE, MOST_SHOWN - len(live)) :]})


def _node_status(hub: Hub, member: Member, pace_steps: int, now: float) -> dict[str, Any]:
    report = hub.clocks.reports.get(member.node, NodeReport(state=""))
    seen_s = hub.clocks.seen.get(member.node)
    leases = hub.state.pool.outstanding(member.node)
    if member.excluded:
        state = f"excluded: {member.gone}"
    else:
        state = report.state or "joining" if member.live else f"gone: {member.gone}"
    return {
        "node": member.node,
        "name": member.name,
        "state": state,
        "live": member.live,
        "silent_s": None if seen_s is None else now - seen_s,
        "steps": report.steps,
        "tokens": report.tokens,
        "steps_per_s": report.steps_per_s,
        "pace_steps": pace_steps,
        "busy_s": report.busy_s,
        "wait_s": report.wait_s,
        "wire_s": report.wire_s,
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "loss": report.loss if math.isfinite(report.loss) else None,
        "weight": member.weight,
        "staleness": member.staleness,
        "accepted": member.accepted,
        "refused": dict(member.refused),
        "violations": member.violations,
        "leased_samples": sum(end - start for start, end in leases),
        "rl": _nested(report.rl),
    }


def _nested(values: Mapping[str, float]) -> dict[str, Any] | None:
    """Return `{"a/b": 1}` as `{"a": {"b": 1}}`; None if there are none, as in a run on text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        group, _, inner = name.rpartition("/")
        (found.setdefault(group, {}) if group else found)[inner] = value
    return found or None
