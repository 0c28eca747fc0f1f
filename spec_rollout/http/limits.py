"""Limits of the HTTP servers."""

from dataclasses import dataclass, fields

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of requests and connections. A request beyond them is refused and harms no other."""

    max_body_bytes: int = 8 << 20
    max_buffered_bytes: int = 64 << 20
    """Upper limit of the bodies that are being read and parsed at the same time."""
    max_prompts: int = 128
    """Prompts of one request."""
    max_samples: int = 128
    """Samples of one request: prompts times `n`."""
    max_stop: int = 16
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_entries: int = 1 << 20
    """Log-probabilities of one answer: tokens that it may have, times the alternatives of each and one."""
    max_connections: int = 512
    """Connections at a time. A further one ends the one that has been idle for the longest time."""
    idle_s: float = 15.0
    """Time for the headers of a request, and between two requests of a connection."""
    body_s: float = 30.0
    """Time for the body of a request."""
    write_s: float = 30.0
    """Time in which a client must read a part of the answer."""
    request_s: float = 600.0
    """Time for a whole request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check(getattr(self, field.name) > 0, field.name, "must be above 0", getattr(self, field.name))
