"""Signed statements of servers about their rollouts, so that a false one can be shown to others.

A server signs each finished rollout with an Ed25519 key of its own: key, prompt, sampling, tokens,
log-probabilities, policy versions. The receiver builds the same statement from what it has received, and the
signature fits only if both are equal. Nothing here needs torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

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
    return RolloutStatement(
        run=origin.run,
        line=origin.line,
        server=origin.server,
        rollout=prompt.rollout,
        sample=prompt.sample,
        prompt_sha256=_digest(prompt.tokens, "<u4"),
        sampling_sha256=hashlib.sha256(sampling).digest(),
        answer_sha256=_digest(rollout.tokens, "<u4"),
        logprobs_sha256=_digest(rollout.logprobs, "<f4"),
        spans=[
            Span(version=version, start=start, end=end) for version, start, end in spans_of(rollout.versions)
        ],
        finish_reason=rollout.finish_reason,
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
