"""Limits of the streams and lines of a server."""

from dataclasses import dataclass

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Limits of the streams of trainers, and of their lines of policy versions."""

    streams: int = 64
    """Streams at a time, including those that have not sent Open."""
    streams_per_host: int = 48
    """Streams of one host at a time: none takes all places."""
    waiting: int = 1024
    """Samples of one stream beyond the rows of its engine."""
    lines: int = 4
    """Lines of trainers at a time. Each one takes memory for its engine and for its newest versions."""
    open_s: float = 10.0
    """Time until Open has come, and longest wait for another line that is being opened."""
    silent_s: float = 10.0
    """A stream from which nothing has come for so long is ended. Trainers send Beat every 2 s."""
    stall_s: float = 10.0
    """A trainer that has taken no message for so long is cut off."""
    unsent_bytes: int = 16 << 20
    """Memory for what waits to be sent to one trainer. Beyond it the trainer is cut off."""
    figures_s: float = 0.5
    """Interval of Figures."""
    version_s: float = 120.0
    """Longest wait of a sample for the policy version that it begins with."""
    line_idle_s: float = 120.0
    """A line that no stream uses is closed after so long, or when another one needs its place."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check(getattr(self, name) > 0, name, "must be above 0", getattr(self, name))
