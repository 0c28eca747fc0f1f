"""Waits of a node for other nodes: named, with a deadline, and with idle work meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from aedit.edit.shards import Shards
from aedit.proto.transports import PeersMissing, Pending
from aedit.types import IdleWork

if TYPE_CHECKING:
    from aedit.edit.rounds import OpenRound

T = TypeVar("T")

POLL_S = 0.0005
"""Pause between two looks at a wait that may be interrupted."""

FREE_POLL_S = 0.005
"""The same for what a hub may take minutes to answer."""


class Help(Protocol):
    """Work of a node for others."""

    @property
    def is_helper(self) -> bool:
        """Return whether there may be some."""

    @property
    def has_work(self) -> bool:
        """Return whether there is some."""

    def work(self) -> bool:
        """Do a short piece of it; return whether there was any."""


class WorkInPieces(Protocol):
    """Work of the waiting thread itself, which looks for its answer after each piece."""

    @property
    def used_s(self) -> float:
        """Return the seconds of all pieces so far."""

    def piece(self, waited_s: float) -> bool:
        """Do a piece, or pause for a moment, in a wait that has lasted `waited_s`; return false without work.

        It must not change the model, and may not assume that the other ranks of the node wait.
        """


class Waiter:
    """A node that sometimes waits. What is public here may be replaced at any time."""

    def __init__(self, shards: Shards, timeout_s: float) -> None:
        self.shards, self.timeout_s = shards, timeout_s
        self._idle: IdleWork | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.while_waiting: Callable[[int], None] | None = None
        """Asked again and again with the `position` that all nodes must reach for a wait to end; may
        raise. With an asynchronous exchange all ranks of the node ask together: it may hold a collective."""
        self.help: Help | None = None
        """Work for nodes that this one waits for; idle work stands still meanwhile."""
        self.pieces: WorkInPieces | None = None
        """Work of this thread while it waits, besides `idle`."""
        self.waited_s = 0.0
        """Time spent waiting for other nodes."""
        self._used_before_s = 0.0  # by idle work that is attached no longer, less what `idle` had used before

    @property
    def idle(self) -> IdleWork | None:
        """Return the work that runs while the node waits."""
        return self._idle

    @idle.setter
    def idle(self, work: IdleWork | None) -> None:
        old_s, new_s = (each.used_s if each else 0.0 for each in (self._idle, work))
        self._used_before_s += old_s - new_s
        self._idle = work

    @property
    def idle_used_s(self) -> float:
        """Return the processor time in seconds that idle work has used while it was attached.

        The work itself reports it. Part of it may come from other waits of the node than those for rounds.
        """
        in_pieces_s = self.pieces.used_s if self.pieces else 0.0
        return self._used_before_s + in_pieces_s + (self._idle.used_s if self._idle else 0.0)

    def wait(self, pending: Pending[T], opened: "OpenRound | None" = None, needed: int | None = None) -> T:
        """Return the answer, on this rank as soon as it is there.

        needed: the position that other nodes must reach for it; None: they have reached it already.
        """
        ask = self.while_waiting if needed is not None else None
        helper = self.help if self.help is not None and self.help.is_helper else None
        while not pending.done():
            if helper is not None and helper.work():
                continue
            with self._waiting("round", opened):
                began_s = time.monotonic()
                while not pending.done() and (helper is None or not helper.has_work):
                    if ask is not None and needed is not None:
                        ask(needed)
                    if self._does_piece(began_s):
                        continue
                    if ask is None and helper is None:
                        return pending.result()
                    time.sleep(POLL_S)
        return pending.result()

    def wait_together(
        self, pending: Pending[T], what: str, *, opened: "OpenRound | None" = None, position: int = 0
    ) -> T:
        """Return a hub's answer, on all ranks of the node at one time.

        So an interruption of the wait reaches all of them. Raises `PeersMissing`, naming `what`, after
        `timeout_s`.
        """
        if self.shards.all([pending.done()])[0]:
            return pending.result()
        give_up_at = self.clock() + self.timeout_s
        with self._waiting("hub", opened):
            began_s = time.monotonic()
            while True:
                here, in_time = self.shards.all([pending.done(), self.clock() < give_up_at])
                if here:
                    return pending.result()
                if not in_time:
                    raise PeersMissing(f"{what} did not come within {self.timeout_s:g} s")
                if self.while_waiting is not None:
                    self.while_waiting(position)
                if not self._does_piece(began_s):
                    time.sleep(FREE_POLL_S)

    def _does_piece(self, began_s: float) -> bool:
        """Return whether `pieces` has work in a wait since `began_s`, after a piece of it."""
        return self.pieces is not None and self.pieces.piece(time.monotonic() - began_s)

    @contextmanager
    def _waiting(self, cause: str, opened: "OpenRound | None") -> Iterator[None]:
        """Open a window for idle work, and count the time waited."""
        window: AbstractContextManager[None] = self.idle.window(cause) if self.idle else nullcontext()
        began = self.clock()
        with window:
            yield
        waited_s = self.clock() - began
        self.waited_s += waited_s
        if opened is not None:
            opened.waited_s += waited_s
