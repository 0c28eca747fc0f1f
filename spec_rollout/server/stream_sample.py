"""One sample of a trainer's stream, as the host's thread sees it."""

from dataclasses import dataclass, field
from typing import Protocol

from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.server.outbox import SampleKey
from aedit.spec_rollout.server.tickets import Ticket


class SampleStream(Protocol):
    """Stream to which a sample belongs. Its methods return at once."""

    def take_tokens(self, sample: "StreamSample", rollout: Rollout, start: int) -> None:
        """Take the tokens of a sample from `start` on."""

    def take_end(self, sample: "StreamSample", rollout: Rollout) -> None:
        """Take the end of a sample."""

    def take_failure(self, sample: "StreamSample", error: Exception) -> None:
        """Take the reason for which a sample has no end."""


@dataclass(slots=True, eq=False)
class StreamSample:
    """A sample and its place in its stream; a `Receiver` of the host."""

    stream: SampleStream = field(repr=False)
    key: SampleKey
    sampling: bytes
    """As the trainer has sent it: a part of the signed statement."""
    num_given: int
    """First tokens of the answer that came with the request."""
    min_version: int
    added_s: float
    ticket: Ticket | None = None
    is_removed: bool = False
    """The trainer has taken it back."""
    late: str = ""
    """Why it was given up before its first token."""

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Pass on new tokens."""
        self.stream.take_tokens(self, rollout, start)

    def ended(self, rollout: Rollout) -> None:
        """Pass on the end."""
        self.stream.take_end(self, rollout)

    def failed(self, error: Exception) -> None:
        """Pass on the failure."""
        self.stream.take_failure(self, error)
