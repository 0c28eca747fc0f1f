"""Serve this node's anchors to nodes that join, so that they do not queue at the hub."""

import hashlib
from collections.abc import Sequence
from threading import Lock

import grpc
import numpy as np
from numpy.typing import NDArray

from aedit.proto.rpc import Refusal
from aedit.proto.rpc import hub_pb2 as pb

PATIENCE_S = 0.2
"""For an anchor that changes just now."""


class Donor:
    """`Exchange.Pull` over a node's anchors.

    Each answer is a copy, made while the anchor does not change; the number of server threads bounds the
    number of copies.
    """

    def __init__(
        self,
        run: str,
        anchors: Sequence[NDArray[np.float32]],
        versions: Sequence[int],
        guards: Sequence[Lock],
    ) -> None:
        """Create a donor. versions: of the anchors, 0 while one has none.

        Changed by their owner under the same guards.
        """
        self._run, self._anchors, self._versions, self._guards = run, anchors, versions, guards

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        """Return the anchor, whole.

        FAILED_PRECONDITION: it is still being fetched here, so ask another; NOT_FOUND: this node is of
        another run.
        """
        if request.who.run != self._run:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"this node is of run {self._run}")
        if request.unit >= len(self._anchors):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"there is no unit {request.unit}")
        guard = self._guards[request.unit]
        if not guard.acquire(timeout=PATIENCE_S):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"unit {request.unit} changes just now")
        try:
            version = self._versions[request.unit]
            data = self._anchors[request.unit].copy().view(np.uint8).data
        finally:
            guard.release()
        if version == 0:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"unit {request.unit} is not here yet")
        digest = hashlib.sha256(data).digest()
        return pb.PullHead(version=version, codec="fp32", num_bytes=len(data), sha256=digest), data
