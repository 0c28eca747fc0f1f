"""`aedit hub`: the process that owns the anchors of a run, or the standby that follows it."""

import logging
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypedDict, Unpack

import aedit
from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.journal.journal import Journal, JournalBroken, NoSpace
from aedit.async_sgd.journal.mirror import Mirror
from aedit.async_sgd.journal.store import Store
from aedit.async_sgd.service.hello_responder import HelloResponder
from aedit.async_sgd.service.memory import give_back_what_is_freed
from aedit.async_sgd.service.server_directory import DirectorySwitch
from aedit.async_sgd.service.switch import Switch
from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import to_toml
from aedit.launch.config.method import difference, method
from aedit.launch.hub import folder
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.leading import LeadingHub
from aedit.launch.hub.policy_service import PolicyService, policy_service
from aedit.launch.hub.policy_versions import RECORD, PolicyVersions
from aedit.launch.hub.replay import make_hub
from aedit.launch.hub.reports import Reports
from aedit.launch.hub.standby import Standby
from aedit.launch.hub.welcome import welcome
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.wire.directory import directory_service
from aedit.proto.wire.hello import PROTOCOL
from aedit.proto.wire.limits import Limits
from aedit.proto.wire.server import Server, serve
from aedit.proto.wire.service import HubCore
from aedit.system import write_atomically
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.async_sgd.service.page import Page

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 3.0
_GRACE_S = 2.0
"""Time for calls in progress when the hub ends."""
_LEAVE_S = 25.0
"""Longest wait after Ctrl-C for nodes that leave at the same time, which may take 20 s each."""


class Options(TypedDict, total=False):
    """Options of the hub process, beside the configuration."""

    address: str | None
    """HOST:PORT to listen at instead of the configured one."""
    part: tuple[int, int]
    """(k, n): it owns the units i with i % n == k."""
    standby: bool
    """Follow the hub that leads, and take over when the nodes ask for it."""
    keys: Path | None
    """Folder of keys that `aedit keys` made for this hub."""
    insecure: bool
    """Listen without TLS at an address that other machines can reach."""


def hub(config: RunConfig, *, directory: Path, **options: Unpack[Options]) -> int:
    """Serve until the run is over or a signal arrives; return the exit code.

    Continues from the state in `directory`.

    Raises UserError for what the user must correct: a used address or folder, missing keys, a refused
    configuration, or another hub that leads this run by now.

    Args:
        config: Of the run.
        directory: Journal, snapshots, records, and the file `address` with the HOST:PORT that the hub listens
            at.
        options: See `Options`.
    """
    logging.basicConfig(format="aedit hub: %(message)s", level=logging.WARNING)
    give_back_what_is_freed()
    stop = _Stop()
    with folder.locked(directory):
        endpoint = _endpoint(config, directory, options)
        process = _Process(endpoint, insecure=options.get("insecure", False))
        try:
            process.start()
            print(process.welcome(), flush=True)
            while not stop.asked.wait(0.2) and not process.is_over:
                pass
            if stop.by_hand:
                process.wait_for_leaving_nodes()
        finally:
            process.close()
        return process.exit_code()


def _endpoint(config: RunConfig, directory: Path, options: Options) -> HubEndpoint:
    k, n = options.get("part", (0, 1))
    standby = options.get("standby", False)
    configured = config.hub.addresses
    if not configured:
        raise UserError("hub.address is empty: set it to the HOST:PORT that the hub listens at")
    if n != len(configured) and n > 1:
        raise UserError(
            f"--part: K/{n} does not match the {len(configured)} addresses of hub.address;"
            f" use K/{len(configured)}"
        )
    if standby and not config.hub.standby:
        raise UserError(
            "--standby: hub.standby is empty; set it to HOST:PORT of the standby, so that the nodes find it"
        )
    address = options.get("address") or (config.hub.standby if standby else configured[k])
    return HubEndpoint(config, directory, (k, n), standby, address, options.get("keys"))


class _Stop:
    """Signal handler: the first signal requests the end, the second one ends the process."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.by_hand = False
        """Whether it was SIGINT (Ctrl-C), which often reaches the nodes too; a supervisor sends SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.by_hand = number == signal.SIGINT
        self.asked.set()
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)


class _Process:
    """One hub process, from recovery to exit."""

    def __init__(self, endpoint: HubEndpoint, *, insecure: bool) -> None:
        self._endpoint, self._config = endpoint, endpoint.config
        self._keys = endpoint.server_keys(insecure=insecure)
        folder.claim(endpoint.directory, endpoint.config, endpoint.part)
        self._store = Store(endpoint.directory, fsync=endpoint.config.hub.fsync)
        self._reports = Reports(endpoint.directory)
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method=(own := method(self._config)),
            difference=partial(difference, own),
            version=aedit.__version__,
            run=self._config.name,
            config=to_toml(self._config, defaults=False),
            addresses=endpoint.addresses,
            standby=lambda: endpoint.other,
        )
        self._server: Server | None = None
        self._leading: LeadingHub | None = None
        self._standby: Standby | None = None
        self._switch: Switch | None = None
        first = endpoint.config.hub.addresses[0]
        self._directory = DirectorySwitch(f"the directory is at the run's first hub, {first}")
        self._policy = PolicyService(endpoint.part[1])
        self._page: Page | None = None

    def start(self) -> None:
        """Recover the state from the folder and begin to serve."""
        hub = self._make()
        journal = self._store.recover(hub)
        term, newest = hub.state.term, self._newest_term()
        has_led = int(folder.read_line(self._endpoint.directory / "led") or 0) == term > 0
        if newest > term and not self._endpoint.standby:
            raise UserError(
                f"{self._endpoint.other} leads this run under the newer term {newest}: start this hub with"
                f" --standby --address {self._endpoint.address} to follow it"
            )
        if self._endpoint.standby and not (has_led and newest <= term):
            self._follow()
        else:
            self._lead(hub, journal, None if term else 1)
        assert self._server is not None
        write_atomically(self._endpoint.directory / "address", self._server.address)

    @property
    def is_over(self) -> bool:
        """Return whether the hub has ended."""
        if self._leading is not None:
            return self._leading.is_over
        return self._standby is not None and bool(self._standby.failure)

    def welcome(self) -> str:
        """Return the address of this hub and the commands with which nodes and readers reach it."""
        assert self._server is not None
        return welcome(self._endpoint, self._server.address)

    def wait_for_leaving_nodes(self) -> None:
        """Serve for up to `_LEAVE_S` seconds more while there are members.

        Ctrl-C often reaches the nodes too, and their last pushes would be lost.
        """
        leading, deadline = self._leading, time.monotonic() + _LEAVE_S
        if leading is None or not leading.num_members():
            return
        said = f"waiting up to {_LEAVE_S:.0f} s for nodes that leave too; Ctrl-C again ends at once"
        print(f"aedit hub: {said}", file=sys.stderr, flush=True)
        while leading.num_members() and not self.is_over and time.monotonic() < deadline:
            time.sleep(0.1)

    def close(self) -> None:
        """Stop the server and write the final snapshot."""
        if self._server is not None:
            self._server.stop(_GRACE_S)
        if self._page is not None:
            self._page.close()
        if self._standby is not None:
            self._standby.stop()
        if self._policy.versions is not None:
            self._policy.versions.stop()
        if self._leading is not None:
            try:
                self._leading.stop()
            except (NoSpace, JournalBroken, OSError) as error:
                log.error("no final snapshot: %s; the journal is complete", error)
        self._reports.close()

    def exit_code(self) -> int:
        """Return the exit code. Raises UserError if another hub leads."""
        leading, standby = self._leading, self._standby
        if leading is not None and leading.guard.replaced.is_set():
            raise UserError(
                f"another hub leads this run under a newer term than this one's: start this one with"
                f" --standby --address {self._endpoint.address} to follow it"
            )
        failure = leading.failure if leading is not None else standby.failure if standby is not None else ""
        if failure:
            print(f"aedit: the hub has failed: {failure}", file=sys.stderr, flush=True)
        return 1 if failure else 0

    def _make(self) -> Hub:
        return make_hub(self._config, self._endpoint.part)

    def _lead(self, hub: Hub, journal: Journal, term: int | None) -> LeadingHub:
        leading = LeadingHub(self._config, hub, journal, self._store, self._reports, self._responder)
        leading.guard.trust(hubs=self._endpoint.keys is not None, other_term=self._other_term)
        leading.begin(term)
        if self._config.hub.parent:
            self._join_parent(leading)
        write_atomically(self._endpoint.directory / "led", str(hub.state.term))
        self._leading = leading
        if self._config.hub.metrics_port is not None:
            # Imported here so that hubs without a metrics page start faster.
            from aedit.async_sgd.service.page import Page

            host = self._endpoint.address.rpartition(":")[0].strip("[]")
            self._page = Page(leading.overview, host, self._config.hub.metrics_port)
        if self._endpoint.part[0] == 0:
            self._directory.core = leading.directory
        if self._endpoint.part[1] == 1:
            self._policy.versions = self._author(leading)
        self._serve(leading.driver)
        return leading

    def _author(self, leading: LeadingHub) -> PolicyVersions:
        versions = PolicyVersions(
            leading.ledger,
            leading.directory.num_live,
            dtype=self._config.rl.version_dtype,
            ring=self._config.hub.policy_versions,
            record=self._endpoint.directory / RECORD,
        )
        versions.start()
        return versions

    def _join_parent(self, leading: LeadingHub) -> None:
        # Imported here: only a hub with a parent needs an agent.
        from aedit.launch.hub.uplink import Uplink
        from aedit.proto.agent.rejoin import rejoin_secret

        name = f"hub of {self._config.name} at {self._endpoint.preferred_address}"
        secret = rejoin_secret(self._endpoint.directory / "rejoin")
        endpoint = self._endpoint
        leading.join_parent(Uplink(leading.engine, name, endpoint.client_keys(), endpoint.keys, secret))

    def _follow(self) -> None:
        mirror = Mirror(self._store, self._make)
        self._standby = Standby(self._endpoint, mirror, self._reports, self._responder, self._take_over)
        self._serve(self._standby)
        self._standby.start()

    def _take_over(self, mirror: Mirror, term: int) -> LeadingHub:
        return self._lead(mirror.hub, mirror.journal(fsync=self._config.hub.fsync), term)

    def _serve(self, core: HubCore) -> None:
        if self._switch is not None:
            self._switch.core = core
            return
        self._switch = Switch(core)
        limits = self._config.hub.limits
        bounds = Limits(
            nodes=limits.nodes, calls_per_s=limits.calls_per_s, in_flight_bytes=limits.in_flight_bytes
        )
        for address in (self._endpoint.preferred_address, self._endpoint.address):
            try:
                others = (directory_service(self._directory, bounds), policy_service(self._policy, bounds))
                self._server = serve(
                    self._switch, address, credentials=self._keys, limits=bounds, others=others
                )
                return
            except UserError:
                if address == self._endpoint.address:
                    raise

    def _other_term(self) -> int:
        """Return the term of the other hub; 0 if it cannot be learned."""
        try:
            return self._newest_term()
        except UserError as error:
            log.warning("asking the other hub for its term: %s", error)
            return 0

    def _newest_term(self) -> int:
        """Return the term of the other hub; 0 if there is none or it does not answer."""
        other = self._endpoint.other
        if not other:
            return 0
        client = HubClient(other, self._endpoint.client_keys(), call_timeout_s=_HELLO_TIMEOUT_S)
        hello = self._responder.question()
        try:
            return client.hello(hello).term
        except HubRefused as error:
            # The other hub is alive and may lead: two leaders would split the run.
            raise UserError(str(error)) from error
        except HubUnreachable as error:
            log.warning("the other hub of the pair does not answer: %s", error)
            return 0
        finally:
            client.close()
