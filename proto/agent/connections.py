"""Connections of a node: to hubs, to nodes that give it anchors, and from nodes that fetch its own."""

import threading
from pathlib import Path

from aedit.proto.agent.donor import Donor
from aedit.proto.agent.plan import AgentPlan
from aedit.proto.rpc import ClientKeys, HubClient, Limits, Server, client_keys, donor_service, server_keys

GIVEN_AT_A_TIME = 2
"""Copies of a unit that a node makes for others at a time."""
BULK = 2
"""Connections per hub for arrays: on a wire that loses packets, each loss holds up one of them."""
DONOR_TIMEOUT_S = 4.0
"""Without a byte from a donor for so long, another one is asked: that is sooner than a hub is given up."""


class Connections:
    """All connections of an agent; `close` shuts them. Raises UserError if the keys cannot be read."""

    def __init__(self, plan: AgentPlan) -> None:
        self._plan = plan
        self._keys = client_keys(Path(plan.keys)) if plan.keys else ClientKeys()
        self._lock = threading.Lock()
        self._givers: dict[str, HubClient] = {}
        self._server: Server | None = None

    def hub(self, address: str) -> HubClient:
        """Return a new client for `address`; the caller closes it.

        In a swarm another replica leads soon if nobody listens there; a hub alone is waited for.
        """
        return HubClient(
            address,
            self._keys,
            call_timeout_s=self._plan.call_timeout_s,
            channels=BULK,
            until_it_listens=not self._plan.replicas,
        )

    def giver(self, address: str) -> HubClient:
        """Return the client for pulls from another node; one per address, shared."""
        with self._lock:
            if address not in self._givers:
                timeout_s = min(DONOR_TIMEOUT_S, self._plan.call_timeout_s)
                self._givers[address] = HubClient(address, self._keys, call_timeout_s=timeout_s)
            return self._givers[address]

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
        with self._lock:
            for client in self._givers.values():
                client.close()
            self._givers.clear()
