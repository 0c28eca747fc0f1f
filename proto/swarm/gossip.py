"""Gossip between peers: the service that answers others, and the threads that call them.

The run needs discovery only to find a first peer: all others are learned from that one, and those that have
answered are kept in a file for the next start.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from aedit.proto.rpc import (
    CallHandlers,
    ClientKeys,
    FairPool,
    HubRefused,
    HubUnreachable,
    Limits,
    Server,
    ServerKeys,
    Service,
    SigningKey,
)
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm.card import PeerCard
from aedit.proto.swarm.dialing import PeerCalls
from aedit.proto.swarm.discovery import Discovery
from aedit.proto.swarm.exchange import MOST_HINTS, Certified, Exchanges
from aedit.proto.swarm.known_peers import KnownPeers
from aedit.system import write_atomically
from aedit.types import printable

log = logging.getLogger(__name__)

SERVICE = "aedit.v1.Swarm"
_REQUEST_BYTES = 2**17
_THREADS = 4
_SAVED_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipPlan:
    """Settings of the gossip of one peer."""

    listen: str = ""
    """HOST:PORT where this peer answers; port 0 takes a free one. Empty for a client, which only calls."""
    peers_file: Path | None = None
    """File with the addresses of peers that have answered, for the next start."""
    server_keys: ServerKeys = field(default_factory=ServerKeys)
    client_keys: ClientKeys = None
    certified: Certified | None = None
    """With keys: the certificates of this peer and of others."""
    every_s: float = 1.0
    """Time between two rounds."""
    fanout: int = 3
    """Live peers that are called in a round."""
    calls_every_s: float = 0.0
    """Least time between two rounds that call live peers, while the own card says nothing new. Other
    addresses are called in each round."""
    dials: int = 8
    """Other addresses that are called in a round. No more than `fanout` and these are called at a time: on a
    busy machine, where answers come late, calls then wait for answers and do not add to its work."""
    call_timeout_s: float = 4.0
    services: Sequence[Service] = ()
    """Further services at the same address."""


class Gossip:
    """Exchanges cards with other peers from `start` to `close`.

    own_card: returns the encoded card of this peer; it is asked in every round. A card with a new serial
    costs a signature here and a verification at every other peer: renew it when something has changed, and
    otherwise a few times in each lease.
    """

    def __init__(
        self,
        known: KnownPeers,
        key: SigningKey,
        own_card: Callable[[], bytes],
        discovery: Discovery,
        plan: GossipPlan,
    ) -> None:
        """Listen, if the plan says so, and refuse callers until `start`.

        Raises:
            UserError: The address is not available.
        """
        self._exchanges = Exchanges(known, key, certified=plan.certified)
        self._own_card, self._plan = own_card, plan
        self._known, self._discovery = known, discovery
        most = plan.fanout + plan.dials
        self._pool = ThreadPoolExecutor(most, "gossip call")
        self._calls = PeerCalls(plan.client_keys, plan.call_timeout_s, most)
        self._closed = threading.Event()
        self._found: Sequence[str | bytes] = ()
        self._called_s = float("-inf")
        self._called_with: PeerCard | None = None
        """Time and own card of the last round that called live peers."""
        self.answers = 0
        """Answers of other peers that were taken; for information, threads may miss one."""
        self._troubles: dict[str, str] = {}
        """Last error, by what has failed."""
        self._saved: tuple[float, list[str]] = (float("-inf"), [])
        self._threads = [
            threading.Thread(target=self._guarded, args=(body, name), name=name, daemon=True)
            for body, name in ((self._round, "gossip"), (self._discover, "discovery"))
        ]
        self._server = self._serve() if plan.listen else None

    @property
    def address(self) -> str:
        """Return the address where this peer listens; "" for a client."""
        return self._server.address if self._server else ""

    @property
    def state(self) -> str:
        """Return as text what is wrong; "" if nothing is."""
        troubles = list(self._troubles.values())
        shut_out = [f"peer shut out: {fault.reason}" for fault in self._known.faults.values()]
        faults = (self._discovery.state, self._known.state, *troubles, *shut_out)
        return "; ".join(one for one in faults if one)

    def start(self) -> None:
        """Begin to call other peers."""
        for address in self._last_peers():
            self._exchanges.remember(address, monotonic())
        for thread in self._threads:
            thread.start()

    def received(self, statements: Sequence[bytes]) -> None:
        """Take statements of owners that the node of this peer has received, to tell and to compare."""
        self._exchanges.received(statements, monotonic())

    def about(self, part: int) -> Sequence[bytes]:
        """Return the newest statements about a part that nodes have received."""
        return self._exchanges.about(part)

    def close(self) -> None:
        """End threads, calls, service and discovery. May be called more than once."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._plan.call_timeout_s + 5.0)
        self._calls.close()
        self._pool.shutdown(cancel_futures=True)
        if self._server:
            self._server.stop(0.0)
            self._server = None
        self._discovery.close()

    def _serve(self) -> Server:
        pool = FairPool(_THREADS, "swarm")

        def exchange(request: pb.ExchangeRequest) -> pb.ExchangeReply:
            return self._exchanges.answer(request, monotonic())

        handlers = CallHandlers(Limits())
        calls = {"Exchange": handlers.call(pb.ExchangeRequest, exchange, pool, _REQUEST_BYTES)}
        service = Service(SERVICE, calls, (pool,))
        return Server([service, *self._plan.services], self._plan.listen, keys=self._plan.server_keys)

    def _guarded(self, body: Callable[[], None], name: str) -> None:
        """Call `body` in every round; an error in it is logged, and does not end the thread."""
        while not self._closed.is_set():
            try:
                body()
                self._troubles.pop(name, None)
            except Exception as error:
                if name not in self._troubles:
                    log.exception("%s failed", name)
                self._troubles[name] = f"{name}: {printable(str(error), 256)}"
            self._closed.wait(self._plan.every_s)

    def _round(self) -> None:
        now = monotonic()
        self._known.renew(self._own_card(), now)
        for hint in list(self._found)[:MOST_HINTS]:
            self._exchanges.hint(hint, now)
        room = self._calls.room
        own = self._known.live(now)[self._known.own_key]
        fanout = min(self._plan.fanout if self._calls_live_peers(now, own) else 0, room)
        for address in self._exchanges.targets(now, fanout, min(self._plan.dials, room - fanout)):
            if self._calls.begin(address):
                self._pool.submit(self._exchange, address)
        self._save(now)

    def _calls_live_peers(self, now: float, own: PeerCard) -> bool:
        """Return whether to call live peers in this round: the own card says something new, or it is time."""
        own = replace(own, serial=1, steps_per_s=0.0)
        if own == self._called_with and now < self._called_s + self._plan.calls_every_s:
            return False
        self._called_with, self._called_s = own, now
        return True

    def _discover(self) -> None:
        if card := self._known.own_card:
            self._discovery.announce(card)
        self._found = self._discovery.found()

    def _exchange(self, address: str) -> None:
        """Make one call. Runs in the pool."""
        try:
            request = self._exchanges.request(address)
            reply = self._calls.call(address, request)
            self._exchanges.take(address, request, reply, monotonic())
            self.answers += 1
            self._troubles.pop("refused", None)
        except HubUnreachable:
            self._exchanges.failed(address)
        except HubRefused as error:
            self._exchanges.failed(address)
            self._troubles["refused"] = printable(str(error), 256)
        except ValueError as error:
            self._exchanges.failed(address)
            self._calls.say(f"{address}: {error}")
        except Exception:
            log.exception("exchange with %s failed", address)
        finally:
            self._calls.end(address, keep=address in self._live_addresses())

    def _live_addresses(self) -> list[str]:
        cards = self._known.live(monotonic()).items()
        return sorted(card.address for key, card in cards if card.address and key != self._known.own_key)

    def _last_peers(self) -> list[str]:
        path = self._plan.peers_file
        if path is None or not path.exists():
            return []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return [str(address) for address in content["peers"]][:MOST_HINTS]
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cannot read the last known peers in %s: %s", path, error)
            return []

    def _save(self, now: float) -> None:
        """Keep the addresses of the live peers; those of the last time while there is no other."""
        saved_s, before = self._saved
        path, live = self._plan.peers_file, self._live_addresses()
        if path and live and live != before and now - saved_s >= _SAVED_EVERY_S:
            write_atomically(path, json.dumps({"peers": live}, indent=1) + "\n")
            self._saved = now, live
