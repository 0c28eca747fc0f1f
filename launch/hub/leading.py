"""A hub that leads: its ledger, engine, request guard and driver, and its reports."""

import threading
from typing import TYPE_CHECKING, Any

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.journal.journal import Journal
from aedit.async_sgd.journal.ledger import Ledger
from aedit.async_sgd.journal.store import Store
from aedit.async_sgd.rules.records import Led
from aedit.async_sgd.service.driver import Driver
from aedit.async_sgd.service.engine import HubWorker
from aedit.async_sgd.service.hello_responder import HelloResponder
from aedit.async_sgd.service.request_guard import RequestGuard
from aedit.async_sgd.service.server_directory import ServerDirectory
from aedit.launch.config.config import RunConfig
from aedit.launch.hub.reports import LINE_EVERY_S, Reports, metrics, overview

if TYPE_CHECKING:
    from aedit.launch.hub.uplink import Uplink


class LeadingHub:
    """Components of a hub that leads, from construction to `stop`."""

    def __init__(
        self,
        config: RunConfig,
        hub: Hub,
        journal: Journal,
        store: Store,
        reports: Reports,
        responder: HelloResponder,
    ) -> None:
        reports.start(hub.state.elapsed_s, {node: name for name, node in hub.state.names.items()})
        self._reports, self._config = reports, config
        self.ledger = Ledger(hub, journal, store, reports.record_applied)
        self.ledger.standby.changed = self._standby_changed
        self.engine = HubWorker(self.ledger, reports.event, snapshot_bytes=config.hub.snapshot_bytes)
        has_other = bool(config.hub.standby)
        self.guard = RequestGuard(self.ledger, self.engine, config.name, has_other=has_other)
        self.driver = Driver(self.guard, responder, self._status)
        self.directory = ServerDirectory(self.guard, reports.event)
        self.uplink: Uplink | None = None
        self._stopping = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, name="lines", daemon=True)

    def begin(self, term: int | None = None) -> None:
        """Start the engine and the metrics; with `term`, commit first that this hub leads under it.

        Raises NoSpace or Broken if the journal cannot be written.
        """
        if term is not None:
            with self.ledger.lock:
                position = self.ledger.commit([Led(term)])
            self.ledger.durable(position)
        self.engine.start()
        self._lines.start()

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
        if self._lines.is_alive():
            self._lines.join(timeout=5)
        self._reports.line(metrics(self.overview()))  # the last line is the source of the report
        if not (self.failure or self.guard.lacking or self.guard.replaced.is_set()):
            self._reports.event("snapshot", bytes=self.ledger.snapshot())
        self._reports.event("stop", reason=self.failure)

    def num_members(self) -> int:
        """Return the number of live nodes."""
        with self.ledger.lock:
            return sum(member.live for member in self.ledger.hub.state.members)

    def overview(self) -> dict[str, Any]:
        """Return the current state, see `reports.overview`."""
        return overview(self.ledger, self.engine, self.directory)

    def _status(self, after: int) -> str:
        return self._reports.status(self.overview() | {"run": self._config.name}, after)

    def _write_lines(self) -> None:
        while not self._stopping.wait(LINE_EVERY_S):
            self._reports.line(metrics(self.overview()))

    def _standby_changed(self, attached: bool) -> None:
        self._reports.event("standby_follows" if attached else "standby_lost")
