"""The service `Versions` of a hub: `Newest` and `Get` of the line `run`, whose author is this process."""

import grpc

from aedit.launch.hub.policy_versions import PolicyVersions
from aedit.proto.rpc import CallHandlers, FairPool, Limits, Refusal, Service
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import VersionsCore

_WAITERS = 68
"""Calls of `Newest` at a time: as many as may wait in `VersionsCore`, and some that do not wait."""
_TRANSFERS = 8


class PolicyService:
    """Answers the calls; `versions` is set once this hub leads."""

    def __init__(self, num_parts: int) -> None:
        """Create the answers of a hub process. num_parts: hub processes that split the units."""
        self._num_parts = num_parts
        self.versions: PolicyVersions | None = None

    def newest(self, request: pb.NewestRequest) -> pb.Manifest:
        """Return the newest manifest of the line."""
        return self._core().newest(request)

    def get(self, request: pb.GetRequest) -> tuple[bytes, memoryview, int]:
        """Return head and data of a transfer, and the byte from which on it is sent."""
        return self._core().get(request)

    def _core(self) -> VersionsCore:
        if self._num_parts > 1:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the line `run` has no author, as hub.address names {self._num_parts} hubs and none of them"
                " has the whole policy; trainers' own lines do not need it",
            )
        if self.versions is None:
            text = "this hub is a standby: call the leading hub"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)
        if self.versions.core is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "line run has no version yet")
        return self.versions.core


def policy_service(core: PolicyService, limits: Limits) -> Service:
    """Return the service, without `Offer` and `Put`."""
    handlers = CallHandlers(limits)
    newest, gets = FairPool(_WAITERS, "newest"), FairPool(_TRANSFERS, "get")
    calls = {
        "Newest": handlers.call(pb.NewestRequest, core.newest, newest),
        "Get": handlers.download(pb.GetRequest, core.get, gets),
    }
    return Service("aedit.v1.Versions", calls, (newest, gets))
