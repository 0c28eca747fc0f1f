"""One hub process among the hubs of its run: addresses, folders, keys, and calls to the others.

`OtherHubs` asks which hub leads and what it has; `VoteRequests` asks for votes.
"""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from aedit.async_sgd.hub import Hub
from aedit.async_sgd.journal import JournalBroken, NoSpace
from aedit.async_sgd.replication import Leadership
from aedit.launch.config import RunConfig
from aedit.launch.hub import folder
from aedit.proto.rpc import (
    MOST_TERM,
    ClientKeys,
    Extent,
    HubClient,
    HubRefused,
    HubUnreachable,
    PortClosed,
    Proposal,
    Refusal,
    ServerKeys,
    SigningKey,
    VoteReply,
    answer_in,
    client_keys,
    listener_keys,
    proposal_out,
    sign,
    signer_of,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import KEY, ReplicasFile
from aedit.system import read_line
from aedit.types import UserError

log = logging.getLogger(__name__)
_TIMEOUT_S, _LOOK_S = 3.0, 0.1
_SEARCH_TIMEOUT_S = 1.0
"""Of such a question in a swarm: while it is not known which replica leads, the part stands still."""
_ENDED_TIMEOUT_S = 0.5
_TELL_TIMEOUT_S = 60.0
Hello = pb.HelloReply | HubRefused | HubUnreachable
"""Answer of a hub, or the error in its place."""
_EVERY_S = 0.2
_CALL_TIMEOUT_S = 1.0
"""Interval and time limit of requests for votes."""
HUB_PROGRAM = "aedit.launch.hub.main"
"""Module of a hub as a child process; its arguments are the configuration file and `HubOptions` as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options of the hub process, beside the configuration."""

    directory: Path
    """Journal, snapshots, records, and the file `address` with the HOST:PORT that the hub listens at."""
    address: str = ""
    """HOST:PORT to listen at instead of the configured one."""
    part: tuple[int, int] = (0, 1)
    """(k, n): it owns the units i with i % n == k."""
    standby: bool = False
    """Follow the hub that leads, and lead once elected."""
    standby_number: int = 1
    """Number of a standby among those in `hub.standby`, from 1."""
    replicas: Path | None = None
    """File in which a peer of a swarm keeps where the other replicas of the part are."""
    term_above: int = 0
    """A hub of a swarm that begins a journal does so with the term after this one."""
    force_lead: bool = False
    """Lead without a vote, and with what is left of the journal, whatever may be lost."""
    stay: bool = False
    """Serve until a signal arrives, also after the run is over, for nodes that come late."""
    keys: Path | None = None
    """Folder of keys that `aedit keys` made for this hub."""
    insecure: bool = False
    """Listen without TLS at an address that other machines can reach."""


@dataclass(frozen=True, slots=True)
class HubEndpoint:
    """One hub process among the hubs of its run."""

    config: RunConfig
    directory: Path
    part: tuple[int, int]
    standby: bool
    """True if it was started with `--standby`."""
    address: str
    """HOST:PORT as configured; port 0 chooses a free port."""
    keys: Path | None
    number: int = 1
    """Number of a standby among those in `hub.standby`, from 1."""
    replicas: ReplicasFile | None = None
    """Where the other replicas of the part are, in a swarm; None: the configuration names the other hubs."""
    copies: int = 0
    """Replicas of the part that a swarm keeps."""
    stays: bool = False
    """True if it serves until a signal arrives, also after the run is over."""

    @classmethod
    def of(cls, config: RunConfig, options: HubOptions) -> "HubEndpoint":
        """Return the place of a hub. Raises UserError if the options do not match the configuration."""
        (k, n), standby, number = options.part, options.standby, options.standby_number
        replicas, copies = None, 0
        if options.replicas is not None:
            replicas, copies, number = ReplicasFile(options.replicas), config.swarm.copies, 1
            address = options.address or config.swarm.listen
        else:
            configured, standbys = config.hub.addresses, config.hub.standbys_of(k)
            if not configured:
                raise UserError("hub.address is empty: set it to the HOST:PORT that the hub listens at")
            if n != len(configured) and n > 1:
                raise UserError(
                    f"--part: K/{n} does not match the {len(configured)} addresses of hub.address;"
                    f" use K/{len(configured)}"
                )
            if standby and not standbys:
                raise UserError(
                    "--standby: hub.standby is empty; set it to HOST:PORT of the standby, so that the nodes"
                    " find it"
                )
            if standby and not 1 <= number <= len(standbys):
                raise UserError(
                    f"--standby-number: expected 1 to {len(standbys)}, the addresses in hub.standby,"
                    f" got {number}"
                )
            address = options.address or (standbys[number - 1] if standby else configured[k])
        return cls(
            config,
            options.directory,
            (k, n),
            standby,
            address,
            options.keys,
            number,
            replicas,
            copies,
            options.stay,
        )

    @property
    def preferred_address(self) -> str:
        """Return the address to try first.

        With port 0 it is the address of the previous start, so that clients find the hub again.
        """
        before = read_line(self.directory / "address")
        same_host = before.rpartition(":")[0] == self.address.rpartition(":")[0]
        return before if self.address.endswith(":0") and same_host else self.address

    @property
    def uses_standby_address(self) -> bool:
        """Return whether the hub listens at a configured standby address, whatever its role is now."""
        return self.standby and self.address in self._standbys[self.number - 1 : self.number]

    @property
    def num_others(self) -> int:
        """Return the most hubs besides this one that may lead at a time.

        In a swarm one more than is kept for long: the newcomer is in sync before another one goes.
        """
        return len(self._standbys) if self.replicas is None else self.copies

    @property
    def part_asked(self) -> int:
        """Return the part as calls name it: counted from 1 in a swarm, 0 with hubs of fixed addresses."""
        return 0 if self.replicas is None else self.part[0] + 1

    @property
    def own_address(self) -> str:
        """Return the HOST:PORT by which others reach this hub; "" before it listens."""
        return self.config.swarm.reached_at(read_line(self.directory / "address"))

    @property
    def successor(self) -> str:
        """Return the address of the replica that should lead in place of this hub; "" if none should."""
        first = self.replicas.part(self.part[0]).first if self.replicas is not None else ""
        return "" if first == self.own_address else first

    def place_without(self, owner: str) -> int | None:
        """Return the place of this replica among those of its part besides the owner; None if unknown."""
        replicas = self.replicas.part(self.part[0]).replicas if self.replicas is not None else ()
        left = [one for one in replicas if one != owner]
        return left.index(self.own_address) if self.own_address in left else None

    def place_of(self, address: str | None) -> int:
        """Return the place of a replica of a swarm in the ranking of its part, from 0; the last if unknown.

        address: of its hub; None for this one.
        """
        ranked = self.replicas.part(self.part[0]).replicas if self.replicas is not None else ()
        wanted = self.own_address if address is None else address
        return ranked.index(wanted) if wanted in ranked else len(ranked)

    @property
    def least_replicas(self) -> int:
        """Return how many replicas must have a record on disk, this hub included; 1 but in a swarm."""
        return self.replicas.part(self.part[0]).least if self.replicas is not None else 1

    def is_shut_out(self, address: str) -> bool:
        """Return whether there is proof against the peer that hosts the replica at an address."""
        return self.replicas is not None and self.replicas.is_shut_out(address)

    def may_not_confirm(self, address: str) -> bool:
        """Return whether a replica at an address is not waited for.

        Once a peer is shut out, only addresses that a signed card has named count: its replica could give
        none, or one that it has made up.
        """
        found = self.replicas
        is_unknown = found is not None and bool(found.shut_out()) and not found.is_named(address)
        return is_unknown or self.is_shut_out(address)

    def check_candidate(self, request: pb.ProposeRequest) -> None:
        """Raise Refusal if the peer that asks for a vote in a swarm is shut out, or not let in."""
        if self.replicas is None:
            return
        key, allow = signer_of(request).hex(), self.config.swarm.allow
        reason = (
            "it is not signed with the key of a peer"
            if not key
            else f"there is proof against the peer with the key {key[:16]}..."
            if key in self.replicas.shut_out()
            else f"key {key} is not in swarm.allow"
            if allow and key not in allow
            else ""
        )
        if reason:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"no answer to a request for a vote: {reason}")

    def signing_key(self) -> SigningKey | None:
        """Return the key of the peer that hosts this hub; None outside a swarm. Raises UserError."""
        if self.replicas is None:
            return None
        path = self.replicas.path.parent / KEY
        try:
            return SigningKey.kept(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}") from None

    @property
    def others(self) -> tuple[str, ...]:
        """Return the addresses of the other hubs that may lead, without those that are not known yet."""
        part = self.part[0]
        if self.replicas is not None:
            found = self.replicas.part(part)
            known = dict.fromkeys((found.owner, *found.replicas))
            return tuple(address for address in known if address and address != self.own_address)
        places = [(self.config.hub.addresses[part], self._folder_of(part))]
        places += [
            (address, self.directory.parent / folder.of_standby(number))
            for number, address in enumerate(self._standbys, 1)
        ]
        del places[self.number if self.uses_standby_address else 0]
        return tuple(filter(None, (folder.actual_address(*place) for place in places)))

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all hubs that split the units, with this hub's own address for its part."""
        mine, own = self.part[0], self.own_address or self.address
        if self.replicas is not None:
            return tuple(own if k == mine else part.owner for k, part in enumerate(self.replicas.parts()))
        configured = self.config.hub.addresses
        found = [
            folder.actual_address(address, self._folder_of(k)) or address
            for k, address in enumerate(configured)
        ]
        host = configured[mine].rpartition(":")[0] if mine < len(found) else ""
        if mine < len(found) and (self.uses_standby_address or host == own.rpartition(":")[0]):
            found[mine] = own
        return tuple(found)

    def server_keys(self, *, insecure: bool) -> ServerKeys:
        """Return the TLS keys of the server.

        Raises UserError if remote callers could connect without TLS and `insecure` is False.
        """
        mutual = self.config.hub.certificates
        return listener_keys(self.address, self.keys, certificates=mutual, insecure=insecure)

    def client_keys(self) -> ClientKeys:
        """Return the TLS keys for calls to the other hubs."""
        return client_keys(self.keys) if self.keys else None

    def client(
        self, address: str, limit_s: float, *, until_it_listens: bool = True
    ) -> AbstractContextManager[HubClient]:
        """Return a client of another hub, whose calls take at most `limit_s`; the block closes it."""
        keys = self.client_keys()
        return closing(HubClient(address, keys, call_timeout_s=limit_s, until_it_listens=until_it_listens))

    @property
    def _standbys(self) -> tuple[str, ...]:
        return self.config.hub.standbys_of(self.part[0])

    def _folder_of(self, part: int) -> Path:
        """Return the folder of the leading hub of `part` in a local run."""
        name = f"hub_{part}" if self.part[1] > 1 else "hub"
        return (
            self.directory
            if part == self.part[0] and not self.uses_standby_address
            else self.directory.parent / name
        )


class OtherHubs:
    """The hubs besides this one that may lead."""

    def __init__(self, endpoint: HubEndpoint, question: Callable[[], pb.HelloRequest]) -> None:
        """Create them. question: returns the Hello of this hub."""
        self.endpoint, self._question = endpoint, question
        self.leading: dict[int, str] = {}
        """Addresses of the hubs that lead, by term, as `newest_term` has found them."""
        self.voters: dict[int, str] = {}
        """Addresses of the hubs that have answered then, by the identity under which they vote."""
        self.compared: set[int] = set()
        """Identities of those that have said how much of the journal they have, as `ahead_of` has found."""
        self.answers: dict[str, Hello] = {}
        """Answers to the last search of `leader`, by address."""

    def newest_term(self) -> int:
        """Return the highest term that another hub knows; 0 if there is none or none answers.

        Raises UserError if one of this part refuses this hub: it is alive and may lead.
        """
        terms = [0]
        for address, answer in self._hellos(limit_s=self._limit_s):
            if isinstance(answer, pb.HelloReply):
                terms.append(answer.term)
                self.voters[answer.promise.voter] = address
                if answer.leads:
                    self.leading[answer.term] = address
            elif isinstance(answer, HubUnreachable):
                log.warning("%s: another hub of the run does not answer: %s", address, answer)
            elif answer.code is grpc.StatusCode.FAILED_PRECONDITION:
                log.warning("not a hub of this part: %s", answer)
            else:
                raise UserError(str(answer)) from answer
        return max(terms)

    def ahead_of(self, own: Extent) -> tuple[str, Extent] | None:
        """Return the address and the extent of the follower that has more of the journal than `own`.

        That of the one which has most; None if none does or answers. What a follower has confirmed counts as
        what it has: it may be fetching that anew.
        """
        found = dict[str, Extent]()
        for address, answer in self._hellos(limit_s=self._limit_s):
            if not isinstance(answer, pb.HelloReply):
                continue
            if answer.leads:
                self.compared.add(answer.promise.voter)
                continue
            try:
                told = self._status(address)
                at = (int(told["term"]), int(told["segment"]), int(told["offset"]))
                term, segment, offset = map(int, told.get("confirmed", at))
                found[address] = max(at, (term, segment, offset))
                self.compared.add(answer.promise.voter)
            except (HubUnreachable, HubRefused, ValueError, KeyError, TypeError, OverflowError) as error:
                log.warning("%s does not say how much of the journal it has: %s", address, error)
        address, extent = max(found.items(), key=lambda item: item[1], default=("", own))
        return (address, extent) if extent > own else None

    def terms(self) -> tuple[int, Sequence[VoteReply]]:
        """Return the highest term that another hub has led, 0 for none, and what they have promised."""
        answers = [answer for _, answer in self._hellos() if isinstance(answer, pb.HelloReply)]
        led = max((answer.term for answer in answers), default=0)
        return led, [answer_in(answer.promise) for answer in answers if answer.HasField("promise")]

    def leader(
        self, least_term: int, stopping: threading.Event, *, without: str = ""
    ) -> tuple[str, int] | None:
        """Return the address and term of the first hub to answer that it leads; None if none does.

        Args:
            least_term: Leaders of lower terms do not count.
            stopping: Ends the search once it is set.
            without: Address of a hub that is not asked.
        """
        self.answers = {}
        for address, answer in self._hellos(stopping, self._limit_s, without):
            self.answers[address] = answer
            if isinstance(answer, pb.HelloReply) and answer.leads and answer.term >= least_term:
                return address, answer.term
        return None

    def has_ended(self, address: str) -> bool:
        """Return whether no process listens at an address any more, though its machine answers."""
        return isinstance(self._hello(address, _ENDED_TIMEOUT_S), PortClosed)

    def tell(self, term: int) -> None:
        """Send the others, in a thread, the term under which this one leads: a former leader must stop."""
        threading.Thread(target=self._tell, args=(term,), name="tell", daemon=True).start()

    def _tell(self, term: int) -> None:
        for address in self.endpoint.others:
            try:
                with self.endpoint.client(address, _TELL_TIMEOUT_S) as client:
                    client.confirm(pb.ConfirmRequest(term=term))
            except (HubUnreachable, HubRefused) as error:
                log.warning("telling %s the new term: %s", address, error)

    def check_leader(self, address: str, event: Callable[..., None]) -> None:
        """Raise HubRefused if there is proof against the leader's peer: it is as one that leads no more."""
        if self.endpoint.is_shut_out(address):
            event("owner_shut_out", owner=address)
            text = f"there is proof that the owner at {address} gives nodes different anchors"
            raise HubRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    def _status(self, address: str) -> dict[str, Any]:
        with self.endpoint.client(address, self._limit_s, until_it_listens=False) as client:
            status: dict[str, Any] = json.loads(client.status(pb.StatusRequest()).json)
            return status

    @property
    def _limit_s(self) -> float:
        return _TIMEOUT_S if self.endpoint.replicas is None else _SEARCH_TIMEOUT_S

    def _hellos(
        self, stopping: threading.Event | None = None, limit_s: float = _TIMEOUT_S, without: str = ""
    ) -> Iterator[tuple[str, Hello]]:
        """Ask all at once, and yield their answers as they come: one that is silent delays no other."""
        addresses = [address for address in self.endpoint.others if address != without]
        stopping = stopping or threading.Event()
        pool = ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="hello")
        try:
            asked = {pool.submit(self._hello, address, limit_s): address for address in addresses}
            waiting = set(asked)
            while waiting and not stopping.is_set():
                done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
                yield from ((asked[one], one.result()) for one in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _hello(self, address: str, limit_s: float) -> Hello:
        try:
            with self.endpoint.client(address, limit_s, until_it_listens=False) as client:
                reply = client.hello(self._question())
            if reply.term >= MOST_TERM:
                raise ValueError(f"its term is {reply.term}; expected a number below {MOST_TERM}")
            if reply.HasField("promise"):
                answer_in(reply.promise)
            return reply
        except (HubRefused, HubUnreachable) as error:
            log.info("asking another hub for its term: %s", error)
            return error
        except ValueError as error:
            log.warning("asking another hub for its term: %s: %s", address, error)
            return HubUnreachable(f"{address}: {error}")

    def what_is_missing(self, hub: Hub, identity: int) -> str:
        """Return a text for the operator who lets this hub lead without a vote: what may be lost."""
        state = hub.state
        lines = [
            f"--force-lead: the journal here ends {state.elapsed_s:.1f} s into the run, term {state.term}"
        ]
        newest = state.configs[-1] if state.configs else None
        if newest is not None and identity in newest.replicas:
            lines.append(
                "  it has every acknowledged push, unless the others agreed to go on without this hub"
            )
        else:
            lines.append("  it was not waited for: pushes that were acknowledged since may be lost")
        own = {member.name: member.accepted for member in state.members}
        for address in self.endpoint.others:
            try:
                with self.endpoint.client(address, _TIMEOUT_S) as client:
                    status = json.loads(client.status(pb.StatusRequest()).json)
            except (HubUnreachable, HubRefused):
                lines.append(f"  {address} does not answer: what it has acknowledged alone is lost")
                continue
            more = sum(max(0, node["accepted"] - own.get(node["name"], 0)) for node in status["nodes"])
            lines.append(f"  {address} has {more} accepted pushes that are not here: they are lost")
        return "\n".join(lines)


class VoteRequests:
    """Threads that send what `leadership` proposes to the other hubs, and pass the answers to `count`."""

    def __init__(
        self, endpoint: HubEndpoint, leadership: Leadership, count: Callable[[VoteReply], None]
    ) -> None:
        self._endpoint, self._leadership, self._count = endpoint, leadership, count
        self._stopping = threading.Event()
        self._signed: tuple[Proposal, pb.ProposeRequest] | None = None
        """The newest proposal, and its message."""
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name="request_votes", daemon=True)
            for index in range(endpoint.num_others)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads; a call that is on its way ends within a second."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self, index: int) -> None:
        for turn in itertools.count():
            if self._stopping.wait(_EVERY_S):
                return
            if (asks := self._leadership.asks()) is None:
                continue
            # There may be more addresses than threads: cards of a swarm may lie.
            if mine := self._endpoint.others[index :: len(self._threads)]:
                self._ask(mine[turn % len(mine)], asks)

    def request(self, asks: Proposal) -> pb.ProposeRequest:
        """Return the signed message for a proposal: the same one until the proposal changes."""
        if (signed := self._signed) is not None and signed[0] == asks:
            return signed[1]
        request = pb.ProposeRequest(
            run=self._endpoint.config.name,
            proposal=proposal_out(asks, self._leadership.key),
            part=self._endpoint.part_asked,
        )
        if (key := self._endpoint.signing_key()) is not None:
            sign(request, key)
        self._signed = asks, request
        return request

    def _ask(self, address: str, asks: Proposal) -> None:
        request = self.request(asks)
        try:
            with self._endpoint.client(address, _CALL_TIMEOUT_S, until_it_listens=False) as client:
                self.take(address, client.propose(request, _CALL_TIMEOUT_S))
        except (HubUnreachable, HubRefused) as error:
            log.info("no answer to a proposal: %s", error)

    def take(self, address: str, answer: pb.Answer) -> None:
        """Count the answer of the hub at `address` if it is signed and can be written down."""
        try:
            self._count(answer_in(answer))
        except (NoSpace, JournalBroken, OSError, Refusal, ValueError) as error:
            log.warning("an answer to a proposal does not count: %s: %s", address, error)
