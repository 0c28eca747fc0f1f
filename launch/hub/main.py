"""`aedit hub`: the process that owns the anchors of a run, or the standby that follows it.

`hub` is the entry point; the text that it prints when it is ready stands here too. As a child process it is
`python -m aedit.launch.hub.main RUN_TOML OPTIONS`, with `HubOptions` as JSON.
"""

import logging
import math
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aedit
from aedit import traces
from aedit.async_sgd.hub import Hub
from aedit.async_sgd.journal import Journal, JournalBroken, Ledger, NoSpace, Store
from aedit.async_sgd.replication import Leadership, Mirror, twin_text
from aedit.async_sgd.rules import Led, Record
from aedit.async_sgd.service import CoreSwitch, HelloResponder, Signer
from aedit.child import StopSignals, from_json, run_task
from aedit.launch.config import RunConfig, difference, given_to_nodes, load, method, to_toml
from aedit.launch.hub import folder
from aedit.launch.hub.endpoint import HubEndpoint, HubOptions, OtherHubs, VoteRequests
from aedit.launch.hub.folder import make_hub
from aedit.launch.hub.leading import LeadingHub, Reports
from aedit.launch.hub.page_process import PageProcess, run_directory
from aedit.launch.hub.policy_versions import RECORD, PolicyPublisher, PolicyService, policy_service
from aedit.launch.hub.standby import Standby
from aedit.proto.rpc import (
    PROTOCOL,
    CallCost,
    Extent,
    HubCore,
    Limits,
    Server,
    VoteReply,
    directory_service,
    is_loopback,
    raise_descriptor_limit,
    serve,
)
from aedit.system import give_back_what_is_freed, is_full, read_line, write_atomically
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.async_sgd.service import MetricsPage

log = logging.getLogger(__name__)
_LOOK_S = 1.0
_GRACE_S = 2.0
"""Time for calls in progress when the hub ends."""
_HAND_OVER_S, _ANSWERS_S = 4.0, 1.0
"""Longest time of an election in a hand-over, and time for the votes on its first configuration."""
_BELIEVED_S = 60.0
"""How long a hub of a swarm waits for a replica that says it has more: any peer can say so."""
_FORCED_JUMP = 1000
"""A forced term is so far above all known ones that no election comes to it."""
_LEAVE_S = 25.0
"""Longest wait after Ctrl-C for nodes that leave at the same time, which may take 20 s each."""
_EVERYWHERE = ("0.0.0.0", "::", "")


def hub(config: RunConfig, options: HubOptions) -> int:
    """Serve until the run is over or a signal arrives; return the exit code.

    Continues from the state in its folder.

    Raises UserError for what the user must correct: a used address or folder, missing keys, a refused
    configuration, or another hub that leads this run by now.
    """
    logging.basicConfig(format="aedit hub: %(message)s", level=logging.WARNING)
    traces.begin(config.traces.endpoint, "hub", run=config.name, folder=options.directory.name)
    give_back_what_is_freed()
    raise_descriptor_limit()
    stop = StopSignals()
    with folder.locked(options.directory):
        process = _served(config, options, stop)
        while process.may_follow and not stop.asked.is_set():
            log.warning("this hub leads no more: it follows the one that does")
            options = replace(options, standby=True, force_lead=False)
            if options.replicas is None:
                options = replace(options, address=process.address)
            process = _served(config, options, stop, process)
        traces.end_traces()
        return process.exit_code()


def _served(
    config: RunConfig, options: HubOptions, stop: StopSignals, before: "_Process | None" = None
) -> "_Process":
    """Serve until the run is over, a signal arrives or another hub leads; return the closed process.

    before: the process that led in this folder until another replica did.
    """
    with saying_why(options.directory):
        process = _Process(HubEndpoint.of(config, options), insecure=options.insecure)
    try:
        with saying_why(options.directory):
            if before is not None:
                process.follow(has_resigned=before.has_resigned)
            else:
                process.start(force=options.force_lead, above=options.term_above)
        print(welcome(process.endpoint, process.address), flush=True)
        if warning := open_to_others(process.endpoint, process.address):
            from rich.console import Console  # here: few hubs warn, and all shall start fast
            from rich.text import Text

            Console(stderr=True).print(Text(warning, style="bold red"), soft_wrap=True)
        while not stop.asked.wait(_LOOK_S) and not process.is_over:
            process.look()
        if stop.by_hand:
            process.wait_for_leaving_nodes()
        if stop.asked.is_set() or not process.may_follow:  # else it is back at once, and votes then
            process.hand_over()
    finally:
        process.close(0.0 if process.may_follow and not stop.asked.is_set() else _GRACE_S)
    return process


@contextmanager
def saying_why(directory: Path) -> Iterator[None]:
    """Turn a failure of the disk while a hub starts into a UserError."""
    try:
        yield
    except (NoSpace, JournalBroken, OSError) as error:
        full = isinstance(error, NoSpace) or (isinstance(error, OSError) and is_full(error))
        remedy = f"make room on the disk of {directory}" if full else f"check the disk of {directory}"
        raise UserError(f"{error}: {remedy}, and start again") from None


class _Process:
    """One hub process, from recovery to exit."""

    def __init__(
        self, endpoint: HubEndpoint, *, insecure: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.endpoint, self._clock = endpoint, clock
        self._keys = endpoint.server_keys(insecure=insecure)
        self._config = folder.claim(endpoint.directory, endpoint.config, endpoint.part)
        self._store = Store(endpoint.directory, fsync=endpoint.config.hub.fsync)
        self._reports = Reports(endpoint.directory)
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method=(own := method(self._config)),
            difference=partial(difference, own),
            version=aedit.__version__,
            run=self._config.name,
            config=to_toml(given_to_nodes(self._config), defaults=False),
            addresses=endpoint.addresses,
            standby=lambda: ",".join(endpoint.others),
            part=endpoint.part_asked,
        )
        self._leadership = Leadership(
            endpoint.directory / "votes.json",
            endpoint.num_others,
            clock,
            least=lambda: endpoint.least_replicas,
            place=endpoint.place_of if endpoint.replicas is not None else None,
        )
        self._others = OtherHubs(endpoint, lambda: self._responder.question(self._leadership.promised))
        self._vote_requests = VoteRequests(endpoint, self._leadership, self._count)
        self._server: Server | None = None
        self._cost = CallCost()
        self._leading: LeadingHub | None = None
        self._standby: Standby | None = None
        self._switch: CoreSwitch | None = None
        first = next(iter(endpoint.config.hub.addresses), "the owner of part 0")
        self._directory = CoreSwitch(None, f"the directory is at the run's first hub, {first}")
        self._policy = PolicyService(endpoint.part[1])
        self._page: MetricsPage | None = None
        self._view: PageProcess | None = None
        self._unwritten = ""
        """Why the address is not in the folder; "" if it is."""

    def start(self, *, force: bool = False, above: int = 0) -> None:
        """Recover the state from the folder and begin to serve.

        Args:
            force: Lead, whatever may be lost.
            above: A hub that begins a journal does so with the term after this one.
        """
        hub = self._make()
        journal = self._recovered(hub, force=force)
        state, mirrors = hub.state, (self.endpoint.directory / folder.MIRROR).exists()
        newest, own = self._others.newest_term(), max(state.term, above)
        if max(self._others.leading, default=0) > own and not self.endpoint.standby and not force:
            raise UserError(
                f"another hub leads this run under the newer term {newest}: start this hub with"
                f" --standby --address {self.endpoint.address} to follow it"
            )
        led = state.configs[-1:] and (state.configs[-1].term, state.configs[-1].leader)
        if (twin := self._others.leading.get(own)) and led == (own, self._leadership.identity) and not force:
            raise UserError(
                f"{twin} leads this run under term {own}, for which the hub of {self.endpoint.directory} was"
                " elected: one was started from a copy of the other's folder. Delete votes.json in the folder"
                " of the one that is to be a standby, and start it with --standby"
            )
        is_new = not mirrors and not self.endpoint.standby
        records: Sequence[Record] | None = None
        behind = not force and self._is_behind((state.term, *journal.position))
        twin = self._others.voters.get(self._leadership.identity, "")
        may_lead = newest <= own and not behind and not twin and not force
        led_last = may_lead and led == (own, self._leadership.identity) and self.endpoint.replicas is None
        if led_last and self._leadership.send(own, state.configs, self._others.compared):
            journal.is_closed, records = True, []
        elif may_lead or force:
            extent = own, *journal.position
            records = self._leadership.begin(extent, state.configs, is_new=is_new)
        if force:
            records = self._force(hub)
        if records is not None:
            self._lead(hub, journal, records or ([] if state.term else [Led(own + 1)]))
        else:
            standby = self._follow(hub, journal, twin)
            if led_last:
                if self._leadership.needs_nodes(self._others.compared):
                    self._say_it_must_be_elected()
                standby.ask_for_votes()
        self._vote_requests.start()
        self._note_address()

    def _recovered(self, hub: Hub, *, force: bool = False) -> Journal:
        """Recover the state, and return the journal.

        A copy of another hub's journal may have lost records that were on disk there. This hub is no
        candidate before it has as much again.
        """
        noted = folder.noted_term(self.endpoint.directory)
        journal = self._store.recover(hub, accept_loss=force, is_copy=noted > 0)
        if (lost := self._store.lost_end) is not None:
            self._leadership.forget((max(hub.state.term, noted), *lost))
        return journal

    def _is_behind(self, own: Extent) -> bool:
        """Return whether another hub has more of this journal, and do not stand before it is here, too.

        This folder is an older copy then, or has lost its end: to lead with it would lose what the other has.
        """
        ahead = self._others.ahead_of(own) if self._leadership.has_others and own[0] else None
        if ahead is None:
            return False
        address, extent = ahead
        reason = (
            f"{self.endpoint.directory} ends at byte {own[2]} of segment {own[1]}, and {address} has the"
            f" journal up to byte {extent[2]} of segment {extent[1]}: this hub follows until it has the rest"
        )
        log.error("%s", reason)
        self._reports.event("behind", reason=reason)
        is_swarm = self.endpoint.replicas is not None
        self._leadership.note_ahead(extent, _BELIEVED_S if is_swarm else math.inf)
        return True

    def _say_it_must_be_elected(self) -> None:
        """Report that too few other hubs answer for an election without nodes."""
        others = ", ".join(self.endpoint.others) or "none is known"
        reason = (
            f"{self.endpoint.directory} may be an older copy, and too few other hubs ({others}) answer."
            " This hub leads once it is elected. If they are gone for good, start it with --force-lead"
        )
        log.error("%s", reason)
        self._reports.event("must_be_elected", reason=reason)

    def follow(self, *, has_resigned: bool = False) -> None:
        """Recover the state from the folder and follow another hub: the successor waits for this replica.

        has_resigned: this hub has just given up its lease, and does not ask for votes before others could.
        """
        hub = self._make()
        journal = self._recovered(hub)
        if has_resigned:
            self._leadership.resign(hub.state.configs)
        self._follow(hub, journal)
        self._vote_requests.start()
        self._note_address()

    def _note_address(self) -> None:
        """Write the address into the folder, or say once that the disk is full; `look` tries again.

        It is written anew: that the file changes shows that the hub has started.
        """
        path, before, self._unwritten = self.endpoint.directory / "address", self._unwritten, ""
        try:
            write_atomically(path, self.address)
        except OSError as error:
            if not is_full(error):
                raise
            if read_line(path) != self.address:
                self._unwritten = f"{path}: no space ({error.strerror})"
        if self._standby is not None:
            self._standby.unwritten = self._unwritten
        if self._unwritten and not before:
            log.error("%s: others do not know that this hub is at %s", self._unwritten, self.address)
            self._reports.event("address_unwritten", reason=self._unwritten)
        elif before and not self._unwritten:
            self._reports.event("address_written", address=self.address)

    def _force(self, hub: Hub) -> Sequence[Record]:
        """Return the records with which this hub leads without a vote; print what may be lost."""
        if not self._leadership.has_others:  # it needs no vote, but lacks something
            return [Led(hub.state.term + 1)]
        print(self._others.what_is_missing(hub, self._leadership.identity), file=sys.stderr, flush=True)
        term = max(hub.state.term, self._others.newest_term())
        return self._leadership.force(term, _FORCED_JUMP + secrets.randbelow(_FORCED_JUMP))

    def _count(self, answer: VoteReply) -> None:
        """Take the answer of another hub to what this one asks."""
        if self._standby is not None:
            self._standby.count(answer)
        else:
            self._leadership.count(answer)

    @property
    def is_over(self) -> bool:
        """Return whether the hub has ended."""
        if self._leading is not None:
            return self._leading.is_over
        return self._standby is not None and (self._standby.is_over or bool(self._standby.failure))

    @property
    def address(self) -> str:
        """Return the HOST:PORT that the hub listens at, once it has started."""
        assert self._server is not None
        return self._server.address

    def look(self) -> None:
        """Write the address if the disk had no room for it, and serve the page of the run if it is due here.

        Raises UserError if the page is refused.
        """
        if self._unwritten:
            self._note_address()
        endpoint = self.endpoint
        if not self._config.hub.view or endpoint.standby or endpoint.part[0] or endpoint.replicas is not None:
            return
        if self._view is None:
            place = run_directory(endpoint.directory) or self.address
            log_file = endpoint.directory / "view.log"
            self._view = PageProcess(place, self._config.hub.view, endpoint.keys, log_file)
        self._view.look()

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

    def hand_over(self) -> None:
        """Let another replica of a swarm lead if this one ends during the run.

        Its first configuration needs the votes of the present ones, so this one serves a little longer.
        """
        leading = self._leading
        if self.endpoint.replicas is None or leading is None:
            return
        if not leading.is_over:
            leading.hand_over(_HAND_OVER_S)
        if leading.guard.replaced.is_set():
            time.sleep(_ANSWERS_S)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Stop the server and write the final snapshot. Calls in progress have `grace_s` to end."""
        self._vote_requests.stop()
        if self._server is not None:
            self._server.stop(grace_s)
        if self._page is not None:
            self._page.close()
        if self._view is not None:
            self._view.close()
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

    @property
    def has_resigned(self) -> bool:
        """Return whether this hub has led, and leads no more as its disk is full."""
        return self._leading is not None and self._leading.has_resigned

    @property
    def may_follow(self) -> bool:
        """Return whether this hub leads no more, and can follow another one in this process."""
        leading = self._leading
        if leading is None or leading.guard.lacking or leading.failure:
            return False
        may_follow = self.has_resigned or self.endpoint.replicas is not None
        return may_follow and leading.guard.replaced.is_set()

    def exit_code(self) -> int:
        """Return the exit code. Raises UserError if another hub leads, or this one has lost something."""
        leading, standby = self._leading, self._standby
        if leading is not None and leading.guard.lacking:
            raise UserError(leading.guard.lacking)
        if leading is not None and leading.guard.replaced.is_set():
            raise UserError(
                f"another hub leads this run under a newer term than this one's: start this one with"
                f" --standby --address {self.endpoint.address} to follow it"
            )
        failure = leading.failure if leading is not None else standby.failure if standby is not None else ""
        if failure:
            print(f"aedit: the hub has failed: {failure}", file=sys.stderr, flush=True)
        return 1 if failure else 0

    def _make(self) -> Hub:
        return make_hub(self._config, self.endpoint.part)

    def _lead(self, hub: Hub, journal: Journal, records: Sequence[Record]) -> LeadingHub:
        ledger = Ledger(hub, journal, self._store, self._reports.record_applied, self._clock)
        leading = LeadingHub(
            self.endpoint, ledger, self._reports, self._responder, self._leadership, self._cost
        )
        leading.guard.trust(
            other_terms=self._others.terms,
            shut_out=self.endpoint.may_not_confirm,
            candidate=self.endpoint.check_candidate,
        )
        if (key := self.endpoint.signing_key()) is not None:
            leading.driver.exchange.signer = Signer(key, self._config.name, self.endpoint.part[0])
        leading.begin(records)
        (self.endpoint.directory / folder.MIRROR).unlink(missing_ok=True)
        self._leading = leading
        self._start(leading)
        return leading

    def _start(self, leading: LeadingHub) -> None:
        """Start the threads of a hub that leads, and all that it serves."""
        leading.start()
        if self._config.hub.parent:
            self._join_parent(leading)
        if self._config.hub.metrics_port is not None:
            # Imported here so that hubs without a metrics page start faster.
            from aedit.async_sgd.service import MetricsPage

            host = self.endpoint.address.rpartition(":")[0].strip("[]")
            self._page = MetricsPage(leading.overview, host, self._config.hub.metrics_port)
        if self.endpoint.part[0] == 0:
            self._directory.core = leading.directory
        if self.endpoint.part[1] == 1:
            self._policy.versions = PolicyPublisher(
                leading.ledger,
                leading.directory.num_live,
                dtype=self._config.rl.version_dtype,
                ring=self._config.hub.policy_versions,
                record=self.endpoint.directory / RECORD,
            )
            self._policy.versions.start()
        self._serve(leading.driver)

    def _join_parent(self, leading: LeadingHub) -> None:
        # Imported here: only a hub with a parent needs an agent.
        from aedit.launch.hub.uplink import Uplink, name_at_parent
        from aedit.proto.agent import rejoin_secret

        name = name_at_parent(self._config.name, self.endpoint.preferred_address)
        secret = rejoin_secret(self.endpoint.directory / "rejoin")
        endpoint = self.endpoint
        leading.join_parent(Uplink(leading.engine, name, endpoint.client_keys(), endpoint.keys, secret))

    def _follow(self, hub: Hub, journal: Journal, twin: str = "") -> Standby:
        """Follow. twin: address of another hub with the register of this one, which gives no vote for now."""
        mirror = Mirror(self._store, self._make, (hub, journal))
        self._standby = standby = Standby(
            self._others,
            mirror,
            self._reports,
            self._responder,
            self._leadership,
            lambda mirror, records: self._lead(mirror.hub, mirror.journal(), records),
            self._clock,
        )
        standby.confirmer.twin = standby.confirmer.twin_at = twin
        self._serve(standby)
        if twin:
            standby.confirmer.twin = twin_text(self.address, twin)
        standby.start()
        return standby

    def _serve(self, core: HubCore) -> None:
        if self._switch is not None:
            self._switch.core = core
            return
        self._switch = CoreSwitch(core)
        limits = self._config.hub.limits
        bounds = Limits(
            nodes=limits.nodes,
            calls_per_s=limits.calls_per_s,
            in_flight_bytes=limits.in_flight_bytes,
            connections=limits.connections,
        )
        for address in (self.endpoint.preferred_address, self.endpoint.address):
            try:
                others = (directory_service(self._directory, bounds), policy_service(self._policy, bounds))
                self._server = serve(
                    self._switch,
                    address,
                    credentials=self._keys,
                    limits=bounds,
                    others=others,
                    cost=self._cost,
                )
                return
            except UserError:
                if address == self.endpoint.address:
                    raise


def welcome(endpoint: HubEndpoint, address: str) -> str:
    """Return the lines for the hub at `endpoint` that listens at `address`."""
    what = "standby" if endpoint.standby else "hub"
    lines = [f"run {endpoint.config.name}: {what} at {address}, journal in {endpoint.directory}"]
    if endpoint.replicas is not None:
        return f"run {endpoint.config.name}: replica of part {endpoint.part[0]} at {address}"
    if endpoint.standby:
        return f"{lines[0]}\nIt takes over when more than half of the nodes ask for it. Ctrl-C ends it."
    reach = ",".join(map(_public_address, endpoint.addresses() if endpoint.part[1] > 1 else (address,)))
    words = f"{reach}{_tls_options(endpoint, reach)}"
    lines += [f"  a node joins with  aedit join {words}", f"  see it with        aedit top {words}"]
    if endpoint.config.hub.view and not endpoint.part[0]:
        lines.append(f"  its page           {endpoint.config.hub.view}, see view.log there")
    if endpoint.keys and "KEYS" in words:
        lines.append("  KEYS is the folder that `aedit keys` made for the node")
    if all(map(is_loopback, reach.split(","))):
        lines.append(
            "  Only this machine can connect; for others: --hub.address HOST:PORT and keys of `aedit keys`."
        )
    return "\n".join([*lines, "  Ctrl-C ends the hub; the same command continues the run."])


def open_to_others(endpoint: HubEndpoint, address: str) -> str:
    """Return what a hub without keys allows to others; "" if it has keys, or only this machine reaches it."""
    if endpoint.keys is not None or is_loopback(address):
        return ""
    return (
        f"--insecure: anybody who reaches {address} can join under any name, change the model, put nodes out,"
        " read the model and the journal, and end the run. Use this in a closed network only; else make keys"
        " with `aedit keys` and name them with --keys."
    )


def _public_address(address: str) -> str:
    """Return HOST:PORT for other machines: the host name if the hub listens at all addresses."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _EVERYWHERE else address


def _tls_options(endpoint: HubEndpoint, reach: str) -> str:
    """Return the command-line options with which a node connects: its keys, or `--insecure`."""
    if endpoint.keys is None:
        return "" if all(map(is_loopback, reach.split(","))) else " --insecure"
    shared = endpoint.keys.parent / "nodes"
    return f" --keys {shlex.quote(str(shared))}" if shared.is_dir() else " --keys KEYS"


if __name__ == "__main__":
    sys.exit(run_task(lambda path, text: hub(load(path, []).config, from_json(HubOptions, text))))
