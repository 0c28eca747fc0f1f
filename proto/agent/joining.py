"""Initial anchors of a node that has joined: fetch them, or give the run its first ones."""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from aedit.proto.agent.mailbox import Mailbox
from aedit.proto.agent.membership import Membership
from aedit.proto.agent.plan import AgentPlan
from aedit.proto.agent.unit_transfers import Traffic, UnitTransfers
from aedit.proto.rpc import Download, HubClient, HubRefused, HubUnreachable
from aedit.proto.rpc import hub_pb2 as pb

DONORS = 3
"""Other nodes that are asked for a unit before the hub is."""
ASK_AGAIN_S = 1.0
"""How often a node that waits for the founder's weights looks whether they are there."""
log = logging.getLogger(__name__)

Giver = Callable[[str], HubClient]


class InitialSync:
    """From the first join to anchors for all units. `enter` is the body of a thread."""

    def __init__(self, plan: AgentPlan, box: Mailbox, transfers: UnitTransfers, traffic: Traffic) -> None:
        self._plan, self._box, self._transfers, self._traffic = plan, box, transfers, traffic
        self._replies: dict[int, pb.JoinReply] = {}
        self._change = threading.Condition()
        self._ended = False
        self._silent: set[str] = set()
        """Donors that have broken off, or not answered: they are not asked for other units, too."""

    def joined(self, part: int, reply: pb.JoinReply) -> None:
        """Note that hub process `part` has accepted this node, perhaps again."""
        with self._change:
            self._replies[part] = reply
            self._change.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def enter(self, memberships: Sequence[Membership], giver: Giver) -> Sequence[int] | None:
        """Fetch all anchors and return the version of each; None if closed before.

        giver: returns a client for a node.
        """
        if not self._wait(lambda: len(self._replies) == len(memberships)):
            return None
        with ThreadPoolExecutor(self._plan.streams, "initial_sync") as pool:
            units = range(len(self._plan.units))
            work = [
                pool.submit(self._bring, unit, memberships[unit % len(memberships)], giver) for unit in units
            ]
            for done in work:
                done.result()
        return None if self._ended else self._transfers.versions

    def _bring(self, unit: int, membership: Membership, giver: Giver) -> None:
        while not self._ended and membership.wait():
            reply = self._replies[membership.part]
            if reply.versions[unit]:
                return self._take(unit, membership, giver, list(reply.donors))
            if reply.founder:
                return self._transfers.found(unit)
            # Another node founds this run. A new Join says when it has, or that it never will.
            self._wait(lambda: self._replies[membership.part] is not reply, ASK_AGAIN_S)  # noqa: B023
            if self._replies[membership.part] is reply:
                membership.join_again()
                self._wait(lambda: self._replies[membership.part] is not reply, ASK_AGAIN_S)  # noqa: B023

    def _take(self, unit: int, membership: Membership, giver: Giver, donors: list[str]) -> None:
        """Fetch one unit from other nodes, else from the hub.

        Each unit begins at another node, so that they share the work. Bytes that one of them has sent are not
        asked for again, as long as the next has the same version. A donor may lie: what it has sent counts
        once the hub names the same hash for that version. Else the unit comes from the hub.
        """
        # What proves to the hub who we are is no other node's business.
        request = pb.PullRequest(who=pb.Who(run=self._plan.run), unit=unit)
        download = Download(request, self._box.anchors[unit].view(np.uint8).data)
        donors = [donor for donor in donors if donor != membership.donor and donor not in self._silent]
        random.shuffle(donors)
        for donor in donors[:DONORS]:
            if donor not in self._silent and self._is_taken(unit, download, giver(donor), donor):
                break
        while not self._ended and membership.wait():
            request.who.CopyFrom(membership.who())
            if self._is_taken(unit, download, membership.client, owner=membership):
                return
            membership.pause(random.uniform(0.5, 1.5) * self._plan.heartbeat_s)

    def _is_taken(
        self,
        unit: int,
        download: Download,
        client: HubClient,
        donor: str = "",
        *,
        owner: Membership | None = None,
    ) -> bool:
        """Return whether the unit was fetched from `client`.

        donor: its address, if `client` is not the hub's. owner: the membership, if it is.
        """
        before = download.num_bytes
        try:
            with self._traffic.moving(), self._transfers.guards[unit]:
                head = client.fetch(download, again=not donor)
                if head.num_bytes != download.room_bytes or head.chain:
                    raise ValueError(f"{head.num_bytes} bytes, where an anchor has {download.room_bytes}")
                if owner is not None:
                    self._transfers.check(owner, unit, head)
                self._transfers.versions[unit] = 0 if donor else head.version
            return True
        except (HubRefused, HubUnreachable, ValueError) as error:
            if donor and isinstance(error, HubUnreachable):
                self._silent.add(donor)
            log.warning("unit %d: %s; asking another", unit, error)
            return False
        finally:
            self._traffic.count(down=download.num_bytes - before)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._ended or is_so(), timeout_s)
            return not self._ended
