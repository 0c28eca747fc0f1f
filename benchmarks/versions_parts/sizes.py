"""Bytes of a policy version, by how many versions the receiver is behind."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aedit.proto.versions import Patterns, patch
from benchmarks.versions_parts.training import Trained

BEHIND = (1, 4, 16, 32)
"""Versions between the receiver's and the one that is sent."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Transfers of one run. By the number of versions behind: one figure for each pair of versions."""

    lr: float
    changed: Mapping[int, tuple[float, ...]]
    """Shares of elements that differ."""
    sent: Mapping[int, tuple[float, ...]]
    """Bytes sent, as a share of the values in bf16."""
    whole: float
    """The same without a base."""
    encode_s: float
    """Seconds to encode 100 million elements, one version apart."""
    decode_s: float


def measure(trained: Trained, most_pairs: int = 8) -> Sizes:
    """Encode and decode transfers between versions, at most so many pairs for each distance."""
    changed, sent = {}, {}
    encode_s, decode_s = [], []
    for apart in BEHIND:
        pairs = list(zip(trained.versions, trained.versions[apart:], strict=False))[-most_pairs:]
        if not pairs:
            continue
        made = [_transfer(base, head) for base, head in pairs]
        changed[apart] = tuple(float(np.mean(base != head)) for base, head in pairs)
        sent[apart] = tuple(each.share for each in made)
        if apart == BEHIND[0]:
            encode_s, decode_s = [each.encode_s for each in made], [each.decode_s for each in made]
    last = trained.versions[-1]
    whole = len(patch.encode_transfer(last)[0]) / last.nbytes
    return Sizes(trained.lr, changed, sent, whole, _median(encode_s), _median(decode_s))


@dataclass(frozen=True, slots=True)
class _Made:
    share: float
    encode_s: float
    decode_s: float


def _transfer(base: Patterns, head: Patterns) -> _Made:
    """Encode, decode and compare. Seconds are processor time for 100 million elements."""
    began_s = time.process_time()
    data, needs_base = patch.encode_transfer(head, base)
    encoded_s = time.process_time()
    out = np.empty_like(head)
    patch.decode_transfer(memoryview(data), base if needs_base else None, out)
    decoded_s = time.process_time()
    if not np.array_equal(out, head):
        raise RuntimeError("a transfer has not restored its version")
    scale = 1e8 / head.size
    return _Made(len(data) / head.nbytes, scale * (encoded_s - began_s), scale * (decoded_s - encoded_s))


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else float("nan")
