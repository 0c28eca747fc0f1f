"""Keys of the noise of a request's samples, so that a repeated request gets the same tokens."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence

import numpy as np

Key = tuple[int, int]
"""(rollout, sample) of a `Prompt`."""


def noise_keys(prompts: Sequence[Sequence[int]], n: int, *, seed: int | None, request_id: str) -> list[Key]:
    """Return a key for each sample, those of the first prompt first.

    With a seed, the keys depend on seed and prompt only: the same prompt in another request gets the same
    tokens. Without one they depend on the request id. Without that they are random. The samples of a request
    have different keys, also those of equal prompts.

    Args:
        prompts: Token ids.
        n: Samples of each prompt.
        seed: The seed of the request.
        request_id: Name of the request, which is the same when it is repeated; empty: none.
    """
    if seed is None:
        rollout = _hash(b"request", request_id.encode()) if request_id else secrets.randbits(63)
        return [(rollout, sample) for sample in range(len(prompts) * n)]
    seen = Counter[int]()
    keys = []
    for tokens in prompts:
        rollout = _hash(b"seed", str(seed).encode(), np.asarray(tokens, "<i8").tobytes())
        keys += [(rollout, seen[rollout] * n + sample) for sample in range(n)]
        seen[rollout] += 1
    return keys


def _hash(*parts: bytes) -> int:
    """Return 64 bits, as a signed number, that depend on all parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little", signed=True)
