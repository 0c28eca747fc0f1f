"""`aedit hub`: the process that owns the anchors of a run, or follows the one that does."""

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
from aedit.async_sgd.service.switch import Switch
from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import to_toml
from aedit.launch.config.method import difference, method
from aedit.launch.hub import folder
from aedit.launch.hub.leading import Leading
from aedit.launch.hub.place import Place
from aedit.launch.hub.replay import make_hub
from aedit.launch.hub.reports import Reports
from aedit.launch.hub.standby import Standby
from aedit.launch.hub.welcome import welcome
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.wire.hello import PROTOCOL
from aedit.proto.wire.limits import Limits
from aedit.proto.wire.server import Server, serve
from aedit.proto.wire.service import HubCore
from aedit.system import write_atomically
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.async_sgd.service.page import Page

log = logging.getLogger(__name__)

_ASK_S = 3.0
_GRACE_S = 2.0
"""For calls under way when the hub ends."""
_LEAVE_S = 15.0
"""How long a hub waits after Ctrl-C for nodes that leave at the same time."""


class Options(TypedDict, total=False):
    """Where and as what a hub works."""

    address: str | None
    """HOST:PORT to listen at instead of the configured one."""
    part: tuple[int, int]
    """(k, n): it owns the units i with i % n == k."""
    standby: bool
    """Follow the hub that leads, and take over when the nodes ask for it."""
    keys: Path | None
    """What `aedit keys` has made for it."""
    insecure: bool
    """Listen openly though others than this machine can reach it."""


def hub(config: RunConfig, *, directory: Path, **options: Unpack[Options]) -> int:
    """Serve until the run is over or a signal comes; the exit code. Goes on where its folder has left off.

    directory: journal, snapshots, records, and `address` with the HOST:PORT it listens at. UserError if
    something is in the way that a person must mend, also if another hub leads this run by now.
    """
    logging.basicConfig(format="aedit hub: %(message)s", level=logging.WARNING)
    give_back_what_is_freed()
    stop = _Stop()
    with folder.held(directory):
        place = _place(config, directory, options)
        process = _Process(place, insecure=options.get("insecure", False))
        try:
            process.start()
            print(process.welcome(), flush=True)
            while not stop.asked.wait(0.2) and not process.is_over:
                pass
            if stop.by_hand:
                process.let_leave()
        finally:
            process.close()
        return process.verdict()


def _place(config: RunConfig, directory: Path, options: Options) -> Place:
    k, n = options.get("part", (0, 1))
    standby = options.get("standby", False)
    configured = config.hub.addresses
    if not configured:
        raise UserError("hub.address: must be HOST:PORT, or there is nothing to serve")
    if n != len(configured) and n > 1:
        raise UserError(f"--part: K/{n}, but hub.address names {len(configured)} hubs")
    if standby and not config.hub.standby:
        raise UserError("--standby: hub.standby must say where it listens, so that the nodes find it")
    address = options.get("address") or (config.hub.standby if standby else configured[k])
    return Place(config, directory, (k, n), standby, address, options.get("keys"))


class _Stop:
    """The first signal asks to end, the second one ends."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.by_hand = False
        """Whether it was Ctrl-C, which often goes to nodes as well; a supervisor sends SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.by_hand = number == signal.SIGINT
        self.asked.set()
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)


class _Process:
    """One hub, from recovery to the end."""

    def __init__(self, place: Place, *, insecure: bool) -> None:
        self._place, self._config = place, place.config
        self._keys = place.server_keys(insecure=insecure)
        folder.claim(place.directory, place.config, place.part)
        self._store = Store(place.directory, fsync=place.config.hub.fsync)
        self._reports = Reports(place.directory)
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method=(own := method(self._config)),
            difference=partial(difference, own),
            version=aedit.__version__,
            run=self._config.name,
            config=to_toml(self._config, defaults=False),
            addresses=place.addresses,
            standby=lambda: place.other,
        )
        self._server: Server | None = None
        self._leading: Leading | None = None
        self._standby: Standby | None = None
        self._switch: Switch | None = None
        self._page: Page | None = None

    def start(self) -> None:
        """Take up what the folder has, and serve."""
        hub = self._make()
        journal = self._store.recover(hub)
        term, newest = hub.state.term, self._newest_term()
        has_led = int(folder.read_line(self._place.directory / "led") or 0) == term > 0
        if newest > term and not self._place.standby:
            raise UserError(
                f"{self._place.other} leads this run by now, under term {newest}: start this hub with"
                f" --standby --address {self._place.address} to follow it"
            )
        if self._place.standby and not (has_led and newest <= term):
            self._follow()
        else:
            self._lead(hub, journal, None if term else 1)
        assert self._server is not None
        write_atomically(self._place.directory / "address", self._server.address)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do."""
        if self._leading is not None:
            return self._leading.over
        return self._standby is not None and bool(self._standby.failure)

    def welcome(self) -> str:
        """Return where this hub is, and the commands by which nodes and readers reach it."""
        assert self._server is not None
        return welcome(self._place, self._server.address)

    def let_leave(self) -> None:
        """Serve on for some seconds while there are members: they may have been asked to leave as well, and
        what they owe would be lost."""
        leading, deadline = self._leading, time.monotonic() + _LEAVE_S
        if leading is None or not leading.num_members():
            return
        said = f"waiting up to {_LEAVE_S:.0f} s in case the nodes leave as well; Ctrl-C again ends at once"
        print(f"aedit hub: {said}", file=sys.stderr, flush=True)
        while leading.num_members() and not self.is_over and time.monotonic() < deadline:
            time.sleep(0.1)

    def close(self) -> None:
        """Take no more calls, and write everything down."""
        if self._server is not None:
            self._server.stop(_GRACE_S)
        if self._page is not None:
            self._page.close()
        if self._standby is not None:
            self._standby.stop()
        if self._leading is not None:
            try:
                self._leading.stop()
            except (NoSpace, JournalBroken, OSError) as error:
                log.error("no snapshot at the end: %s; the journal has everything", error)
        self._reports.close()

    def verdict(self) -> int:
        """Exit code. UserError if another hub leads."""
        leading, standby = self._leading, self._standby
        if leading is not None and leading.guard.replaced.is_set():
            raise UserError(
                f"another hub leads this run under a newer term than this one's: start this one with"
                f" --standby --address {self._place.address} to follow it"
            )
        failure = leading.failure if leading is not None else standby.failure if standby is not None else ""
        if failure:
            print(f"aedit: the hub has ended: {failure}", file=sys.stderr, flush=True)
        return 1 if failure else 0

    def _make(self) -> Hub:
        return make_hub(self._config, self._place.part)

    def _lead(self, hub: Hub, journal: Journal, term: int | None) -> Leading:
        leading = Leading(self._config, hub, journal, self._store, self._reports, self._responder)
        leading.begin(term)
        if self._config.hub.parent:
            self._join_parent(leading)
        write_atomically(self._place.directory / "led", str(hub.state.term))
        self._leading = leading
        if self._config.hub.metrics_port is not None:
            # Only now: most hubs go without, and start sooner.
            from aedit.async_sgd.service.page import Page

            host = self._place.address.rpartition(":")[0].strip("[]")
            self._page = Page(leading.overview, host, self._config.hub.metrics_port)
        self._serve(leading.driver)
        return leading

    def _join_parent(self, leading: Leading) -> None:
        # Only now: the hub of a run without levels needs no agent.
        from aedit.launch.hub.uplink import Uplink

        name = f"hub of {self._config.name} at {self._place.listens_at}"
        leading.join_parent(Uplink(leading.engine, name, self._place.client_keys(), self._place.keys))

    def _follow(self) -> None:
        mirror = Mirror(self._store, self._make)
        self._standby = Standby(self._place, mirror, self._reports, self._responder, self._take_over)
        self._serve(self._standby)
        self._standby.start()

    def _take_over(self, mirror: Mirror, term: int) -> Leading:
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
        for address in (self._place.listens_at, self._place.address):
            try:
                self._server = serve(self._switch, address, credentials=self._keys, limits=bounds)
                return
            except UserError:
                if address == self._place.address:
                    raise

    def _newest_term(self) -> int:
        """What the other hub believes in; 0 if there is none, or it does not answer."""
        other = self._place.other
        if not other:
            return 0
        client = HubClient(other, self._place.client_keys(), call_timeout_s=_ASK_S)
        hello = self._responder.question()
        try:
            return client.hello(hello).term
        except HubRefused as error:
            # It is there, and might lead: to lead beside it would split the run.
            raise UserError(str(error)) from error
        except HubUnreachable as error:
            log.warning("the other hub does not answer: %s", error)
            return 0
        finally:
            client.close()
