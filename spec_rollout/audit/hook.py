"""Interface between the connection to rollout servers and the audit of what they send. Imports no torch.

The connection checks the form of everything that a server sends, collects its samples, and keeps them back
until they are released: a sample is delivered when it has passed the audit, or one that was selected while
it was kept back. When one fails, all samples of that server that were kept back are generated again
elsewhere, under the same keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRollout:
    """A sample as a server has generated it: ended, or taken from the server before its end.

    Its form is right: tokens in the vocabulary, finite log-probabilities, versions that the server was
    offered, an end that fits the tokens, a signature that fits the server's key.
    """

    server: str
    """Name of the server."""
    public_key: bytes
    key: tuple[int, int]
    """Rollout and sample: the key of its noise."""
    prompt: tuple[int, ...]
    sampling: bytes
    """As `sample_text.py` writes it, in JSON."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version of each token."""
    start: int
    """Tokens from here on are the server's; those before were given to it."""
    finish_reason: str
    """Empty: it had not ended."""
    statement: bytes = b""
    """`RolloutStatement` that the server has signed, serialized; empty if it had not ended."""
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """Result of the audit of one sample."""

    passed: bool
    reason: str = ""
    """Why it has not passed, in words."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Key, place, token, margin and versions, as values that JSON can hold."""
    is_final: bool = True
    """False: the sample cannot be judged, as weights of its versions are no longer here. It accuses nobody,
    is generated again elsewhere, and another one is selected."""


class Auditor(Protocol):
    """Checks samples of rollout servers against the policy. One thread of its own calls all methods."""

    def publish(self, version: int, read: "WeightReader") -> None:
        """Note a new policy version; `read` copies its tensors. Versions grow."""

    def can_judge(self, held: HeldRollout) -> bool:
        """Return whether the policy versions of a sample are here. Samples of others are never released."""

    def select(self, server: str, held: Sequence[HeldRollout], *, draining: bool) -> int | None:
        """Return the place in `held` of the sample to audit now; None for none yet.

        Args:
            server: Name of the server.
            held: Its samples that are kept back, oldest first. If the selected one passes, all of these are
                released: so the place in the list tells a server nothing about which one is checked. All can
                be judged. Called when one was added, and when `draining` becomes true.
            draining: Nothing else is under way at this server, or samples have been kept back for long:
                without an audit now they would wait for ever.
        """

    def check(self, held: HeldRollout) -> AuditVerdict:
        """Recompute a sample under the policy."""

    def accuse(self, server: str) -> None:
        """Note a failure that was found elsewhere."""

    def close(self) -> None:
        """Free what it holds."""


class WeightReader(Protocol):
    """Reads a published policy version."""

    def __call__(self) -> Mapping[str, Any] | None:
        """Return the tensors by name as bit patterns: NumPy arrays of uint16 (bfloat16), uint32 or uint64.

        None if the version is no longer here.
        """


def try_auditor(auditor: Any) -> None:
    """Ask an auditor whether it can judge a sample of a version that it was not given.

    Raises ValueError if a method is missing, or if it does not return a bool. Errors of its own pass.
    """
    for method in ("publish", "can_judge", "select", "check", "accuse", "close"):
        if not callable(getattr(auditor, method, None)):
            raise ValueError(f"returned {type(auditor).__name__} without a method {method}, expected Auditor")
    sample = HeldRollout(
        server="trial",
        public_key=b"",
        key=(0, 0),
        prompt=(0,),
        sampling=b"{}",
        tokens=(0,),
        logprobs=(-1.0,),
        versions=(2**31 - 1,),
        start=0,
        finish_reason="length",
    )
    if type(answer := auditor.can_judge(sample)) is not bool:
        raise ValueError(f"can_judge returned {answer!r}, expected a bool")
