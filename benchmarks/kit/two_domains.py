"""Two kinds of text that every Python has: the standard library's source, and its documentation topics."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aedit.launch.config import DataConfig
from aedit.launch.data import Document, SampleOrder, batch, documents, evaluation_indices, is_held_out
from aedit.launch.node import loss

HELD_OUT = 0.05
Rows = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Domain:
    """Samples of seq_len + 1 bytes. Training and held-out samples share no document."""

    train: Rows
    held_out: Rows


@cache
def domains(seq_len: int) -> tuple[Domain, Domain]:
    """Return the domains: source, then topics."""
    texts = list(documents(DataConfig(seq_len=seq_len)))
    topics = [document for document in texts if document.key.startswith("topics/")]
    sources = [document for document in texts if not document.key.startswith("topics/")]
    return _packed(sources, seq_len), _packed(topics, seq_len)


def _packed(texts: Sequence[Document], seq_len: int) -> Domain:
    sides = [[d for d in texts if is_held_out(d, HELD_OUT) == held_out] for held_out in (False, True)]
    return Domain(*(_rows("\0".join(d.text for d in side).encode(), seq_len + 1) for side in sides))


def _rows(text: bytes, width: int) -> Rows:
    return np.frombuffer(text, np.uint8)[: len(text) // width * width].reshape(-1, width)


class Shard:
    """Data of one node of `nodes`: the same of both domains, or only of one."""

    def __init__(self, seq_len: int, seed: int, node: int, nodes: int, *, mixed: bool) -> None:
        parts = domains(seq_len) if mixed else (domains(seq_len)[node % 2],)
        self._parts = [(part.train, SampleOrder(len(part.train), seed, node, nodes)) for part in parts]

    def take(self, k: int) -> Tensor:
        """Return k samples."""
        share = k // len(self._parts)
        return torch.cat([batch(rows, order.take(share)) for rows, order in self._parts])


@torch.no_grad()
def held_out_loss(model: nn.Module, seq_len: int, num_samples: int) -> float:
    """Return the nats per byte, mean over both domains' held-out texts.

    At most `num_samples` samples of each are used.
    """
    means = []
    for part in domains(seq_len):
        indices = evaluation_indices(len(part.held_out), num_samples)
        parts = [indices[i : i + 64] for i in range(0, len(indices), 64)]
        sums = [float(loss(model, batch(part.held_out, at), "fp32")) * len(at) for at in parts]
        means.append(sum(sums) / len(indices))
    return sum(means) / len(means)
