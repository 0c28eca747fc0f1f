"""Averages with other peers by hivemind, whose averager is a process of its own.

If that process fails, the round under way fails, and the process is started again. Every round has a
deadline.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aedit.proto.dht.child import HivemindProcess, LineProcess
from aedit.system import anonymous_memory, write_atomically
from aedit.types import printable

COMMAND = (sys.executable, "-m", "aedit.proto.dht.averaging_process")
AVERAGING = "averaging"
"""Folder of a run directory with a folder for each peer of this machine."""
INTRODUCTION = "introduction"
"""File of a peer with the addresses by which others find it."""
APART = 1e-5
"""Distance from which on two averages are different ones, relative to their norm. Rounding makes 1e-7."""
_FIRST_PAUSE_S = 0.5
_LOOK_S = 0.02
_START_S = 90.0
_INTRODUCTION_S = 60.0
_LATE_S = 5.0
_MOST_KNOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingSettings:
    """Settings of a peer's averager."""

    name: str
    """Name of this peer, as the others see it."""
    prefix: str
    """Peers with another one never meet: of run, method and layout. No dots."""
    numel: int
    """Elements of the vector."""
    directory: Path
    """Folder in which this peer keeps its key and the addresses of others."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddresses of peers; empty: `introduction`, or this is the first peer."""
    introduction: Path | None = None
    """File to which the first peer of this machine writes its address; the others wait for it."""
    listen: str = "/ip4/127.0.0.1/tcp/0"
    announce: str = ""
    client: bool = False
    """This peer calls others, and no other calls it."""
    match_s: float = 5.0
    """Time in which the peers of a round find each other; hivemind takes all of it. Its own default."""
    request_s: float = 3.0
    """Longest time of a call while they do. hivemind's own default."""
    chunk_s: float = 5.0
    """Silence after which a peer is left out of a round."""
    total_s: float = 60.0
    """Longest time of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedRound:
    """End of a round."""

    number: int
    members: int = 0
    """Peers of the round, this one included; 0 if it has failed."""
    why: str = ""
    """Reason of the failure; empty without one."""
    seconds: float = 0.0
    began_s: float = 0.0
    """When the first of the members began, by its clock of the day."""
    late: bool = False
    """The others have averaged before and this peer has not: the average is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of what the members of a round have received, made after its end."""

    number: int
    members: int
    distances: tuple[float, ...]
    """Distances from the other members that have answered, relative to the norm of the average."""

    @property
    def differ(self) -> int:
        """Return how many of the others have received another average."""
        return sum(not distance <= APART for distance in self.distances)


class Averager(Protocol):
    """Averages of a vector with other peers. No call but `close` blocks."""

    sent: NDArray[np.float32]
    """The vector, to be written before `start`."""
    average: NDArray[np.float32]
    """The average, once `outcome` says so. All its values are finite then."""

    def start(self, number: int, steps: int, began_s: float) -> None:
        """Begin a round; the one before has ended.

        Args:
            number: Of the round, for this peer.
            steps: Weight of this peer.
            began_s: When the first peer known here began, by its clock of the day.
        """

    def outcome(self, number: int) -> AveragedRound | None:
        """Return the end of the newest round, None before it."""

    def comparisons(self) -> Sequence[Comparison]:
        """Return the comparisons made since the last call."""

    def close(self, wait_s: float = 0.0) -> None:
        """End. Wait up to `wait_s` for the comparison of the last round."""


class HivemindAverager(HivemindProcess):
    """`Averager` by a process with hivemind's `DecentralizedAverager`. Any thread may call."""

    def __init__(self, settings: AveragingSettings, *, command: Sequence[str] = COMMAND) -> None:
        """Start the process.

        Args:
            settings: Of this peer.
            command: Program of the process; its last argument will be the id of this process. For tests.

        Raises:
            UserError: hivemind is not installed.
        """
        use = 'swarm.exchange = "hivemind"'
        super().__init__(command, use=use, name="averaging", first_pause_s=_FIRST_PAUSE_S, look_s=_LOOK_S)
        self._settings = settings
        settings.directory.mkdir(parents=True, exist_ok=True)
        self._memory = anonymous_memory("aedit-average", 8 * settings.numel)
        self._memory_path = f"/proc/{os.getpid()}/fd/{self._memory}"
        vectors = np.memmap(self._memory_path, dtype=np.float32, mode="r+", shape=(2, settings.numel))
        self.sent, self.average = vectors[0], vectors[1]
        self._known_file = settings.directory / "known_peers.json"
        self._lock = threading.Lock()
        self._request: dict[str, Any] | None = None
        """Round under way."""
        self._asked = False
        """True once the process was asked for it."""
        self._due_s = 0.0
        self._outcome: AveragedRound | None = None
        self._compared: list[Comparison] = []
        self._uncompared = -1
        self._rounds = 0
        self._up = False
        self._start()

    def wait_until_up(self, limit_s: float) -> bool:
        """Wait until the process is up, for at most `limit_s`, and return whether it is."""
        deadline_s = monotonic() + limit_s
        while not self._up and monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self._up

    def start(self, number: int, steps: int, began_s: float) -> None:
        """See `Averager.start`. A round fails at once while the process is not up."""
        with self._lock:
            asks = {"round": number, "steps": steps, "began_s": began_s, "rounds": self._rounds}
            self._request = asks
            self._asked, self._outcome = False, None
            self._due_s = monotonic() + self._settings.total_s + _LATE_S
            if not self._up:
                self._fail("its process is not up")

    def outcome(self, number: int) -> AveragedRound | None:
        """See `Averager.outcome`."""
        with self._lock:
            return self._outcome if self._outcome and self._outcome.number == number else None

    def comparisons(self) -> Sequence[Comparison]:
        """See `Averager.comparisons`."""
        with self._lock:
            compared, self._compared = self._compared, []
            return compared

    def close(self, wait_s: float = 0.0) -> None:
        """See `Averager.close`. May be called more than once."""
        deadline_s = monotonic() + wait_s
        while self._uncompared >= 0 and self._up and monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        super().close()

    def _turn(self, process: LineProcess) -> str:
        """Request the round under way; return why the process must end."""
        now_s = monotonic()
        with self._lock:
            asks = self._request if self._up and not self._asked and self._outcome is None else None
            self._asked = self._asked or asks is not None
            overdue = self._asked and self._outcome is None and now_s > self._due_s
        if asks and not process.send(asks):
            return "its process reads nothing"
        if overdue:
            return f"no answer within {self._settings.total_s:g} s"
        if not self._up and now_s > self._started_s + _START_S:
            return f"hivemind was not up within {_START_S:g} s"
        return ""

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._up = False
            self._uncompared = -1
            self._fail(reason)

    def _first_message(self) -> dict[str, Any]:
        """Return the settings for the process."""
        mine = self._settings
        return {
            "name": mine.name,
            "prefix": mine.prefix,
            "numel": mine.numel,
            "memory": self._memory_path,
            "initial_peers": self._initial_peers(),
            "listen": [mine.listen],
            "announce": [mine.announce] * bool(mine.announce),
            "identity": str(mine.directory / "dht_key"),
            "client": mine.client,
            "match_s": mine.match_s,
            "request_s": mine.request_s,
            "chunk_s": mine.chunk_s,
            "total_s": mine.total_s,
        }

    def _initial_peers(self) -> list[str]:
        """Return the addresses to begin with; empty begins a table.

        Those that were known before may all be gone: every second attempt does without them.
        """
        mine, known = self._settings, []
        if self.failures % 2 == 0:
            with suppress(OSError, ValueError):
                known = [str(maddr) for maddr in json.loads(self._known_file.read_text())]
        found = [*mine.initial_peers, *known]
        deadline_s = monotonic() + _INTRODUCTION_S
        while mine.introduction and not (found or self._closed.is_set()):
            with suppress(OSError):
                found = mine.introduction.read_text().split(",")
            if monotonic() > deadline_s:
                raise TimeoutError(f"{mine.introduction}: the first peer has not written its address")
            self._closed.wait(_LOOK_S)
        return list(dict.fromkeys(found))

    def _take(self, message: dict[str, Any]) -> None:
        """Take a message of the process."""
        if "round" in message:
            self._end_round(message)
        with self._lock:
            if "maddrs" in message:
                text = ",".join(map(str, message["maddrs"]))
                write_atomically(self._settings.directory / INTRODUCTION, text)
                self._up, self.failures = True, 0
            elif "compared" in message:
                distances = tuple(float(one) for one in message["distances"])
                number, members = int(message["compared"]), int(message["members"])
                self._compared.append(Comparison(number=number, members=members, distances=distances))
                self._uncompared = -1

    def _end_round(self, message: dict[str, Any]) -> None:
        """Take the end of a round. An average that is not finite is none."""
        number, members = int(message["round"]), int(message["members"])
        why, seconds = printable(str(message["why"]), 256), float(message["seconds"])
        if members and not np.isfinite(self.average).all():
            members, why = 0, "the average of the peers is not finite"
        with self._lock:
            if self._request is None or self._request["round"] != number or self._outcome is not None:
                return
            late = bool(message.get("late"))
            self._rounds += members > 0
            self._uncompared = number if members else -1
            self._outcome = AveragedRound(
                number=number,
                members=members,
                why=why,
                seconds=seconds,
                began_s=float(message.get("began_s", 0.0)),
                late=late and members > 0,
            )
        if neighbours := [str(maddr) for maddr in message.get("neighbours", ())][:_MOST_KNOWN]:
            write_atomically(self._known_file, json.dumps(neighbours))

    def _fail(self, reason: str) -> None:
        """End the round under way, if any."""
        if self._request is not None and self._outcome is None:
            self._outcome = AveragedRound(number=self._request["round"], why=reason)
