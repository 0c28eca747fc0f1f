"""Connections that cannot harm each other: limits on their number and on the time that they idle.

uvicorn closes a connection that idles after an answer, but neither one that never sends a whole header nor
one that does not read. Here each connection is looked at regularly.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from aedit.spec_rollout.service.http.limits import HttpLimits


def guarded_protocol(limits: HttpLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol class with these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})


class GuardedProtocol(H11Protocol):
    """A connection that is closed when it idles too long, or when many others need its place."""

    limits: HttpLimits
    _idle_since_s = 0.0
    _look: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return true if no request is being answered: its header is not complete, or its answer is."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: Any) -> None:
        """Take a connection; end the one that has idled longest if there are too many."""
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            others = [each for each in self.connections if isinstance(each, GuardedProtocol)]
            idle = [each for each in others if each.is_idle]  # this one is the newest
            min(idle, key=lambda each: each._idle_since_s).transport.abort()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to idle."""
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self.limits.idle_s / 2, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """Close a connection that idles too long; abort one that was closed and still does not read."""
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self.is_idle and self.loop.time() - self._idle_since_s >= self.limits.idle_s:
            self.transport.close()
        self._look_later()
