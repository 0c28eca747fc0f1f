"""Signed statements of servers about their rollouts, so that a false one can be shown to others.

A server signs each finished rollout with an Ed25519 key of its own: key, prompt, sampling, tokens,
log-probabilities, policy versions. The receiver builds the same statement from what it has received, and the
signature fits only if both are equal. Nothing here needs torch.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from aedit.proto.wire.rollouts_pb2 import RolloutStatement, Span

if TYPE_CHECKING:
    from aedit.spec_rollout.sampling.samples import Rollout

PURPOSE = b"aedit rollout statement 1\n"
"""Precedes the signed bytes, so that a signature for another purpose is never taken for one of a rollout."""
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """Names under which a server signs."""

    run: str
    line: str
    """Line of the policy versions."""
    server: str


class SigningKey:
    """Ed25519 key of a server."""

    def __init__(self, private: bytes | None = None) -> None:
        """Use the 32 private bytes; None draws a new key.

        Raises:
            ValueError: There are more or fewer bytes.
        """
        if private is None:
            self._key = Ed25519PrivateKey.generate()
            return
        if len(private) != KEY_BYTES:
            raise ValueError(f"a private key has {KEY_BYTES} bytes, got {len(private)}")
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    @classmethod
    def kept(cls, path: Path) -> "SigningKey":
        """Return the key in a file; make the file, readable by its owner only, if there is none.

        Raises:
            ValueError: The file does not contain a key.
            OSError: It cannot be read or written.
        """
        if not path.exists():
            _create(path, cls()._key.private_bytes_raw())
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}; delete it for a new key") from None

    @property
    def public(self) -> bytes:
        """Return the 32 public bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> Ed25519PrivateKey:
        """Return the key itself, with which the server also signs its card in the hub's directory."""
        return self._key

    def sign(self, statement: RolloutStatement) -> bytes:
        """Return the signature of a statement."""
        return self._key.sign(_signed_bytes(statement))


def is_signed(statement: RolloutStatement, signature: bytes, public_key: bytes) -> bool:
    """Return whether the owner of `public_key` has signed exactly this statement."""
    if len(public_key) != KEY_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed_bytes(statement))
    except InvalidSignature:
        return False
    return True


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


def _create(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole; keep the file of another process that was faster."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)


def _digest(values: Sequence[int] | Sequence[float], dtype: str) -> bytes:
    return hashlib.sha256(np.asarray(values, dtype=dtype).tobytes()).digest()


def _signed_bytes(statement: RolloutStatement) -> bytes:
    return PURPOSE + statement.SerializeToString(deterministic=True)
