"""A rollout server as a member of a run: engines, services, the hub's directory, records."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from aedit.launch.config import RunConfig
from aedit.launch.records import Clock, Recorder
from aedit.launch.serve.model_server import RunHttp
from aedit.launch.serve.run_line import RUN_LINE, Announcer, RunLine
from aedit.launch.serve.run_server import ServerFolder, ServerPlaces
from aedit.launch.serve.served_run import ServedRun, ServerDrafter, served_line
from aedit.proto.rpc import ClientKeys, DirectoryClient, Server, ServerCard, ServerKeys
from aedit.spec_rollout.server import (
    EngineHost,
    HostLimits,
    RolloutService,
    ServerIdentity,
    StreamLimits,
    TrainerLines,
)

GRACE_S = 2.0
SPARE_LINES = 4
"""Lines that the host may have more than the server: those that are being closed."""


class RunMember:
    """One server process, from `start` to `close`."""

    def __init__(
        self,
        config: RunConfig,
        folder: ServerFolder,
        *,
        hubs: Sequence[str],
        client_keys: ClientKeys,
        server_keys: ServerKeys,
        places: ServerPlaces,
    ) -> None:
        """Build model and engine.

        Args:
            config: Of the run, with the settings of this machine; hub.address has all hub processes.
            folder: Name, key and folder of the server.
            hubs: HOST:PORT of the first hub, and of its standby if there is one.
            client_keys: Shown to hub and servers.
            server_keys: Required of trainers and servers.
            places: Where the server listens.

        Raises:
            UserError: The model cannot be built or served, or the address is in use.
        """
        self._config, self._folder, self._hubs, self._places = config, folder, hubs, places
        self._recorder = Recorder(folder.path, Clock(), writes=True)
        self._recorder.clock.start(0.0)
        self._drafter = ServerDrafter(config, folder.path, self._recorder.event)
        run, serve = ServedRun.of(config), config.serve
        limits = StreamLimits(waiting=serve.waiting, lines=serve.lines)
        num_waiting = (serve.rows + serve.waiting) * (serve.lines + 1)
        self._host = EngineHost(HostLimits(max_waiting_run=num_waiting, max_lines=serve.lines + SPARE_LINES))
        self._host.idle = self._drafter.window
        self._lines = TrainerLines(
            self._host,
            partial(served_line, run, self._drafter, RUN_LINE, folder.path),
            run.layout,
            limits,
            ring=serve.versions,
            max_lines=serve.lines + SPARE_LINES,
        )
        self._lines.failed = self._version_failed
        identity = ServerIdentity(config.name, folder.name, folder.key)
        self._service = RolloutService(identity, self._host, self._lines, limits, status=self._figures)
        self._lines.open_own(RUN_LINE)
        self._http = RunHttp(self._host, run, RUN_LINE, places.http, folder.path / "tokenizer")
        services = [self._service.service(), self._lines.service()]
        self._server = Server(services, places.listen, keys=server_keys)
        directory = DirectoryClient(
            config.hub.addresses, config.name, client_keys, standby=hubs[1] if len(hubs) > 1 else ""
        )
        event = self._recorder.event
        self._announcer = Announcer(directory, folder.key, self.card, event)
        self._run_line = RunLine(hubs, client_keys, self._lines, lambda: self._announcer.others, event)
        self._state = "starting"

    @property
    def is_over(self) -> bool:
        """Return whether there is a reason to end."""
        return self._announcer.over.is_set() or self._host.error is not None

    @property
    def exit_code(self) -> int:
        """Return 1 if the server was banned or has failed, else 0."""
        return int(bool(self._announcer.failure) or self._host.error is not None)

    def start(self) -> None:
        """Announce the server and follow the run.

        Raises HubRefused or HubUnreachable if the hub does not take it.
        """
        self._recorder.event("start", name=self._folder.name, address=self._server.address)
        self._state = "serving"
        self._announcer.first()
        self._announcer.start()
        self._run_line.start()

    def card(self) -> ServerCard:
        """Return what the server says of itself now."""
        host = self._host.status()
        waiting = host["waiting_run"] + host["waiting_public"]
        return ServerCard(
            name=self._folder.name,
            address=self._places.reached_at(self._server.port),
            rows=self._config.serve.rows,
            tokens_per_s=host["tokens_per_s"],
            serial=self._run_line.serial,
            running=max(0, host["samples"] - waiting),
            waiting=waiting,
            state=self._now(),
            idle_s=self._drafter.idle.so_far_s,
            idle_used_s=self._drafter.used_s,
        )

    def look(self) -> None:
        """Begin to serve HTTP when there is a policy; write a line of metrics if one is due."""
        if address := self._http.start_once():
            self._recorder.event("http", address=address)
            print(f"  HTTP at http://{address}", flush=True)
        if self._recorder.line_is_due():
            self._drafter.report_deaths()
            card = self.card()
            named = ("name", "address", "rows", "tokens_per_s", "serial", "running", "waiting", "state")
            values = {name: getattr(card, name) for name in (*named, "idle_s", "idle_used_s")}
            host = self._host.status()
            self._recorder.metrics(**values, tokens=host["tokens"], samples=host["over"], **self._figures())

    def leave(self, timeout_s: float) -> None:
        """Let the trainers take their samples back, for up to `timeout_s`; take no new ones meanwhile."""
        self._state = "leaving"
        self._service.end()
        deadline_s = time.monotonic() + timeout_s
        while self._service.status()["stream_samples"] and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def close(self) -> None:
        """End everything that was started."""
        self._run_line.close()
        self._announcer.close()
        self._http.close()
        self._service.close()
        self._server.stop(GRACE_S)
        self._host.close()
        self._drafter.close()
        self._recorder.event("end", reason=self._reason())
        self._recorder.close()

    def welcome(self) -> str:
        """Return the name of the server and its addresses."""
        where = self._places.reached_at(self._server.port)
        return (
            f"run {self._config.name}: rollout server {self._folder.name} at {where}, records in"
            f" {self._folder.path}\n  Ctrl-C ends it; trainers take their samples back."
        )

    def farewell(self) -> str:
        """Return why the server has ended."""
        return f"run {self._config.name}: rollout server {self._folder.name}: {self._reason()}"

    def _reason(self) -> str:
        if self._announcer.failure:
            return f"ended by the hub: {self._announcer.failure}"
        if self._host.error is not None:
            return f"failed: {self._host.error!r}"
        return "the run is finished" if self._announcer.is_finished else "ended"

    def _now(self) -> str:
        if self._state != "serving" or not self._drafter.idle.is_now:
            return self._state
        training = self._drafter.status().get("state") == "training"
        return "training a drafter" if training else self._state

    def _figures(self) -> dict[str, Any]:
        return {
            **self._service.status(),
            "hub": self._announcer.error or self._run_line.error,
            "version_bytes": self._lines.store.num_bytes,
            "drafter": {
                name: value
                for name, value in self._drafter.status().items()
                if name in ("steps", "published", "adopted", "refused", "deaths", "state")
            },
        }

    def _version_failed(self, manifest: Any, error: BaseException) -> None:
        self._recorder.event("error", message=f"version {manifest.serial} of {manifest.line}: {error}")
