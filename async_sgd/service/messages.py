"""Convert between the hub's types and protocol buffers."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast

import grpc

from aedit.async_sgd.hub import MOST_LEASES, Denied, Hub, Joiner, Member, NodeReport, run_news
from aedit.proto.rpc import Refusal, answer_in
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import RL_REPORT, Layout, TensorLayout, UnitLayout, printable

_CODES = {
    "unknown": grpc.StatusCode.NOT_FOUND,
    "replaced": grpc.StatusCode.ABORTED,
    "excluded": grpc.StatusCode.PERMISSION_DENIED,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "different": grpc.StatusCode.INVALID_ARGUMENT,
    "taken": grpc.StatusCode.ALREADY_EXISTS,
    "foreign": grpc.StatusCode.PERMISSION_DENIED,
}
_LONGEST_TEXT = 256
"""Characters of what a node says about itself."""
_LONGEST_FACT = 4096
MOST_DONORS = 16
"""Addresses of other nodes in one reply; each node gets other ones."""


def refusal_of(denied: Denied) -> Refusal:
    """Return the refusal that the peer gets."""
    return Refusal(_CODES[denied.kind], denied.reason)


def joiner(request: pb.JoinRequest) -> Joiner:
    """Return the node that wants to join.

    Raises Refusal if its name or layout is missing, ValueError if its voter has not signed the offer.
    """
    for name, value in request.facts.items():
        if len(name) > _LONGEST_TEXT or len(value) > _LONGEST_FACT or not (name + value).isprintable():
            most = f"at most {_LONGEST_TEXT} printable characters, a value {_LONGEST_FACT}"
            raise invalid(f"facts: a name has {most}")
    return Joiner(
        name=request.name,
        layout=_layout_of(request),
        facts=tuple(sorted(request.facts.items())),
        num_samples=request.num_samples,
        donor=request.donor,
        voter=answer_in(request.offer).voter if request.HasField("offer") else 0,
        prefers=request.prefers - 1 if request.prefers else None,
    )


def _layout_of(request: pb.JoinRequest) -> Layout:
    """Return the layout of the node's model. Raises Refusal for names that views cannot show."""
    for unit in request.layout:
        for name in (unit.name, *(tensor.name for tensor in unit.tensors)):
            if not name or len(name) > _LONGEST_TEXT or not name.isprintable():
                raise invalid(f"layout: a unit or parameter has 1 to {_LONGEST_TEXT} printable characters")
    return Layout(
        tuple(
            UnitLayout(unit.name, tuple(TensorLayout(t.name, tuple(t.shape)) for t in unit.tensors))
            for unit in request.layout
        )
    )


def check_blocks(blocks: Sequence[object]) -> None:
    """Raise Refusal if a message lists more blocks of positions than a node can have."""
    if len(blocks) > MOST_LEASES:
        text = f"{len(blocks)} blocks in one message: a node has at most {MOST_LEASES} leases"
        raise invalid(text)


def invalid(text: str) -> Refusal:
    """Return the refusal of a message that cannot be valid."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)


def report_of(request: pb.HeartbeatRequest) -> NodeReport:
    """Return a node's report about itself."""
    return NodeReport(
        steps=request.steps,
        tokens=request.tokens,
        steps_per_s=request.steps_per_s,
        busy_s=request.busy_s,
        wait_s=request.wait_s,
        wire_s=request.wire_s,
        bytes_up=request.bytes_up,
        bytes_down=request.bytes_down,
        loss=request.loss,
        state=printable(request.state, _LONGEST_TEXT),
        rl={
            name: request.rl[name] for name in RL_REPORT if name in request.rl and isfinite(request.rl[name])
        },
    )


def join_reply(hub: Hub, member: Member, session: int, now: float) -> pb.JoinReply:
    """Return what a new member must know. session: its new one, of which the hub keeps a fingerprint."""
    state = hub.state
    assert state.layout is not None
    indices = range(len(state.layout.units))
    news = member_news(hub, member.node, now)
    return pb.JoinReply(
        term=state.term,
        node=member.node,
        session=session,
        founder=state.founder == member.node and not (state.is_founded or hub.recovery_anchors.are_asked),
        versions=[state.units[i].version if i in state.units else 0 for i in indices],
        seqs=[member.received.get(i, 0) for i in indices],
        donors=news.donors,
        news=news,
    )


def member_news(hub: Hub, node: int, now: float) -> pb.News:
    """Return the state of the run for a member."""
    found = run_news(hub, node, now)
    return pb.News(
        term=hub.state.term,
        units=[unit_news(hub, node, unit) for unit in hub.state.units],
        round=found.round,
        pace_steps=found.pace_steps,
        nodes=found.nodes,
        total_steps=found.total_steps,
        total_tokens=found.total_tokens,
        elapsed_s=found.elapsed_s,
        finished=found.finished,
        evaluates=found.evaluates,
        donors=hub.state.roster.donors(node, MOST_DONORS),
        progress=found.progress,
        brings=hub.recovery_anchors.brings(node, now),
    )


def unit_news(hub: Hub, node: int, unit: int) -> pb.UnitNews:
    """Return the newest version of a unit, and the last decision about this node's pushes of it."""
    last = hub.state.members[node].decision(unit)
    return pb.UnitNews(
        unit=unit,
        version=hub.state.units[unit].version,
        seq=last.seq,
        verdict=cast(pb.Verdict, int(last.verdict)),
        reason=last.reason,
    )


def json_line(values: Mapping[str, Any]) -> str:
    """Return values as JSON, which has no NaN and no infinity: null instead."""
    text = json.dumps(values)
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda name: None))
