"""Where nodes meet over gRPC: the sets and notes of `MemoryWorld`, with a socket in front.

A node is there for as long as it follows the notes. When its connection breaks, the others stop waiting for
it; when it is back, they wait for it again.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from aedit.proto.transports.memory import MemoryWorld
from aedit.proto.transports.transport import Mean, Rows
from aedit.proto.wire import hub_pb2
from aedit.proto.wire.frames import Assembly, chunks, pack, receive
from aedit.proto.wire.security import ServerKeys
from aedit.proto.wire.server import Server
from aedit.proto.wire.service import Handler, Service

SERVICE = "aedit.v1.Meeting"
GIVES = 32
"""Values of one node that are under way at a time; each holds a thread here while it waits."""
GRACE_S = 2.0
"""How long a node whose connection broke may take to come back before nobody waits for it."""
_LOOK_S = 5.0

_Wait: TypeAlias = Callable[[], tuple[hub_pb2.Given, memoryview]]


class Meeting:
    """The service `Meeting` of hub.proto for a known number of nodes."""

    def __init__(self, nodes: int, *, timeout_s: float, limit_bytes: int = 2**31) -> None:
        self.nodes = nodes
        self.timeout_s = timeout_s
        self.limit_bytes = limit_bytes
        self._world = MemoryWorld(nodes, timeout_s=timeout_s)
        self._notes: dict[str, hub_pb2.Note] = {}
        self._following = [0] * nodes
        self._changed = threading.Condition()

    def service(self) -> Service:
        """What a server serves. Chunks stay bytes until frames.py looks at them."""
        pb = hub_pb2
        unary, down = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Handler] = {
            "Enter": unary(self._enter, pb.EnterRequest.FromString, pb.EnterReply.SerializeToString),
            "Give": grpc.stream_stream_rpc_method_handler(self._give),
            "Post": unary(self._post, pb.Note.FromString, pb.Note.SerializeToString),
            "Follow": down(self._follow, pb.FollowRequest.FromString, pb.Note.SerializeToString),
            "Exit": unary(self._exit, pb.ExitRequest.FromString, pb.ExitReply.SerializeToString),
        }
        return Service(SERVICE, handlers)

    def _enter(self, request: hub_pb2.EnterRequest, context: grpc.ServicerContext) -> hub_pb2.EnterReply:
        for name, theirs, ours in (
            ("nodes", request.nodes, self.nodes),
            ("timeout_s", request.timeout_s, self.timeout_s),
        ):
            if theirs != ours:
                _refuse(context, f"{name} is {theirs} there and {ours} here: they must be equal")
        self._check_node(request.node, context)
        return hub_pb2.EnterReply()

    def _give(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            answer = self._brought(messages, context)
            context.send_initial_metadata(())  # it is here: its node may go
            given, value = answer()
        except (ValueError, DecodeError) as error:
            _refuse(context, str(error))
        yield from map(pack, chunks(given.SerializeToString(), value))

    def _brought(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> _Wait:
        """Take a value in; what is returned waits for the others'."""
        heads: list[hub_pb2.GiveHead] = []

        def begin(raw: bytes) -> Assembly:
            head = hub_pb2.GiveHead.FromString(raw)
            self._check_node(head.node, context)
            self._check_size(head)
            heads.append(head)
            return Assembly(head.num_bytes, limit_bytes=self.limit_bytes)

        data = receive(messages, begin)
        head = heads[0]
        transport = self._world.node(head.node)
        shape = tuple(head.shape)
        if head.row:
            rows = transport.gather(head.key, tensor(data, shape, np.float64))
            return lambda: _of_rows(rows.result())
        value = tensor(data, shape, np.float32) if head.weight > 0 else torch.zeros(shape)
        mean = transport.weighted_mean(head.key, value, head.weight)
        return lambda: _of_mean(mean.result())

    def _check_size(self, head: hub_pb2.GiveHead) -> None:
        """A value of weight 0 has a shape and no bytes."""
        whole = math.prod(head.shape) * (8 if head.row else 4)
        comes = whole if head.row or head.weight > 0 else 0
        if head.num_bytes != comes or whole > self.limit_bytes or not 0 <= head.weight < math.inf:
            raise ValueError(
                f"{head.key}: {head.num_bytes} bytes of weight {head.weight:g} declared for shape"
                f" {tuple(head.shape)}, at most {self.limit_bytes} are allowed"
            )

    def _check_node(self, node: int, context: grpc.ServicerContext) -> None:
        if node >= self.nodes:
            _refuse(context, f"there is no node {node} among {self.nodes}")

    def _post(self, note: hub_pb2.Note, context: grpc.ServicerContext) -> hub_pb2.Note:
        with self._changed:
            stays = self._notes.setdefault(note.key, note)
            self._changed.notify_all()
        return stays

    def _follow(
        self, request: hub_pb2.FollowRequest, context: grpc.ServicerContext
    ) -> Iterator[hub_pb2.Note]:
        self._check_node(request.node, context)
        self._come(request.node)
        if not context.add_callback(lambda: self._go(request.node)):
            self._go(request.node)  # gone already
        context.send_initial_metadata(())
        have = request.have
        while context.is_active():
            new = self._news(have, context)
            yield from new
            have += len(new)

    def _news(self, have: int, context: grpc.ServicerContext) -> Sequence[hub_pb2.Note]:
        """Wait for more notes than `have`; after a while there may be none."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._notes) > have or not context.is_active(), _LOOK_S)
            return list(self._notes.values())[have:]

    def _come(self, node: int) -> None:
        with self._changed:
            self._following[node] += 1
        self._world.enter(node)

    def _go(self, node: int) -> None:
        with self._changed:
            self._following[node] -= 1
            self._changed.notify_all()
        timer = threading.Timer(GRACE_S, self._give_up, (node,))
        timer.daemon = True
        timer.start()

    def _give_up(self, node: int) -> None:
        if not self._following[node]:
            self._world.leave(node)

    def _exit(self, request: hub_pb2.ExitRequest, context: grpc.ServicerContext) -> hub_pb2.ExitReply:
        self._check_node(request.node, context)
        self._world.leave(request.node)
        return hub_pb2.ExitReply()


def serve_meeting(meeting: Meeting, address: str, *, keys: ServerKeys | None = None) -> Server:
    """Let nodes meet at HOST:PORT; port 0 takes a free one. Raises UserError if the address cannot be had."""
    # Everybody's values, their notes, and some calls that come and go.
    return Server([meeting.service()], address, keys=keys, threads=meeting.nodes * (GIVES + 1) + 4)


def tensor(data: memoryview, shape: Sequence[int], kind: type[np.generic]) -> Tensor:
    """The bytes as a tensor, not copied. Raises ValueError if their number is not that of `shape`."""
    return torch.from_numpy(np.frombuffer(data, kind).reshape(shape))


def raw(value: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return value.numpy().reshape(-1).view(np.uint8).data


def _of_rows(rows: Rows) -> tuple[hub_pb2.Given, memoryview]:
    data = raw(rows.rows.contiguous())
    mine = -1 if rows.mine is None else rows.mine
    return hub_pb2.Given(shape=rows.rows.shape, mine=mine, num_bytes=data.nbytes), data


def _of_mean(mean: Mean) -> tuple[hub_pb2.Given, memoryview]:
    data = raw(mean.value.contiguous())
    total = float(mean.total_weight)
    return hub_pb2.Given(shape=mean.value.shape, total_weight=total, num_bytes=data.nbytes), data


def _refuse(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
    raise AssertionError("abort raises")
