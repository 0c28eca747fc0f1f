"""Interface of workers that are not processes of their rank: servers, which come, go and come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aedit.spec_rollout.workers.channel import Channel
from aedit.spec_rollout.workers.handle import WorkerHandle

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
