"""hivemind's hash tables in a swarm: which machines have one, how it is killed, and whether it is back.

`python -m benchmarks.chaos_parts.swarm_tables MULTIADDRESSES` looks for peers there as `aedit join` does.
"""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from aedit.launch.swarm import introduced
from aedit.types import UserError
from benchmarks.chaos_parts.swarm_peers import SwarmPeer
from benchmarks.kit.processes import end, start

PROCESS = "aedit.proto.dht.dht_process"
BACK_WITHIN_S = 60.0
"""Longest time until a table is back that had been killed: two tries fail if all were, on busy processors."""
_ASKS_WITHIN_S = 90.0
_BACK = re.compile(r"the hash table is back after [\d.]+ s")


def machines_with_tables() -> tuple[int, ...]:
    """Return the places of the machines that find others by a hash table; none without hivemind."""
    return (1, 4) if importlib.util.find_spec("hivemind") else ()


def table_processes(peer: SwarmPeer) -> list[psutil.Process]:
    """Return hivemind's process of a machine and what it has started, p2pd; nothing unless both run."""
    found: list[psutil.Process] = []
    for process in peer.processes():
        with suppress(psutil.NoSuchProcess):
            if PROCESS in process.cmdline():
                found = [process, *process.children(recursive=True)]
    return found if len(found) > 1 else []


@dataclass(slots=True)
class Outage:
    """A table that was killed."""

    machine: str
    peer: int
    """Its process."""
    began_s: float
    said: int
    """Times that the log of the machine had said before that its table is back."""
    pids: tuple[int, ...]
    disturbed: bool = False
    """A machine with a table failed before this one was back."""
    restarted: bool = False
    """The machine itself was killed before that; it has started another table."""
    back_s: float | None = None
    """Time until the machine said that its table was back."""


@dataclass(slots=True)
class Tables:
    """Outages of the tables of one run, and what a newcomer finds at the end."""

    outages: list[Outage] = field(default_factory=list)
    answering: int = 0
    """Tables in which a newcomer finds peers at the end."""
    wanted: int = 0
    left_behind: int = 0
    """Killed processes that still run."""

    def kill(self, peers: Sequence[SwarmPeer]) -> None:
        """Kill hivemind's process and p2pd of these machines, all at once."""
        found = {peer.name: table_processes(peer) for peer in peers}
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees the end of another one
            for process in (one for processes in found.values() for one in processes):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        for peer in peers:
            pids = tuple(process.pid for process in found[peer.name])
            whose = peer.process.pid if peer.process else 0
            self.outages.append(Outage(peer.name, whose, time.monotonic(), _times_back(peer), pids))

    def open(self) -> list[Outage]:
        """Return the outages that have not ended."""
        return [one for one in self.outages if one.back_s is None and not one.restarted]

    def look(self, peers: Sequence[SwarmPeer]) -> None:
        """Note which tables are back. peers: the machines with tables that are there now."""
        failed = any(peer.process is None or peer.is_away for peer in peers)
        for outage in self.open():
            outage.disturbed |= failed
            peer = next((one for one in peers if one.process and one.process.pid == outage.peer), None)
            if peer is None:
                outage.restarted = True
            elif _times_back(peer) > outage.said and table_processes(peer):
                outage.back_s = time.monotonic() - outage.began_s

    def ask(self, peers: Sequence[SwarmPeer], told: dict[int, str]) -> None:
        """Look for peers in the table of each machine, as a newcomer does. told: multiaddresses by place."""
        asked = [
            start("benchmarks.chaos_parts.swarm_tables", told[peer.slot], place=peer.place, stdout=-1)
            for peer in peers
            if peer.slot in told and table_processes(peer)
        ]
        deadline_s, self.answering = time.monotonic() + _ASKS_WITHIN_S, 0
        for process in asked:
            with suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=max(1.0, deadline_s - time.monotonic()))[0]
                self.answering += process.returncode == 0 and bool(json.loads(said))
        end(asked)
        self.wanted = len(peers)
        self.left_behind = sum(_runs(pid) for outage in self.outages for pid in outage.pids)

    @property
    def lasted_s(self) -> list[float]:
        """Return how long tables were away, of machines that were left alone meanwhile."""
        return [one.back_s for one in self.outages if one.back_s is not None and not one.disturbed]


def _times_back(peer: SwarmPeer) -> int:
    return len(_BACK.findall(peer.log.read_text(errors="replace")))


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any(
            PROCESS in word or "p2pd" in word for word in process.cmdline()
        )
    return False


def main(words: list[str]) -> int:
    """Print the addresses of the peers that a newcomer finds; return the exit code."""
    try:
        print(json.dumps(introduced(words[0])))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
