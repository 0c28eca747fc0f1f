"""Messages between the ranks of a pool of rollouts, and the weights in them.

Messages pass through `RankChannel`: a header, text as JSON, weights as raw memory. Nothing is pickled.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from aedit.spec_rollout.remote.rank_transfer import MAGIC, MAX_TEXT_BYTES, RankChannel

HELPS, ASK, ANSWER, GIVE, DONE, TAKE_BACK, GIVE_BACK, BYE = range(8)
"""Kinds of messages. HELPS: the sender is a helper, or not. ASK: for ANSWER. GIVE: samples, and weights where
the helper has others. DONE: finished samples. TAKE_BACK: the samples are not needed. GIVE_BACK: the helper
will not finish them."""
HEADER_WORDS = 5
"""int64: MAGIC, kind, number, bytes of text, bytes of weights."""
SEND_WITHIN_S = 30.0
LISTEN_S = 1e6
"""Limit of the wait for the next message: no limit in practice, as the group breaks with a lost rank."""
CLOSE_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two ranks."""

    kind: int
    number: int = 0
    """Number of the batch of samples that it is about, by the node that asks."""
    text: Any = None
    weights: Tensor | None = None
    """Bytes."""


class PoolLinks:
    """Threads that send and receive the messages of one rank. All ranks of `group` make it together."""

    def __init__(self, group: ProcessGroup, receive: Callable[[int, Message], None]) -> None:
        """Start the threads.

        Args:
            group: Process group of the pool alone, whose backend supports CPU tensors (gloo).
            receive: Called by a thread with the rank and its message.
        """
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.error = ""
        """What broke the group; empty while it works."""
        self.sent = self.bytes_sent = 0
        self._group, self._receive = group, receive
        self._closes = False
        self._left: set[int] = set()
        """Ranks that have said good-bye."""
        self._outbox: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.threads = [threading.Thread(target=self._send_all, daemon=True)]
        self.threads += [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self.peers
        ]
        for thread in self.threads:
            thread.start()

    def send(self, rank: int, message: Message) -> None:
        """Send a message as soon as possible, unless the rank has left; return at once."""
        if not self.error and (rank not in self._left or message.kind == BYE):
            self._outbox.put((rank, message))

    def close(self) -> None:
        """Say good-bye, wait a moment for that of the others, and end the threads."""
        self._closes = True
        for peer in self.peers:
            self.send(peer, Message(BYE))
        self._outbox.put(None)
        until = time.monotonic() + CLOSE_WITHIN_S
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self.threads):
            with suppress(ConnectionError):  # Gloo ends all waits of a group after one of them has timed out
                RankChannel.to(self.peers[0], self._group, 0.001).receive(torch.zeros(1), "a good-bye")

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                self._send(*item)
            except (OSError, RuntimeError) as error:
                self._fail(error)
                return

    def _send(self, rank: int, message: Message) -> None:
        channel = RankChannel.to(rank, self._group, SEND_WITHIN_S)
        text = json.dumps(message.text).encode()
        num_bytes = 0 if message.weights is None else message.weights.numel()
        channel.send(torch.tensor([MAGIC, message.kind, message.number, len(text), num_bytes]), "header")
        channel.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), "text")
        if message.weights is not None:
            channel.send(message.weights, "weights")
        self.sent, self.bytes_sent = self.sent + 1, self.bytes_sent + len(text) + num_bytes

    def _listen(self, peer: int) -> None:
        """Receive the messages of a rank until it says good-bye or the group breaks."""
        try:
            while True:
                header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
                RankChannel.to(peer, self._group, LISTEN_S).receive(header, "header")
                magic, kind, number, num_text, num_bytes = header.tolist()
                if magic != MAGIC or not 0 < num_text <= MAX_TEXT_BYTES or num_bytes < 0:
                    raise ConnectionError(f"rank {peer} sent something that is no message of the pool")
                channel = RankChannel.to(peer, self._group, SEND_WITHIN_S)
                text = channel.receive(torch.zeros(num_text, dtype=torch.uint8), "text")
                weights = None
                if num_bytes:
                    weights = channel.receive(torch.empty(num_bytes, dtype=torch.uint8), "weights")
                if kind == BYE:
                    self._left.add(peer)
                self._receive(peer, Message(kind, number, json.loads(text.numpy().tobytes()), weights))
                if kind == BYE:
                    return
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(error)
            self._receive(peer, Message(BYE))

    def _fail(self, error: Exception) -> None:
        """Send nothing any more; print the first error, unless the links end."""
        if not self.error and not self._closes:
            print(
                f"aedit: rl.pool is off until the next start, nodes generate their own rollouts: {error}",
                file=sys.stderr,
                flush=True,
            )
        self.error = self.error or str(error)


def weights_bytes(model: nn.Module) -> Tensor:
    """Return the values of all parameters and buffers as one vector of bytes on the CPU, tied ones once."""
    return torch.cat([part.detach().reshape(-1).view(torch.uint8).cpu() for part in _parts(model)])


def write_weights(model: nn.Module, values: Tensor) -> None:
    """Write what `weights_bytes` of an equal model returned into the parameters and buffers of `model`.

    Raises:
        ValueError: The number of bytes is that of another model. Nothing has changed.
    """
    parts = [part.detach() for part in _parts(model)]
    sizes = [part.numel() * part.element_size() for part in parts]
    if sum(sizes) != values.numel():
        raise ValueError(f"weights of {values.numel()} bytes: expected the {sum(sizes)} of this policy")
    for part, new in zip(parts, torch.split(values, sizes), strict=True):
        aligned = torch.empty(part.numel(), dtype=part.dtype)
        aligned.view(torch.uint8).copy_(new)
        part.copy_(aligned.view(part.shape))


def _parts(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
