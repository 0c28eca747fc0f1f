"""The line `run` of policy versions, made of a hub's anchors for rollout servers, and its service.

Made by a thread of its own from anchors, which never change, so that merges do not wait for it. The serial of
a version is the smallest version of its units.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import grpc

from aedit.async_sgd.journal import Ledger
from aedit.proto.rpc import CallHandlers, FairPool, Limits, Refusal, Service
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import Patterns, VersionLayout, VersionsCore, VersionStore, patterns
from aedit.system import read_line, write_atomically
from aedit.types import Layout

log = logging.getLogger(__name__)
LINE = "run"
RECORD = "policy.json"
_LOOK_S = 0.1
_UNUSED_S = 1.0
"""Interval of looks while no server is there."""
_REST = 4.0
"""Pause after a version, in times of what it took: at most a fifth of a core."""
_FAILED_PAUSE_S = 5.0
_WAITERS = 68
"""Calls of `Newest` at a time: as many as may wait in `VersionsCore`, and some that do not wait."""
_TRANSFERS = 8


class PolicyPublisher:
    """Author of the line `run`, from `start` to `stop`.

    Nothing is kept in memory while no server is there.
    """

    def __init__(
        self, ledger: Ledger, num_servers: Callable[[float], int], *, dtype: str, ring: int, record: Path
    ) -> None:
        """Create the author.

        Args:
            ledger: Whose anchors it takes.
            num_servers: Returns the number of live servers at a time of the ledger's clock.
            dtype: Of the values: bf16 or fp32.
            ring: Versions to keep.
            record: File with the newest version, so that its number never stands for other values.
        """
        self._ledger, self._num_servers, self._record = ledger, num_servers, record
        self._dtype, self._ring = dtype, ring
        self._store: VersionStore | None = None
        self._made: dict[str, tuple[int, Patterns]] = {}
        """Version and patterns of the newest version here, by unit."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="policy versions", daemon=True)
        self.core: VersionsCore | None = None
        """Answers for the line; None before the run is founded."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Make no more versions; returns when the thread has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the versions that are kept."""
        return 0 if self._store is None else self._store.num_bytes

    def turn(self) -> bool:
        """Make the newest version if it is new and servers are there; else free what is not needed.

        Return whether servers are there.
        """
        ledger, hub = self._ledger, self._ledger.hub
        with ledger.lock:
            layout, wanted = hub.state.layout, self._num_servers(ledger.clock()) > 0
            anchors = hub.state.policy_anchors if wanted else {}
            position = ledger.journal.position
        if not wanted:
            if self._store is not None:
                self._store.close(LINE)
            self._made.clear()
        if not anchors or layout is None:
            return wanted
        store = self._store or self._open(layout)
        versions = {layout.units[index].name: anchor.version for index, anchor in anchors.items()}
        serial, newest = min(versions.values()), None
        with suppress(LookupError):
            newest = store.newest(LINE)
        if (newest is not None and serial <= newest.serial) or not self._is_ours(serial, versions):
            return wanted
        ledger.durable(position)  # before these anchors are announced
        made = self._made
        for index, anchor in anchors.items():
            name = layout.units[index].name
            if name not in made or made[name][0] != anchor.version:
                made[name] = anchor.version, patterns(hub.as_held(index, anchor), self._dtype)
        write_atomically(self._record, json.dumps({"serial": serial, "units": versions}))
        store.publish(LINE, serial, {name: values for name, (_, values) in made.items()}, versions)
        return wanted

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._stopping.wait(pause_s):
            began_s = time.monotonic()
            try:
                look_s = _LOOK_S if self.turn() else _UNUSED_S
                pause_s = max(look_s, _REST * (time.monotonic() - began_s))
            except Exception:  # servers then stay at their version; the run must not end for it
                log.exception("no policy version")
                pause_s = _FAILED_PAUSE_S

    def _open(self, layout: Layout) -> VersionStore:
        apart = self._ledger.hub.state.apart
        units = tuple(unit for unit in layout.units if unit.name not in apart)
        self._store = VersionStore(VersionLayout(Layout(units), self._dtype), ring=self._ring, max_lines=1)
        self.core = VersionsCore(self._store, may_author=lambda line, caller: False)
        return self._store

    def _is_ours(self, serial: int, versions: Mapping[str, int]) -> bool:
        """Return whether the serial is free for these units: a process before this one may have used it."""
        before = read_line(self._record)
        if not before or self._made:
            return True
        said = json.loads(before)
        return bool(serial > said["serial"] or (serial == said["serial"] and said["units"] == dict(versions)))


class PolicyService:
    """Answers the calls; `versions` is set once this hub leads."""

    def __init__(self, num_parts: int) -> None:
        """Create the answers of a hub process. num_parts: hub processes that split the units."""
        self._num_parts = num_parts
        self.versions: PolicyPublisher | None = None

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
