"""Parts of the model on a peer: which ones it keeps, and the hub process of each, restarted if it fails.

`part_view` and `Role` are pure functions of the cards of all live peers. Placement only says who offers to
keep a part. Who owns it, and whose confirmation is waited for, is decided by the votes of the part's replicas
and nodes (`async_sgd.replication`): two peers that see other members, or none at all, can do no harm.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from aedit.child import USER_ERROR, Child, to_json
from aedit.launch.config import SwarmConfig
from aedit.launch.hub import HUB_PROGRAM, HubOptions
from aedit.launch.records import resting_file
from aedit.proto.rpc import ClientKeys, HubClient, HubRefused, HubUnreachable
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import (
    REPLICAS,
    STATEMENTS,
    Contradiction,
    PartPlaces,
    PartReplica,
    PeerCard,
    candidates,
    ranking,
    replay_difference,
    write_statements,
)
from aedit.system import read_line

log = logging.getLogger(__name__)

MARK = "part.json"
"""File that a hub writes into its folder when it first starts there."""
RECORDS = ("metrics.jsonl", "events.jsonl")
_STATUS_S = 2.0
"""Deadline of the question for a replica's state."""
_NO_LINES = 2**31 - 1
"""More lines of metrics than there are: none are sent."""
_REST_S = 5.0
"""Seconds without confirmations before a replica is removed: its owner counts on it 2 s longer at most."""
_AGAIN_S = 2.0
"""Pause before a replica that has ended is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Options of a peer beside the configuration of the run."""

    directory: Path
    """Folder of its key, replicas and records."""
    name: str
    peers: str = ""
    """In place of `swarm.peers`."""
    founds: bool = False
    """Begin the run: found every part. A peer that was in the run before goes on with what it has."""
    forces: tuple[int, ...] = ()
    """Parts that it founds without a vote, because too few peers are left; see `Forcing`."""
    stays: bool = False
    """Serve until a signal arrives, also after the run is over, for nodes that come late."""
    keys: Path | None = None
    insecure: bool = False

    @property
    def run_toml(self) -> Path:
        """Return the file of the configuration for the processes of this peer."""
        return self.directory / "run.toml"

    def folder(self, part: int) -> Path:
        """Return the folder of the replica of a part."""
        return self.directory / f"part_{part}"

    def kept(self, parts: int) -> list[int]:
        """Return the parts, of `parts`, of which this peer has a replica on its disk."""
        return [part for part in range(parts) if (self.folder(part) / MARK).exists()]


class Role(Enum):
    """The next step of a peer with a part."""

    HOST = "host"
    """Begin to keep a replica of it."""
    WAIT = "wait"
    """Begin to keep one when others have given theirs up, or after a while."""
    RETIRE = "retire"
    """Give up the own replica."""
    KEEP = "keep"
    """Nothing changes."""


@dataclass(frozen=True, slots=True)
class PartView:
    """One part, as the live peers describe it."""

    ranked: tuple[bytes, ...]
    """Keys of the peers that can keep the part, those that should do so first."""
    replicas: Mapping[bytes, PartReplica]
    """Replicas of the part by the key of their peer, as it says itself."""
    me: bytes = b""
    """Key of the peer that looks."""
    placed: tuple[bytes, ...] = ()
    """The ranking with the peers that have vanished a moment ago; empty: `ranked`."""

    @property
    def owner(self) -> bytes | None:
        """Return the key of the peer that owns the part, according to the cards; None if none is known.

        A card may lie. So of several that say so, it is the one that the own replica follows or is, then the
        one that most replicas in sync follow, then the one of the highest term.
        """
        leading = [key for key, replica in self.replicas.items() if replica.leads]

        def rank(key: bytes) -> tuple[bool, int, int, bytes]:
            followers = self._followers(self.replicas[key].term)
            return key == self.me or self.me in followers, len(followers), self.replicas[key].term, key

        return max(leading, key=rank, default=None)

    def _followers(self, term: int) -> set[bytes]:
        """Return the peers whose replicas are in sync with an owner of this term."""
        replicas = self.replicas.items()
        return {key for key, one in replicas if one.in_sync and not one.leads and one.term == term}

    def first(self) -> bytes | None:
        """Return the peer that should own the part: the best-ranked one whose replica is in sync; or None."""
        in_sync = (key for key in self.ranked if key in self.replicas and self.replicas[key].in_sync)
        return next(in_sync, None)

    def role(self, copies: int, others: int) -> Role:
        """Return what this peer does with the part.

        Args:
            copies: Replicas that are wanted.
            others: Replicas on which the voters have agreed without the own one, as its journal has them; 0
                while the own one counts. What cards say is not enough to give a replica up.
        """
        me, chosen = self.me, self._chosen(copies)
        if me not in self.replicas:
            return self._beginning(chosen, copies) if me in chosen and self.owner is not None else Role.KEEP
        if me in chosen or self.replicas[me].leads:
            return Role.KEEP
        return Role.RETIRE if chosen and others >= copies else Role.KEEP

    def _chosen(self, copies: int) -> tuple[bytes, ...]:
        """Return the peers that are to keep the part.

        One that has vanished a moment ago is one of them, unless most of the copies are gone.
        """
        num_copies = sum(key in self.replicas and self.replicas[key].in_sync for key in self.ranked)
        return (self.placed or self.ranked if num_copies > copies // 2 else self.ranked)[:copies]

    def _beginning(self, chosen: tuple[bytes, ...], copies: int) -> Role:
        """Return the role of a chosen peer without a replica: there is one replica too many at most.

        Otherwise each change of the ranking would add replicas sooner than others are given up, and on a busy
        machine each of them makes the ranking change again.
        """
        missing = [key for key in chosen if key in self.ranked and key not in self.replicas]
        vanished = sum(key not in self.ranked for key in chosen)
        present = sum(key in self.replicas for key in self.ranked) + vanished
        return Role.HOST if self.me in missing[: max(0, copies + 1 - present)] else Role.WAIT

    def places(self, copies: int, peers: int = 0) -> PartPlaces:
        """Return the addresses of the replicas, of which `copies` are wanted, for the processes here.

        peers: that can keep the part, with those whose cards ran out a moment ago.
        """
        ranked = [key for key in self.ranked if key in self.replicas]
        ranked += sorted(set(self.replicas) - set(ranked))

        def address(key: bytes | None) -> str:
            return "" if key is None else self.replicas[key].address

        least = max(1, min(copies // 2 + 1, max(peers, len(self.ranked))))
        keys = tuple(key.hex() for key in ranked)
        return PartPlaces(
            tuple(map(address, ranked)), address(self.owner), address(self.first()), least, keys
        )


def part_view(
    run: str,
    part: int,
    live: Mapping[bytes, PeerCard],
    me: bytes = b"",
    counts: Callable[[int], bool] = lambda term: True,
    lately: frozenset[bytes] = frozenset(),
) -> PartView:
    """Return the view of one part.

    Args:
        run: Name of the run.
        part: Number of the part.
        live: Cards of the live peers by key, that of the peer `me` included.
        me: Key of the peer that looks.
        counts: Returns whether replicas with a term are of the founding of the part that counts.
        lately: Keys of the peers that can keep parts and were live a moment ago.
    """
    hosted = {key: card.parts[part] for key, card in live.items() if part in card.parts}
    replicas = {key: replica for key, replica in hosted.items() if counts(replica.term)}
    hosts = candidates(live)
    return PartView(
        ranking(run, part, hosts), replicas, me, placed=ranking(run, part, hosts | lately) if lately else ()
    )


class HostedPart:
    """A hub process, and the state that it reported last."""

    def __init__(
        self,
        part: int,
        swarm: SwarmConfig,
        options: PeerOptions,
        keys: ClientKeys,
        *,
        founds: bool,
        above: int = 0,
    ) -> None:
        """Start the process.

        Args:
            part: Number of the part.
            swarm: Configuration of the swarm.
            options: Of the peer.
            keys: For calls to the process.
            founds: It begins the part, instead of following it.
            above: Number below its first term, if it begins the part.
        """
        self.part, self._swarm, self._options, self._keys = part, swarm, options, keys
        self._folder = options.folder(part)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (
            self._folder / MARK
        ).exists():  # a peer that was ended while it gave up a replica leaves some of it
            _clear(self._folder)
        self._client: HubClient | None = None
        self._address = ""
        self._ended_s: float | None = None
        self.is_over = False
        """True once the process has ended without error, with the run."""
        self.state: PartReplica | None = None
        """None until it answers, and when it has not for a lease."""
        self._reported_s = 0.0
        self.others = 0
        """Replicas on which the voters have agreed without this one, by its journal; 0 while it counts."""
        self.faults: tuple[Contradiction, ...] = ()
        """False statements of owners that the replica has found by its journal."""
        self._told: list[bytes] = []
        self._unconfirmed_s = 0.0
        self._rests_since_s: float | None = None
        resting_file(self._folder).unlink(missing_ok=True)
        self._founds, self._above = founds, above
        self._start(founds=founds)

    def look(self) -> None:
        """Ask the process for its state; start it again if it has ended with an error."""
        if not self._child.running():
            self._mend()
            return
        if (address := read_line(self._folder / "address")) not in ("", self._address):
            if self._client is not None:
                self._client.close()
            self._address = address
            self._client = HubClient(address, self._keys, call_timeout_s=_STATUS_S)
        self._ask()
        self._founds = self._founds and self.state is None  # once it has led, its journal says how to go on

    def compare(self, statements: Sequence[bytes]) -> None:
        """Let the replica compare statements of owners with its journal. Raises OSError."""
        if statements and statements != self._told:
            write_statements(self._folder / STATEMENTS, statements)
            self._told = list(statements)

    def rest(self, rests: bool) -> bool:
        """Let the replica confirm nothing to its owner, or confirm again.

        Returns whether it has rested, and confirmed nothing, for longer than the owner counts on it: a
        confirmation may be on its way when the rest begins.
        """
        if not rests:
            self._rests_since_s = None
            resting_file(self._folder).unlink(missing_ok=True)
            return False
        now = time.monotonic()
        if self._rests_since_s is None:
            self._rests_since_s = now
            resting_file(self._folder).touch()
        return min(now - self._rests_since_s, self._unconfirmed_s) >= _REST_S

    def retire(self) -> None:
        """End the process and forget the replica, all but records of the run and what was set aside."""
        self.stop()
        _clear(self._folder)

    def set_aside(self) -> None:
        """End the process and keep its folder under another name: the part was founded again without it."""
        self.stop()
        set_aside(self._folder)

    def ask_to_end(self) -> None:
        """Ask the process to end; an owner hands its part over first."""
        self._child.terminate()

    def stop(self, limit_s: float = 10.0) -> None:
        """End the process, at once if it has not ended in time."""
        self._child.terminate()
        deadline_s = time.monotonic() + limit_s
        while self._child.running() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._child.kill()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _start(self, *, founds: bool) -> None:
        (self._folder / "address").unlink(missing_ok=True)
        peer = self._options
        options = HubOptions(
            directory=self._folder,
            address=f"{self._swarm.listen.rpartition(':')[0]}:0",
            part=(self.part, self._swarm.parts),
            standby=not founds,
            replicas=peer.directory / REPLICAS,
            term_above=self._above if founds else 0,
            stay=peer.stays,
            keys=peer.keys,
            insecure=peer.insecure,
        )
        command = [sys.executable, "-m", HUB_PROGRAM, str(peer.run_toml), to_json(options)]
        self._child = Child(command, peer.directory / f"part_{self.part}.log", own=True)
        self._ended_s = None

    def _mend(self) -> None:
        self.state = None
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self.is_over = self._child.exit_code() == 0
            self._founds = self._founds and self._child.exit_code() != USER_ERROR  # another one leads by now
            if self._child.exit_code() == USER_ERROR:
                log.warning("part %d: another peer owns it now; following that one", self.part)
            elif not self.is_over:
                log.warning("part %d: its process has ended with code %d", self.part, self._child.exit_code())
        elif not self.is_over and time.monotonic() > self._ended_s + _AGAIN_S:
            self._child.kill()
            self._start(founds=self._founds)

    def _ask(self) -> None:
        """Ask for the state. On a busy machine an answer may fail to come, and the replica is there."""
        reported = self._asked()
        if reported is not None:
            self._reported_s = time.monotonic()
        elif time.monotonic() < self._reported_s + self._swarm.lease_s:
            reported = self.state
        self.state = reported

    def _asked(self) -> PartReplica | None:
        self.others = 0
        if self._client is None:
            return None
        try:
            reply = self._client.status(pb.StatusRequest(metrics_after=_NO_LINES), _STATUS_S)
        except (HubUnreachable, HubRefused) as error:
            log.info("part %d: %s", self.part, error)
            return None
        status = json.loads(reply.json)
        leads = "follows" not in status
        self.others = 0 if status.get("is_needed", True) else int(status.get("other_replicas", 0))
        self._unconfirmed_s = float(status.get("unconfirmed_s", 0.0))
        found = ([bytes.fromhex(text) for text in pair] for pair in status.get("false_statements", ()))
        self.faults = tuple(replay_difference(data, replayed) for data, replayed in found)
        return PartReplica(
            address=self._swarm.reached_at(self._address),
            term=int(status["term"]),
            leads=leads,
            in_sync=leads or bool(status.get("is_replica")),
        )


def set_aside(folder: Path) -> None:
    """Rename the folder of a replica, so that another one can be kept there."""
    number = 1
    while (aside := folder.with_name(f"lost_{folder.name}_{number}")).exists():
        number += 1
    folder.rename(aside)
    log.warning("%s: kept as %s; the part was founded again since", folder.name, aside)


def _clear(folder: Path) -> None:
    """Remove a replica, first what makes it one; records of the run and what was set aside stay."""
    (folder / MARK).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in RECORDS and not path.is_dir():
            path.unlink(missing_ok=True)
