"""The gRPC services of somebody who only tells of a run: a peer of a swarm."""

from collections.abc import Callable

from aedit.proto.rpc import hub_pb2
from aedit.proto.rpc.fair_pool import FairPool
from aedit.proto.rpc.limits import Limits
from aedit.proto.rpc.service import SMALL_BYTES, CallHandlers, Service


def run_services(
    hello: Callable[[hub_pb2.HelloRequest], hub_pb2.HelloReply],
    status: Callable[[hub_pb2.StatusRequest], hub_pb2.StatusReply],
    limits: Limits,
) -> tuple[Service, ...]:
    """Return Membership with Hello alone, and State with Status alone."""
    handlers, small = CallHandlers(limits), FairPool(4, "call")
    membership = {"Hello": handlers.call(hub_pb2.HelloRequest, hello, small, SMALL_BYTES)}
    state = {"Status": handlers.call(hub_pb2.StatusRequest, status, small, SMALL_BYTES)}
    return Service("aedit.v1.Membership", membership, (small,)), Service("aedit.v1.State", state)
