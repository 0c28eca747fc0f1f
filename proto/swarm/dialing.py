"""Addresses of peers that may be there, when to call each of them next, and the calls themselves."""

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from aedit.proto.rpc import Calls, ClientKeys, ClientPool, Rates
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.system import growing_pause_s
from aedit.types import address_fault

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_PATIENT_PAUSE_S, _PATIENT_CALLS = 4.0, 20
"""Longest pause of an address that has answered before, for so many calls that fail. A cut or a restart is
over by then, and a part may stand still until the peer counts again."""
_MOST_FAILURES = 8
"""A hint that never led to a peer is dropped after so many calls."""


class Evidence(IntEnum):
    """Evidence that a peer is at an address. One with more is never displaced by one with less."""

    HINT = 0
    """A peer or discovery has named it."""
    CALLED = 1
    """A peer that has called here has it on its card."""
    ANSWERED = 2
    """A peer with this address on its card has answered there."""


@dataclass(slots=True)
class _Target:
    evidence: Evidence
    due_s: float
    failures: int = 0


class DialList:
    """At most `limit` addresses, with growing pauses between calls that fail. For one thread at a time.

    Any caller can fill it with hints that lead nowhere. These cost the calls that `due` allows, and displace
    no address that has answered before; among hints, those that were never tried come first, in random order.
    """

    def __init__(self, limit: int, chance: random.Random) -> None:
        self._limit, self._chance = limit, chance
        self._targets: OrderedDict[str, _Target] = OrderedDict()

    def add(self, address: str, evidence: Evidence, now: float) -> None:
        """Remember an address, or improve its evidence; ignore what is no address.

        One that has answered before and calls here is there: it is due at once.
        """
        known = self._targets.get(address)
        if known is not None:
            if evidence > known.evidence:
                known.evidence, known.due_s, known.failures = evidence, now, 0
            elif evidence is Evidence.CALLED and known.evidence is Evidence.ANSWERED and known.failures:
                known.due_s = min(known.due_s, now)
        elif not address_fault(address) and self._has_room(evidence):
            self._targets[address] = _Target(evidence, now)

    def due(self, now: float, count: int, skip: Collection[str] = ()) -> list[str]:
        """Return at most `count` addresses to call now, without those in `skip`. They are due again later."""
        waiting = [
            (address, target)
            for address, target in self._targets.items()
            if target.due_s <= now and address not in skip
        ]
        self._chance.shuffle(waiting)
        # Half of the calls are for addresses that have answered, so that neither kind waits for the other.
        waiting.sort(key=lambda each: (each[1].failures, -each[1].evidence))
        good = [address for address, target in waiting if target.evidence is Evidence.ANSWERED]
        rest = [address for address, target in waiting if target.evidence is not Evidence.ANSWERED]
        num_good = max(count - count // 2, count - len(rest))
        found = (good[:num_good] + rest)[:count]
        for address in found:
            target = self._targets[address]
            is_patient = target.evidence is Evidence.ANSWERED and target.failures < _PATIENT_CALLS
            most_s = _PATIENT_PAUSE_S if is_patient else _LONGEST_PAUSE_S
            longest_s = growing_pause_s(target.failures, _FIRST_PAUSE_S, most_s)
            target.failures = min(target.failures + 1, _PATIENT_CALLS)
            target.due_s = now + longest_s * (0.5 + self._chance.random() / 2)
        return found

    def answered(self, address: str, now: float) -> None:
        """Note that a peer with this address on its card has answered there."""
        self.add(address, Evidence.ANSWERED, now)
        if address in self._targets:
            target = self._targets[address]
            target.failures, target.due_s = 0, now + _FIRST_PAUSE_S

    def failed(self, address: str) -> None:
        """Note that no peer of the run has answered there; `due` has put off the next call."""
        target = self._targets.get(address)
        if target and target.evidence is not Evidence.ANSWERED and target.failures >= _MOST_FAILURES:
            del self._targets[address]

    def drop(self, address: str) -> None:
        """Forget an address."""
        self._targets.pop(address, None)

    def __len__(self) -> int:
        """Return the number of addresses."""
        return len(self._targets)

    def _has_room(self, evidence: Evidence) -> bool:
        """Return whether there is room; make some if an address with less evidence can go."""
        if len(self._targets) < self._limit:
            return True
        worst = min(self._targets.items(), key=lambda item: (item[1].evidence, -item[1].failures))
        if worst[1].evidence > evidence or (worst[1].evidence == evidence and worst[1].failures == 0):
            return False
        del self._targets[worst[0]]
        return True


log = logging.getLogger(__name__)

_MOST_OPEN = 64
"""Connections that are kept between calls."""
_LINES_PER_S = 0.2


class PeerCalls:
    """At most `most` calls at a time, one per address, each with a deadline. Any thread may call."""

    def __init__(self, keys: ClientKeys, timeout_s: float, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._pool = ClientPool(
            lambda address: Calls(
                address,
                keys,
                call_timeout_s=timeout_s,
                channels=0,
                until_it_listens=False,  # the next round calls it again
            )
        )
        self._busy: set[str] = set()
        self._is_closed = False
        self._lines = Rates(_LINES_PER_S)

    @property
    def room(self) -> int:
        """Return how many more calls may begin."""
        with self._lock:
            return self._most - len(self._busy)

    def begin(self, address: str) -> bool:
        """Reserve a call to an address; return False if there is one already, or no room."""
        with self._lock:
            if self._is_closed or address in self._busy or len(self._busy) >= self._most:
                return False
            self._busy.add(address)
            return True

    def call(self, address: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """Return the answer of an address that is reserved. Raises HubUnreachable and HubRefused."""
        return self._pool.get(address).call("Swarm/Exchange", request, pb.ExchangeReply)

    def end(self, address: str, *, keep: bool) -> None:
        """Give a reserved address back; without `keep`, and if too many are open, end its connection."""
        if not keep or self._is_closed or len(self._pool) > _MOST_OPEN:
            self._pool.drop(address)
        with self._lock:
            self._busy.discard(address)

    def say(self, text: str) -> None:
        """Log what a peer has done wrong, at a bounded rate."""
        if self._lines.allow(None):
            log.warning("%s", text)

    def close(self) -> None:
        """End all calls and connections; no call begins any more."""
        with self._lock:
            self._is_closed = True
        self._pool.close()
