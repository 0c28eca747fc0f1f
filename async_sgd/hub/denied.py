"""A request that the hub refuses."""

from typing import Literal


class Denied(Exception):
    """A request that the hub refuses; says what the peer is told."""

    def __init__(
        self,
        kind: Literal["unknown", "replaced", "excluded", "full", "different", "taken", "foreign"],
        reason: str,
    ) -> None:
        """Create a refusal.

        kind: join again; end; end; come again later; can never succeed; somebody else has it until later; it
        belongs to somebody else.
        """
        super().__init__(reason)
        self.kind, self.reason = kind, reason
