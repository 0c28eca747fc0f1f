"""The interface of discovery: how peers of a run find each other's addresses."""

from collections.abc import Sequence
from typing import Protocol


class Discovery(Protocol):
    """Introduces peers to each other. What it finds are hints: gossip dials them, and believes answers only.

    One thread calls `announce` and `found`, about once a second each; any thread may read `state`. No method
    may block for longer than a few seconds, or raise for what the network or other peers do.
    """

    def announce(self, card: bytes) -> None:
        """Make this peer known; `card` is its encoded card, which changes now and then."""

    def found(self) -> Sequence[str | bytes]:
        """Return addresses (HOST:PORT) or encoded cards of peers, as far as they are known now."""

    @property
    def introduction(self) -> str:
        """Return what a further peer passes to `aedit join`; "" if that is this peer's HOST:PORT."""

    @property
    def state(self) -> str:
        """Return for people what is wrong, and since when; "" if nothing is."""

    def close(self) -> None:
        """End everything that was started. May be called more than once."""
