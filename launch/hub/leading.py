"""A hub that leads: its ledger, engine, request guard and driver, and its reports."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aedit.async_sgd.journal import JournalBroken, Ledger, NoSpace
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import Record
from aedit.async_sgd.service import Driver, HelloResponder, HubWorker, RequestGuard, ServerDirectory
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.reports import LINE_EVERY_S, Reports, metrics, overview
from aedit.system import num_cores

if TYPE_CHECKING:
    from aedit.launch.hub.uplink import Uplink

_VOTERS_S = 0.1
"""Interval at which the hub looks for replicas and nodes that have come or gone."""


class LeadingHub:
    """Components of a hub that leads, from construction to `stop`."""

    def __init__(
        self,
        endpoint: HubEndpoint,
        ledger: Ledger,
        reports: Reports,
        responder: HelloResponder,
        leadership: Leadership,
    ) -> None:
        state, config = ledger.hub.state, endpoint.config
        reports.start(state.elapsed_s, {node: name for name, node in state.names.items()})
        self._endpoint, self._config = endpoint, config
        self._reports, self.ledger, self.leadership = reports, ledger, leadership
        self.engine = HubWorker(
            self.ledger,
            reports.event,
            snapshot_bytes=config.hub.snapshot_bytes,
            mergers=config.hub.threads or max(1, num_cores() // 2),
            ends_with_run=not endpoint.stays,
        )
        self.guard = RequestGuard(self.ledger, self.engine, config.name, leadership, responder.part)
        self.driver = Driver(self.guard, responder, self._status)
        self.directory = ServerDirectory(self.guard, reports.event)
        self.uplink: Uplink | None = None
        self._stopping = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, name="lines", daemon=True)
        self._voters = threading.Thread(target=self._look_at_voters, name="voters", daemon=True)

    def begin(self, records: Sequence[Record]) -> None:
        """Commit the records with which this hub begins to lead; start the engine and the metrics.

        Raises NoSpace or JournalBroken if the journal cannot be written.
        """
        with self.ledger.lock:
            position = self.ledger.commit(records)
        self.ledger.journal.sync(position)
        self.leadership.attach(self.ledger, position)
        self.engine.start()
        self._lines.start()
        self._voters.start()

    def join_parent(self, uplink: "Uplink") -> None:
        """Start the connection that makes this hub a node of its parent hub."""
        self.uplink = uplink
        uplink.start()

    @property
    def is_over(self) -> bool:
        """Return whether this hub has ended.

        `failure`, `guard.replaced` and `guard.lacking` give the reason if the run has not.
        """
        return self.engine.over.is_set() or self.guard.replaced.is_set() or bool(self.guard.lacking)

    @property
    def failure(self) -> str:
        """Return the reason of a failure, "" without one."""
        return self.engine.failure

    def stop(self) -> None:
        """Stop the engine and write a final snapshot."""
        self._stopping.set()
        if self.uplink is not None:
            self.uplink.stop()
        self.engine.stop()
        for thread in (self._lines, self._voters):
            if thread.is_alive():
                thread.join(timeout=5)
        self._reports.line(metrics(self.overview()))  # the last line is the source of the report
        if not (self.failure or self.guard.lacking or self.guard.replaced.is_set()):
            self._reports.event("snapshot", bytes=self.ledger.snapshot())
        self._reports.event("stop", reason=self.failure)

    def hand_over(self, limit_s: float) -> None:
        """Let another replica lead, if one is in sync; return when it does, or after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        handed = self.num_members() > 0 and self.leadership.hand_over()
        while handed and not self.guard.replaced.is_set() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def num_members(self) -> int:
        """Return the number of live nodes."""
        with self.ledger.lock:
            return len(self.ledger.hub.state.live)

    def overview(self) -> dict[str, Any]:
        """Return the current state, see `reports.overview`."""
        return overview(self.ledger, self.engine, self.directory, self.leadership)

    def _status(self, after: int) -> str:
        own = {"run": self._config.name, "traffic": self.driver.exchange.status()}
        return self._reports.status(self.overview() | own, after)

    def _write_lines(self) -> None:
        while not self._stopping.wait(LINE_EVERY_S):
            try:
                self.ledger.journal.check_place()  # also without pushes, when nothing is synced
            except JournalBroken as error:
                self.engine.fail(error)
                return
            self._reports.line(metrics(self.overview()))

    def _look_at_voters(self) -> None:
        """Follow the standbys and nodes that come and go, until the hub ends or does not lead any more."""
        in_sync, ledger, roster = 0, self.ledger, self.ledger.hub.state.roster
        live, seen = list[int](), -1
        while not self._stopping.wait(_VOTERS_S) and self.leadership.has_others and not self.is_over:
            with ledger.lock:
                if seen != roster.changes:
                    live, seen = [roster.live[node].voter for node in roster.order], roster.changes
                extent = (ledger.hub.state.term, *ledger.journal.position)
            try:
                self.leadership.tick(live, ledger.journal.complete, extent)
            except NoSpace as error:
                self.engine.is_full(error)
            except (JournalBroken, OSError) as error:
                self.engine.fail(error)
            if not self.leadership.holds_lease():
                self.guard.ask_the_others()  # it may have been replaced while it could not be reached
            if not self.leadership.leads:
                self.guard.end_term()
            elif (first := self._endpoint.successor) and self.leadership.hand_over(first):
                self._reports.event("hand_over", to=first)
            now = self.leadership.in_sync()[0]
            if now != in_sync:
                self._reports.event("standby_follows" if now > in_sync else "standby_lost", in_sync=now)
            in_sync = now
