"""A rank's side of one worker: the messages to and from it, and the samples that it has.

Workers are processes of the rank, or rollout servers behind `RemoteWorkers`, which come, go and come back.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.reallocate import SampleKey
from aedit.spec_rollout.server import Channel, Message


class MessageEnd(Protocol):
    """One end of a connection, as `Channel` is."""

    @property
    def closed(self) -> bool:
        """Return whether the other end is gone."""

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message."""

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting."""


class Life(Protocol):
    """A process of this rank, or a connection to a server: while it lives, the worker does."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None if it is no process of this machine."""

    @property
    def name(self) -> str:
        """Return the worker's name in messages."""

    @property
    def is_dead(self) -> bool:
        """Return whether it has ended by itself."""

    def death(self) -> str:
        """Return why it is dead. Read all its messages first."""

    def end(self) -> None:
        """End it, whatever it does, and wait until it is gone.

        Raises:
            subprocess.TimeoutExpired: It is still there after a while.
        """


@dataclass(slots=True)
class WorkerHandle:
    """A worker that runs or starts."""

    index: int
    """Equal for all workers that follow each other in one place."""
    life: Life
    channel: MessageEnd
    rows: int
    """Samples that it decodes at a time."""
    room: int | None = None
    """Most samples that it takes; None: any number."""
    is_local: bool = True
    """It is a process of this rank, with the rank's weights as soon as they are published."""
    is_ready: bool = False
    """It has made its engine."""
    version: int = 0
    """Newest policy version that it has; counts for a worker that is not local."""
    ready_in_s: float = 0.0
    """Expected seconds until it has the newest version, while it does not."""
    quiet_s: float = 0.0
    """Seconds that the rank has waited since the last message."""
    samples: dict[SampleKey, None] = field(default_factory=dict)
    """Keys of the samples that it was given and has not finished, oldest first."""
    cancelled: Counter[SampleKey] = field(default_factory=Counter)
    """Cancellations by sample that the worker has not confirmed yet. Its messages about such a sample are
    older than the cancellation, and are ignored."""
    speed: EngineSpeed | None = None
    finished: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Last error that the worker has sent."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None for a server."""
        return self.life.pid

    @property
    def name(self) -> str:
        """Return the worker's name in messages."""
        return self.life.name

    @property
    def is_dead(self) -> bool:
        """Return whether it has ended or has closed its connection."""
        return self.channel.closed or self.life.is_dead

    def death(self) -> str:
        """Return why it is dead. Read all its messages first."""
        return f"{self.life.death()}{self.error and ': ' + self.error}"

    def delay_s(self, version: int) -> float:
        """Return the expected seconds until it can generate with this version."""
        return 0.0 if self.is_local or self.version >= version else self.ready_in_s

    def has(self, version: int) -> bool:
        """Return whether a sample for this version can be given to it."""
        return self.is_local or self.version >= version

    def receive(self) -> Sequence[Message]:
        """Return what has arrived; any message is a sign of life."""
        messages = self.channel.receive()
        if messages:
            self.quiet_s = 0.0
        return messages

    def cancel(self) -> None:
        """Take all samples away."""
        for key in self.samples:
            self.channel.send("remove", key=key, drop=True)
            self.cancelled[key] += 1
        self.samples.clear()

    def confirm_cancel(self, key: SampleKey) -> bool:
        """Note that the worker has removed a sample; return whether that is because it was cancelled."""
        if key not in self.cancelled:
            return False
        self.cancelled -= Counter([key])
        return True

    def read_figures(self, message: Message) -> None:
        """Keep the figures of a report."""
        self.figures = message["figures"]
        self.version = message["version"]
        self.ready_in_s = message.get("ready_in_s", 0.0)
        self.room = message.get("room")
        if message["speed"] is not None:
            self.speed = EngineSpeed(*message["speed"])
        elif not self.is_local:
            self.speed = None  # it was forgotten, so that the server is tried again


FIRST_INDEX = 1 << 16
"""Indices of remote workers begin here; those of a rank's own processes are below."""


class RemoteWorkers(Protocol):
    """Workers to which there is a connection, which is made again and again after each loss."""

    def look(self) -> Sequence[WorkerHandle]:
        """Read what has arrived, and return the workers that were connected to since the last call."""

    def channels(self) -> Sequence[Channel]:
        """Return the channels whose messages `look` reads."""

    def waited(self, passed_s: float) -> None:
        """Count a wait of the rank as silence of what it is connected through."""

    def publish(self, version: int) -> None:
        """Say that a policy version is in the shared memory."""

    def accuse(self, server: str, reason: str, evidence: Mapping[str, Any]) -> None:
        """Say that samples of a worker, by its name, are not those of the policy."""

    def status(self) -> Mapping[str, Any]:
        """Return the figures of all workers so far."""

    def close(self) -> None:
        """End all connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePolicy:
    """The policy as remote workers are told of it."""

    weights: Mapping[str, Any]
    """Description of the shared memory with its weights; see `SharedWeights.described`."""
    fd: int
    """File descriptor of this memory."""
    vocabulary: int
    max_tokens: int
    """Upper limit of prompt and answer of one sample, in tokens."""
    tokenizer: str
    """Directory of a saved tokenizer; empty: none."""


class RemoteStart(Protocol):
    """Settings of remote workers, which can be connected to."""

    def start(self, policy: RemotePolicy, report: Any) -> RemoteWorkers:
        """Begin to connect. report: takes an event and its fields."""
