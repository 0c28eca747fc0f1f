"""Connections of a node: to hubs, to donors of anchors, and from nodes that fetch its own anchors."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import grpc
import numpy as np
from numpy.typing import NDArray

from aedit.proto.agent.plan import AgentPlan
from aedit.proto.rpc import (
    ClientPool,
    HubClient,
    Limits,
    Refusal,
    Server,
    client_keys,
    donor_service,
    server_keys,
)
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


GIVEN_AT_A_TIME = 2
"""Copies of a unit that a node makes for others at a time."""
BULK = 2
"""Connections per hub for arrays: on a wire that loses packets, each loss holds up one of them."""
DONOR_TIMEOUT_S = 4.0
"""Silence of a donor after which another one is asked: shorter than that after which a hub is given up."""


class Connections:
    """All connections of an agent; `close` shuts them. Raises UserError if the keys cannot be read."""

    def __init__(self, plan: AgentPlan) -> None:
        self._plan = plan
        self._keys = client_keys(Path(plan.keys)) if plan.keys else None
        timeout_s = min(DONOR_TIMEOUT_S, plan.call_timeout_s)
        self.donors = ClientPool(lambda address: HubClient(address, self._keys, call_timeout_s=timeout_s))
        """Clients for pulls from other nodes."""
        self._server: Server | None = None

    def hub(self, address: str) -> HubClient:
        """Return a new client for `address`; the caller closes it.

        In a swarm another replica leads soon if no program listens there; a hub alone is waited for.
        """
        return HubClient(
            address,
            self._keys,
            call_timeout_s=self._plan.call_timeout_s,
            channels=BULK,
            until_it_listens=not self._plan.replicas,
        )

    def open(self, donor: Donor, address: str) -> str:
        """Serve `donor` at HOST:PORT; return the address with the port that was taken. Raises UserError."""
        keys = server_keys(Path(self._plan.keys)) if self._plan.keys else None
        service = donor_service(donor.pull, Limits(), GIVEN_AT_A_TIME)
        self._server = Server([service], address, keys=keys, threads=GIVEN_AT_A_TIME)
        return self._server.address

    def close(self) -> None:
        """Stop serving and close all shared clients."""
        if self._server:
            self._server.stop(0)
        self.donors.close()
