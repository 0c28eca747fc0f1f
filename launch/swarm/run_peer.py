"""`aedit peer`: one member of a swarm, which finds the others and hosts replicas of parts of the model."""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from aedit import traces
from aedit.child import StopSignals, from_json, run_task
from aedit.launch.config import RunConfig, load, to_toml
from aedit.launch.hub import PageProcess
from aedit.launch.records import claimed
from aedit.launch.swarm.hosted_part import HostedPart, PartView, PeerOptions, Role, part_view, set_aside
from aedit.launch.swarm.initial_peers import INTRODUCTION, make_discovery
from aedit.launch.swarm.peer_service import OtherModels, Overview, PeerService, peer_rows
from aedit.launch.swarm.recreate_parts import Forcing, Foundings, check_forcing
from aedit.proto.rpc import (
    Endorsement,
    ServerKeys,
    SigningKey,
    client_keys,
    host_certificates,
    listener_keys,
    own_endorsement,
    raise_descriptor_limit,
)
from aedit.proto.swarm import (
    KEY,
    NODE,
    REPLICAS,
    STATEMENTS,
    Certified,
    Founding,
    Gossip,
    GossipPlan,
    KnownPeers,
    NodeState,
    PartReplica,
    PeerCard,
    Proofs,
    ReplicasFile,
    Serials,
    StatementsFile,
    candidates,
    encoded_card,
    read_node,
)
from aedit.system import is_full, write_atomically
from aedit.types import UserError

log = logging.getLogger(__name__)
_TURN_S = 0.5
"""Pause between two looks at the other peers and at the own replicas."""
_WAITS_S = 60.0
"""Longest time for which a peer that is to keep a part waits for others to give theirs up: cards may lie."""
_RECENT_LEASES = 3
"""Leases for which a peer that has vanished counts among those that could keep what is acknowledged."""
_CALLS_IN_A_LEASE = 10.0
"""Rounds in a lease in which other live peers are called, and at most one per second."""
_LATE_S = 60.0
"""Longest time for which parts of a run that is over wait for nodes that have not left."""
_LEAVE_S = 12.0
"""Longest time in which the parts that this peer owns are handed over when it ends."""
_RENEWALS = 4
"""Times that a card is renewed within a lease."""


PEER_PROGRAM = "aedit.launch.swarm.run_peer"
"""This module as a child process; its arguments are the configuration file and `PeerOptions` as JSON."""


def peer(config: RunConfig, options: PeerOptions) -> int:
    """Take part in the swarm until SIGINT or SIGTERM; return the exit code.

    Raises UserError for what the user must correct: keys, folder, peers, an address that is taken, or a part
    that is not to be founded by force.
    """
    logging.basicConfig(format="aedit peer: %(message)s", level=logging.WARNING)
    if not config.swarm.on:
        raise UserError('swarm.discovery is empty: set it to "file" or "hivemind"')
    if not config.swarm.has_parts:
        raise UserError('swarm.exchange = "hivemind" has no parts to keep: a peer is a node, of aedit run')
    check_forcing(config.swarm, options.forces, founds=options.founds)
    traces.begin(config.traces.endpoint, "peer", run=config.name, node=options.name)
    raise_descriptor_limit()
    stop = StopSignals().asked
    with claimed(options.directory, "peer"):
        member = Peer(config, options)
        try:
            try:
                member.start()
            except OSError as error:
                if not is_full(error):
                    raise
                raise UserError(
                    f"{options.directory}: no space ({error.strerror}): make room, and start again"
                ) from None
            with suppress(OSError):  # standard output may be on a disk that is full
                print(f"peer {options.name} of {config.name} at {member.address or 'no address'}", flush=True)
            while not stop.wait(_TURN_S) and not member.is_over:
                member.turn()
        finally:
            member.close()
    traces.end_traces()
    return 0


class Peer:
    """One peer: what it hosts follows from the cards of the live peers."""

    def __init__(self, config: RunConfig, options: PeerOptions) -> None:
        """Listen, and read the key. Raises UserError."""
        swarm, directory = config.swarm, options.directory
        self._config, self._options = config, options
        write_atomically(options.run_toml, to_toml(config))
        self._trust = client_keys(options.keys) if options.keys else None
        key_path = directory / KEY
        try:
            self._key = SigningKey.kept(key_path)
        except (OSError, ValueError) as error:
            raise UserError(f"{key_path}: {error}") from None
        self._known = KnownPeers(
            config.name, self._key.public, allow=frozenset(bytes.fromhex(key) for key in swarm.allow)
        )
        self._hosted: dict[int, HostedPart] = {}
        self._hosting = threading.Lock()
        self._introduced = self._own_fault = self._full = ""
        self._over_since_s: float | None = None
        self._replicas = ReplicasFile(directory / REPLICAS)
        self._foundings = Foundings(
            directory, config.name, self._key.public, parts=swarm.parts, lost_s=swarm.lost_s
        )
        self._forcing = Forcing(options.forces, self._foundings, swarm.lease_s)
        self._received, self._proofs = StatementsFile(directory / STATEMENTS), Proofs(directory / "proofs")
        self._node_file = directory / NODE
        self._other_models = OtherModels()
        self._overview = Overview(swarm.lease_s)
        self._recent = RecentPeers(_RECENT_LEASES * swarm.lease_s)
        self._waits_since_s: dict[int, float] = {}
        self._page: PageProcess | None = None
        certified = self._certified()
        fingerprint = certified.own.fingerprint if certified else ""
        self._card = OwnCard(config, options.name, directory, self._key, self._known, fingerprint)
        self._service = PeerService(
            config,
            self._replicas,
            self._trust,
            # Live peers for views, and those that are shut out.
            lambda: peer_rows(
                self._known.live(time.monotonic()), self._key.public, self._known.faults, self._full
            ),
            self._foundings.states,
        )
        self._discovery = make_discovery(swarm, options.peers, directory=directory, run=config.name)
        plan = GossipPlan(
            listen=swarm.listen,
            peers_file=directory / "last_peers.json",
            server_keys=self._server_keys(),
            client_keys=self._trust,
            certified=certified,
            calls_every_s=swarm.lease_s / _CALLS_IN_A_LEASE,
            services=self._service.services(),
        )
        self._gossip = Gossip(self._known, self._key, self._own_card, self._discovery, plan)

    @property
    def address(self) -> str:
        """Return the HOST:PORT at which others reach this peer; "" for a client."""
        return self._config.swarm.reached_at(self._gossip.address)

    def start(self) -> None:
        """Host what is on the disk, or found the run; then exchange cards with others."""
        directory, kept = self._options.directory, self._options.kept(self._config.swarm.parts)
        for proof in self._proofs.load():
            self._known.shut_out(proof)
        marker = directory / "member"
        founds = self._options.founds and not kept and not marker.exists()
        marker.touch()
        for part in range(self._config.swarm.parts) if founds else kept:
            self._host(part, founds=founds)
        self._gossip.start()
        write_atomically(directory / "address", self.address or "client")

    def turn(self) -> None:
        """Look at the own replicas and at what others say; begin to keep parts, or give them up.

        With a full disk it goes on with what it has, and says so. Raises UserError if a part is to be founded
        by force that has an owner.
        """
        try:
            self._turn()
        except OSError as error:
            if not is_full(error):
                raise
            if not self._full:
                log.error(
                    "%s: no space (%s): nothing changes until there is room", error.filename, error.strerror
                )
            self._full = f"disk full ({error.strerror})"
        else:
            if self._full:
                log.warning("%s: there is room again", self._options.directory)
            self._full = ""

    def _turn(self) -> None:
        introduction = self._discovery.introduction or self.address
        if introduction != self._introduced:  # what others need to find this peer
            write_atomically(self._options.directory / INTRODUCTION, introduction)
            self._introduced = introduction
        for hosted in list(self._hosted.values()):
            hosted.look()
        if self._config.hub.view:
            self._look_at_page()
        if self._known.state != self._own_fault:
            self._own_fault = self._known.state
            log.error("%s", self._own_fault)
        live = self._known.live(time.monotonic())
        self._foundings.look(live)
        self._forcing.look(live)
        for part in range(self._config.swarm.parts):
            self._follow_founding(part)
        self._gossip.received(self._received.changed())
        for part, hosted in self._hosted.items():
            hosted.compare(self._gossip.about(part))
            for fault in hosted.faults:
                if fault.public_key != self._key.public:
                    self._known.shut_out(fault)
        self._other_models.name(self._known.live(time.monotonic()), self._key.public)
        self._recent.look(live, time.monotonic())
        faults, views = self._known.faults, self._views()
        self._proofs.keep(faults)
        shut_out = [key.hex() for key, found in faults.items() if found.statement is not None]
        num_peers = len(self._recent.within(_RECENT_LEASES * self._config.swarm.lease_s))
        may_begin = self._overview.is_enough(live, self._gossip.answers)
        self._replicas.write([view.places(self._config.swarm.copies, num_peers) for view in views], shut_out)
        for part, view in enumerate(views):
            own = self._hosted.get(part)
            role = view.role(self._config.swarm.copies, own.others if own is not None else 0)
            has_rested = own is not None and own.rest(role is Role.RETIRE)
            if part not in self._hosted and may_begin and self._begins(part, role):
                log.warning("part %d: keeping a replica", part)
                self._host(part, founds=False)
            elif role is Role.RETIRE and has_rested:
                log.warning("part %d: other peers keep it; giving up the replica here", part)
                with self._hosting:
                    retired = self._hosted.pop(part)
                retired.retire()

    @property
    def is_over(self) -> bool:
        """Return whether every part that this peer keeps has ended with the run, or one has long ago.

        A node that was away as the run ended may be awaited by one part, while another one has ended.
        """
        ended = [hosted.is_over for hosted in self._hosted.values()]
        if not any(ended):
            return False
        self._over_since_s = self._over_since_s or time.monotonic()
        return all(ended) or time.monotonic() > self._over_since_s + _LATE_S

    def close(self) -> None:
        """Say good-bye, let the owned parts be handed over, and end all processes."""
        self._card.leaving = True
        hosted, deadline_s = list(self._hosted.values()), time.monotonic() + _LEAVE_S
        for one in hosted:
            one.ask_to_end()
        for one in hosted:
            one.stop(max(0.1, deadline_s - time.monotonic()))
        self._gossip.close()
        if self._page is not None:
            self._page.close()

    def _look_at_page(self) -> None:
        """Serve the page of the run. A refused one is tried again: another peer may have the port."""
        options = self._options
        if self._page is None:
            place = self.address or str(options.directory.parent.parent)
            log_file = options.directory / "view.log"
            self._page = PageProcess(place, self._config.hub.view, options.keys, log_file)
        try:
            self._page.look()
        except UserError as error:
            log.error("%s", error)

    def _follow_founding(self, part: int) -> None:
        """Keep a replica aside that is older than the founding of its part that counts; found the part."""
        register, own = self._foundings.register(part), self._hosted.get(part)
        begins = self._foundings.begins(part)
        if own is not None and (begins or (own.state and not register.counts(own.state.term))):
            with self._hosting:
                del self._hosted[part]
            own.set_aside()
        if begins:
            if self._options.folder(part).exists():
                set_aside(self._options.folder(part))
            self._host(part, founds=True, above=register.term_above)

    def _begins(self, part: int, role: Role) -> bool:
        """Return whether to begin to keep the part now, also if it has waited for long."""
        if role is not Role.WAIT:
            self._waits_since_s.pop(part, None)
            return role is Role.HOST
        now = time.monotonic()
        if now - self._waits_since_s.setdefault(part, now) < _WAITS_S:
            return False
        del self._waits_since_s[part]
        return True

    def _host(self, part: int, *, founds: bool, above: int = 0) -> None:
        hosted = HostedPart(part, self._config.swarm, self._options, self._trust, founds=founds, above=above)
        with self._hosting:
            self._hosted[part] = hosted

    def _server_keys(self) -> ServerKeys:
        """Return what this peer requires of its callers; nothing of a client, which is never called."""
        listen, options = self._config.swarm.listen, self._options
        if not listen:
            return ServerKeys()
        mutual = self._config.hub.certificates
        return listener_keys(listen, options.keys, certificates=mutual, insecure=options.insecure)

    def _certified(self) -> Certified | None:
        """Return the certificate of this peer and the check of others' ones; None without keys."""
        keys, listens = self._options.keys, bool(self._config.swarm.listen)
        if keys is None:
            return None
        run, me = self._config.name, self._key.public
        return Certified(
            host_certificates(keys), own_endorsement(keys, run, me) if listens else Endorsement()
        )

    def _views(self) -> list[PartView]:
        live = self._known.live(time.monotonic())
        run, me = self._config.name, self._key.public
        lately = self._recent.within(self._config.swarm.lease_s)
        return [
            part_view(run, part, live, me, self._foundings.register(part).counts, lately)
            for part in range(self._config.swarm.parts)
        ]

    def _own_card(self) -> bytes:
        with self._hosting:
            states = {part: hosted.state for part, hosted in self._hosted.items()}
        hosts = {part: state for part, state in states.items() if state is not None}
        return self._card.current(self.address, hosts, self._foundings.says(), read_node(self._node_file))


class OwnCard:
    """Makes the cards of this peer."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        directory: Path,
        key: SigningKey,
        known: KnownPeers,
        fingerprint: str = "",
    ) -> None:
        """Make none yet. fingerprint: of the TLS certificate of this peer; "" without one."""
        self._fingerprint = fingerprint
        self._run, self._name, self._lease_s = config.name, name, config.swarm.lease_s
        self._key, self._known, self._serials = key, known, Serials(directory / "serial")
        self._last: PeerCard | None = None
        self._data = b""
        self._made_s = 0.0
        self.leaving = False
        """True once this peer ends: others then do without it at once."""

    def current(
        self,
        address: str,
        parts: Mapping[int, PartReplica],
        foundings: Mapping[int, Founding],
        node: NodeState,
    ) -> bytes:
        """Return the encoded card with these values; another speed alone waits for the next renewal.

        Raises:
            OSError: The serial cannot be kept.
        """
        card = PeerCard(
            run=self._run,
            name=self._name,
            public_key=self._key.public,
            serial=1,
            address=address,
            parts=parts,
            fingerprint=self._fingerprint,
            model=node.model,
            lease_s=self._lease_s,
            leaving=self.leaving,
            foundings=foundings,
        )
        now_s = time.monotonic()
        if card != self._last or now_s > self._made_s + self._lease_s / _RENEWALS:
            serial = self._serials.next(above=self._known.own_serial)
            full = replace(card, serial=serial, steps_per_s=node.steps_per_s)
            self._data = encoded_card(full, self._key.private)
            self._last, self._made_s = card, now_s
        return self._data


class RecentPeers:
    """The peers that can keep parts, and when each was live last.

    On a busy machine the cards of a peer may arrive or leave too late; it is back a moment later. If it did
    not count meanwhile, others would take its replicas over, and an owner that receives no cards would need
    only itself to acknowledge.
    """

    def __init__(self, for_s: float) -> None:
        """Know none yet. for_s: how long a peer is remembered that is not live any more."""
        self._for_s, self._now_s = for_s, 0.0
        self._live_s: dict[bytes, float] = {}

    def look(self, live: Mapping[bytes, PeerCard], now_s: float) -> None:
        """Take the cards of the live peers by key; one that has said that it leaves does not count.

        now_s: time on a monotonic clock.
        """
        self._now_s = now_s
        self._live_s |= dict.fromkeys(candidates(live), now_s)
        leaving = {key for key, card in live.items() if card.leaving}
        self._live_s = {
            key: at_s
            for key, at_s in self._live_s.items()
            if now_s - at_s < self._for_s and key not in leaving
        }

    def within(self, seconds: float) -> frozenset[bytes]:
        """Return the keys of the peers that were live less than `seconds` before the last look."""
        return frozenset(key for key, at_s in self._live_s.items() if self._now_s - at_s < seconds)


if __name__ == "__main__":
    sys.exit(run_task(lambda path, text: peer(load(path, []).config, from_json(PeerOptions, text))))
