"""A replica of one part of the model on this peer: a hub process of its own, restarted if it fails."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aedit.child import USER_ERROR, Child, to_json
from aedit.launch.hub import HUB_PROGRAM, HubOptions
from aedit.launch.records import resting_file
from aedit.proto.rpc import ClientKeys, HubClient, HubRefused, HubUnreachable
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import REPLICAS, PartReplica

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


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Settings that the hub processes of a peer have in common."""

    run_toml: Path
    directory: Path
    """Of the peer; `part_K` below it is the folder of a replica."""
    host: str
    """Host name or address at which they listen."""
    reached_at: Callable[[str], str]
    """Returns the HOST:PORT by which others reach what listens at an address of this machine."""
    parts: int
    copies: int
    lease_s: float
    """Of the cards of this peer."""
    keys: Path | None = None
    insecure: bool = False
    stays: bool = False
    """Replicas serve until a signal arrives, also after the run is over."""

    def command(self, part: int, *, founds: bool, above: int = 0) -> list[str]:
        """Return the command of the replica of `part`.

        Args:
            part: Its number.
            founds: It begins the part, instead of following it.
            above: Number below its first term, if it begins the part.
        """
        options = HubOptions(
            directory=self.folder(part),
            address=f"{self.host}:0",
            part=(part, self.parts),
            standby=not founds,
            replicas=self.directory / REPLICAS,
            term_above=above if founds else 0,
            stay=self.stays,
            keys=self.keys,
            insecure=self.insecure,
        )
        return [sys.executable, "-m", HUB_PROGRAM, str(self.run_toml), to_json(options)]

    def folder(self, part: int) -> Path:
        """Return the folder of the replica of `part`."""
        return self.directory / f"part_{part}"

    def kept(self) -> list[int]:
        """Return the parts of which this peer has a replica on its disk."""
        return [part for part in range(self.parts) if (self.folder(part) / MARK).exists()]


class HostedPart:
    """A hub process, and the state that it reported last."""

    def __init__(
        self, part: int, options: HostOptions, keys: ClientKeys, *, founds: bool, above: int = 0
    ) -> None:
        """Start the process. founds, above: see `HostOptions.command`."""
        self.part, self._options, self._keys = part, options, keys
        self._folder = options.folder(part)
        self._folder.mkdir(parents=True, exist_ok=True)
        if part not in options.kept():  # a peer that was ended while it gave up a replica leaves some of it
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
        with contextlib.suppress(OSError):
            address = (self._folder / "address").read_text(encoding="utf-8").strip()
            if address != self._address:
                self._connect(address)
        self._ask()
        self._founds = self._founds and self.state is None  # once it has led, its journal says how to go on

    def rest(self, rests: bool) -> bool:
        """Let the replica confirm nothing to its owner, or confirm again.

        Returns whether it has rested, and confirmed nothing, for so long that the owner cannot count on it
        any more: a confirmation may be on its way when the rest begins.
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
        """End the process and forget the replica, all but its records of the run."""
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
        command = self._options.command(self.part, founds=founds, above=self._above)
        self._child = Child(command, self._options.directory / f"part_{self.part}.log", own=True)
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

    def _connect(self, address: str) -> None:
        if self._client is not None:
            self._client.close()
        self._address, self._client = address, HubClient(address, self._keys, call_timeout_s=_STATUS_S)

    def _ask(self) -> None:
        """Ask for the state. On a busy machine an answer may fail to come, and the replica is there."""
        reported = self._asked()
        if reported is not None:
            self._reported_s = time.monotonic()
        elif time.monotonic() < self._reported_s + self._options.lease_s:
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
        return PartReplica(
            address=self._options.reached_at(self._address),
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
    """Remove all but the records of the run; first what makes it a replica."""
    (folder / MARK).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in RECORDS:
            path.unlink(missing_ok=True)
