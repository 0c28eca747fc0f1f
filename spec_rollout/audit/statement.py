"""Signed statements of servers about their rollouts, so that a false one can be shown to others.

A server signs each finished rollout with an Ed25519 key of its own: key, prompt, sampling, tokens,
log-probabilities, policy versions. The receiver builds the same statement from what it has received, and the
signature fits only if both are equal.

The connection checks the form of everything that a server sends, collects its samples, and keeps them back
until they are released: a sample is delivered when it has passed the audit, or one that was selected while
it was kept back. When one fails, all samples of that server that were kept back are generated again
elsewhere, under the same keys. `Auditor` is the interface of the audit. Nothing here needs torch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aedit.proto.rpc import RolloutStatement, SigningKey, Span, is_signed_by

if TYPE_CHECKING:
    from aedit.spec_rollout.sampling import Rollout

PURPOSE = b"aedit rollout statement 1\n"
"""Precedes the signed bytes, so that a signature for another purpose is never taken for one of a rollout."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Names under which a server signs."""

    run: str
    line: str
    """Line of the policy versions."""
    server: str


def signature_of(statement: RolloutStatement, key: SigningKey) -> bytes:
    """Return the signature of a statement."""
    return key.private.sign(_signed_bytes(statement))


def is_signed(statement: RolloutStatement, signature: bytes, public_key: bytes) -> bool:
    """Return whether the owner of `public_key` has signed exactly this statement."""
    return is_signed_by(public_key, signature, _signed_bytes(statement))


def statement_of(origin: Origin, rollout: "Rollout", sampling: bytes, *, given: int = 0) -> RolloutStatement:
    """Return the statement about a finished rollout.

    Args:
        origin: Names of run, line and server.
        rollout: The whole answer, with the tokens that were given.
        sampling: `Add.sampling`, byte for byte.
        given: Number of first tokens that came with `Add`. The server answers for the later ones.
    """
    prompt = rollout.prompt
    return _statement(
        origin,
        (prompt.rollout, prompt.sample),
        prompt.tokens,
        sampling,
        rollout,
        rollout.finish_reason,
        given,
    )


def _statement(
    origin: Origin,
    key: tuple[int, int],
    prompt: Sequence[int],
    sampling: bytes,
    answer: "Rollout | HeldRollout",
    finish_reason: str,
    given: int,
) -> RolloutStatement:
    return RolloutStatement(
        run=origin.run,
        line=origin.line,
        server=origin.server,
        rollout=key[0],
        sample=key[1],
        prompt_sha256=_digest(prompt, "<u4"),
        sampling_sha256=hashlib.sha256(sampling).digest(),
        answer_sha256=_digest(answer.tokens, "<u4"),
        logprobs_sha256=_digest(answer.logprobs, "<f4"),
        spans=[
            Span(version=version, start=start, end=end) for version, start, end in spans_of(answer.versions)
        ],
        finish_reason=finish_reason,
        given=given,
    )


def spans_of(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (version, start, end) of each run of equal versions, half-open."""
    spans, start = [], 0
    for version, tokens in groupby(versions):
        end = start + sum(1 for _ in tokens)
        spans.append((version, start, end))
        start = end
    return spans


def versions_of(spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the version of each token from spans that cover an answer.

    Raises:
        ValueError: They have a gap, overlap, or are empty.
    """
    versions: list[int] = []
    for version, start, end in spans:
        if start != len(versions) or end <= start:
            raise ValueError(f"span {start} to {end} of version {version} does not begin at {len(versions)}")
        versions += [version] * (end - start)
    return versions


def _digest(values: Sequence[int] | Sequence[float], dtype: str) -> bytes:
    return hashlib.sha256(np.asarray(values, dtype=dtype).tobytes()).digest()


def _signed_bytes(statement: RolloutStatement) -> bytes:
    return PURPOSE + statement.SerializeToString(deterministic=True)


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

    def statement_of(self, origin: Origin) -> RolloutStatement:
        """Return the statement that an honest server has signed about it under these names."""
        return _statement(origin, self.key, self.prompt, self.sampling, self, self.finish_reason, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """Result of the audit of one sample."""

    passed: bool
    reason: str = ""
    """Why it has not passed, in words."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Key, place, token, margin and versions, as values that JSON can hold."""
    is_final: bool = True
    """False: the sample cannot be judged, as weights of its versions are no longer here. It is no accusation,
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
