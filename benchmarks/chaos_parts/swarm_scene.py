"""A swarm under faults: what is due is started, and the hubs' journals are kept."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_parts.accounts import Accounts
from benchmarks.chaos_parts.swarm_peers import SwarmGround, SwarmPeer
from benchmarks.chaos_parts.swarm_tables import Tables
from benchmarks.kit.cluster import ledger_tail
from benchmarks.kit.processes import end

TURN_S, KEEP_EVERY_S, ANSWERS_S = 0.05, 0.3, 5.0
KILLED_S = 0.5
"""Longest time for which a machine that was killed is away, unless the command says otherwise."""
TAIL = 65536
"""Bytes of a ledger that have a push of each unit."""


@dataclass(slots=True)
class SwarmStory:
    """Faults applied and results."""

    faults: dict[str, int] = field(default_factory=dict)
    moments: list[str] = field(default_factory=list)
    """Time of each fault by the monotonic clock, as in the ledgers, its kind and its machine."""
    starts: int = 0
    """Starts of machines."""
    absent_s: float = 0.0
    """Seconds for which machines were stopped, or had been killed and were not to start yet, summed."""
    longest_gap_s: float = 0.0
    """Longest time in which no node saw a push of some part acknowledged; the largest over parts."""
    healed_s: float = 0.0
    """Seconds from the end of the last fault until every node had an acknowledgement of every part."""
    died: list[str] = field(default_factory=list)
    """Processes that ended though nobody had killed them."""
    late_calls: int = 0
    """Calls that ended more than a second after their deadline."""
    left_behind: int = 0
    tables: Tables = field(default_factory=Tables)
    accounts: list[Accounts] = field(default_factory=list)
    """Accounts of each part."""

    @property
    def steps_per_s(self) -> float:
        """Return the steps in pushes of the history, mean over parts, of all nodes together."""
        return sum(part.steps_per_s for part in self.accounts) / len(self.accounts)


@dataclass(slots=True)
class Scene:
    """A swarm under faults. The caller calls `pause` again and again."""

    ground: SwarmGround
    chance: random.Random
    story: SwarmStory
    kept_s: float = 0.0
    back_within_s: float = KILLED_S
    """Longest time after which a machine that was killed, or another in its place, starts."""
    mends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Times at which faults end, and the acts that end them."""

    def pause(self, until_s: float) -> None:
        """Start what is due and keep journals, until this time of the monotonic clock."""
        self.until(lambda: False, until_s - time.monotonic())

    def until(self, is_so: Callable[[], object], limit_s: float) -> bool:
        """Start what is due and keep journals until `is_so()`; return False if it is not within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not (so := bool(is_so())) and time.monotonic() < deadline:
            self._turn()
            time.sleep(TURN_S)
        return so

    def note(self, kind: str, *peers: SwarmPeer) -> None:
        """Count a fault."""
        names = ", ".join(f"{peer.name} (place {peer.slot})" for peer in peers)
        self.story.moments.append(f"{time.monotonic():.1f} {kind}: {names}")
        self.story.faults[kind] = self.story.faults.get(kind, 0) + 1

    def heal(self) -> None:
        """End all faults."""
        for _, mend in list(self.mends):  # one that waits for something adds itself again
            mend()
        self.mends = []
        for peer in self.ground.peers:
            peer.due_s = 0.0

    def status(self, peer: SwarmPeer) -> dict[str, Any] | None:
        """Return what a peer says of the swarm, None without an answer; what is due starts meanwhile."""
        asked = self.ground.ask(peer)
        if not self.until(lambda: asked.poll() is not None, ANSWERS_S):
            end([asked])
            return None
        found: dict[str, Any] | None = json.loads(asked.communicate()[0]) if asked.returncode == 0 else None
        return found

    def present(self) -> list[SwarmPeer]:
        """Return the machines that run and are neither stopped nor cut off."""
        return [peer for peer in self.ground.peers if peer.process is not None and not peer.is_away]

    def with_tables(self) -> list[SwarmPeer]:
        """Return the machines that find others by a hash table."""
        return [peer for peer in self.ground.peers if peer.slot in self.ground.shape.tables]

    def owner(self, part: int) -> SwarmPeer | None:
        """Return the machine that has acknowledged last for a part, if it runs and can be reached."""
        tails = [ledger_tail(peer.ledger, TAIL) for peer in self.ground.peers]
        parts = self.ground.shape.parts
        told = [
            (line["t"], line["hub"])
            for lines in tails
            for line in lines
            if line.get("event") == "acknowledged" and line["unit"] % parts == part
        ]
        name = self.ground.hubs.get(max(told)[1], "") if told else ""
        return next((peer for peer in self.present() if peer.name == name), None)

    def pushes_large(self) -> bool:
        """Return whether a node pushes its large unit now."""
        tails = [ledger_tail(peer.ledger, TAIL) for peer in self.present()]
        return any(lines and lines[-1]["event"] == "offered" and lines[-1]["unit"] == 0 for lines in tails)

    def all_acknowledged(self, after_s: float) -> bool:
        """Return whether every node has seen a push of every part acknowledged after this time."""
        parts = self.ground.shape.parts
        for peer in self.ground.peers:
            lines = (line for line in ledger_tail(peer.ledger, TAIL) if line.get("event") == "acknowledged")
            if {line["unit"] % parts for line in lines if line["t"] > after_s} != set(range(parts)):
                return False
        return True

    def _turn(self) -> None:
        now = time.monotonic()
        if now > self.kept_s + KEEP_EVERY_S:
            self.kept_s = now
            self.ground.keep()
            self.story.tables.look(self.with_tables())
        for due_s, mend in [entry for entry in self.mends if entry[0] <= now]:
            mend()
            self.mends.remove((due_s, mend))
        for peer in self.ground.peers:
            if ended := peer.ended():
                self.story.died += ended
                peer.kill()
            if peer.process is None and now >= peer.due_s and not self.ground.waits(peer):
                self.ground.start(peer)
