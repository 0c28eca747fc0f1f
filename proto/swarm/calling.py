"""Calls of Swarm/Exchange: open connections to live peers, and short ones to addresses that may be peers."""

import logging
import threading

from aedit.proto.rpc import Calls, ClientKeys, Rates
from aedit.proto.rpc import swarm_pb2 as pb

log = logging.getLogger(__name__)

_MOST_OPEN = 64
"""Connections that are kept between calls."""
_LINES_PER_S = 0.2


class PeerCalls:
    """At most `most` calls at a time, one per address, each with a deadline. Any thread may call."""

    def __init__(self, keys: ClientKeys, timeout_s: float, most: int) -> None:
        self._keys, self._timeout_s, self._most = keys, timeout_s, most
        self._lock = threading.Lock()
        self._open: dict[str, Calls] = {}
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
        with self._lock:
            calls = self._open.get(address)
            if calls is None:
                calls = Calls(
                    address,
                    self._keys,
                    call_timeout_s=self._timeout_s,
                    channels=0,
                    until_it_listens=False,  # the next round calls it again
                )
                self._open[address] = calls
        return calls.call("Swarm/Exchange", request, pb.ExchangeReply)

    def end(self, address: str, *, keep: bool) -> None:
        """Give a reserved address back; without `keep`, and if too many are open, end its connection."""
        with self._lock:
            self._busy.discard(address)
            is_kept = keep and len(self._open) <= _MOST_OPEN and not self._is_closed
            ended = None if is_kept else self._open.pop(address, None)
        if ended:
            ended.close()

    def say(self, text: str) -> None:
        """Log what a peer has done wrong, at a bounded rate."""
        if self._lines.allow(None):
            log.warning("%s", text)

    def close(self) -> None:
        """End all calls and connections; no call begins any more."""
        with self._lock:
            self._is_closed = True
            ended = list(self._open.values())
            self._open.clear()
        for calls in ended:
            calls.close()
