"""Transfer of samples between ranks of a process group, with their keys and values.

Both ranks take part: one calls `send_sample`, the other `receive_sample`. Text and settings are sent as JSON,
keys and values as raw memory, and only if the receiver can use them: same policy version, shape and dtype.
Nothing is pickled. Tensors pass through the CPU, and the group's backend must support CPU tensors (gloo).

The sender keeps the sample until the receiver has confirmed it. If the confirmation does not arrive, both
have the sample and both may continue it: with coupled sampling they get the same tokens, so either result is
valid.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKV, decode_prompt, encode_prompt

TIMEOUT_S = 10.0
MAX_TEXT_BYTES = 64 << 20
MAGIC = 0xAED17
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
REFUSED, ACCEPTED, SEND_KV = range(3)
HEADER_WORDS = 9
"""int64: MAGIC, bytes of text, version, dtype, and the five sizes of keys and values, 0 if there are none."""


@dataclass(frozen=True, slots=True)
class RankChannel:
    """Point-to-point communication with a rank, until a deadline."""

    rank: int
    """Rank in the group."""
    group: ProcessGroup | None
    deadline: float
    """On the monotonic clock."""

    @classmethod
    def to(cls, rank: int, group: ProcessGroup | None, timeout_s: float) -> "RankChannel":
        """Return a channel to `rank` that times out after `timeout_s` seconds."""
        return cls(rank, group, time.monotonic() + timeout_s)

    def send(self, tensor: Tensor, what: str) -> None:
        """Send a tensor; `what` names it in errors."""
        begin = partial(dist.isend, tensor, group=self.group, group_dst=self.rank)
        self._wait(begin, f"{what} to rank {self.rank}")

    def receive(self, tensor: Tensor, what: str) -> Tensor:
        """Receive into a tensor and return it; `what` names it in errors."""
        begin = partial(dist.irecv, tensor, group=self.group, group_src=self.rank)
        self._wait(begin, f"{what} from rank {self.rank}")
        return tensor

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        """Wait for the operation. The group reports a lost peer or a timeout as RuntimeError."""
        left_s = max(0.001, self.deadline - time.monotonic())
        try:
            begin().wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise ConnectionError(f"{what}: {str(error).splitlines()[0]}") from error


def send_sample(
    prompt: Prompt, rank: int, *, group: ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
) -> bool:
    """Send a sample that was removed from an engine to a rank that calls `receive_sample`.

    Args:
        prompt: Result of `Engine.remove`.
        rank: Receiving rank.
        group: Process group; None is the default group.
        timeout_s: Limit of the whole transfer.

    Returns:
        True if the receiver has the sample; false if its engine cannot serve it.

    Raises:
        OSError: The receiver is lost or the time is over. The sample is still here.
        ValueError: The sample has a constraint, which is an object of this process. Nothing was sent.
    """
    channel, kv = RankChannel.to(rank, group, timeout_s), prompt.partial.kv if prompt.partial else None
    text = torch.frombuffer(bytearray(encode_prompt(prompt)), dtype=torch.uint8)
    channel.send(_header(len(text), kv), "header of a sample")
    channel.send(text, "text of a sample")
    answer = int(channel.receive(torch.zeros(1, dtype=torch.int64), "answer")[0])
    if answer == SEND_KV:
        assert kv is not None
        channel.send(kv.kv.cpu().contiguous(), "keys and values")
        answer = int(channel.receive(torch.zeros(1, dtype=torch.int64), "answer")[0])
    return answer == ACCEPTED


def receive_sample(
    engine: Engine, rank: int, *, group: ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
) -> Rollout | None:
    """Receive a sample and add it to the engine.

    Args:
        engine: Engine that continues the sample.
        rank: Sending rank.
        group: Process group; None is the default group.
        timeout_s: Limit of the whole transfer.

    Returns:
        The rollout, or None if the engine cannot serve it.

    Raises:
        OSError: Nothing valid has arrived in time.
    """
    channel = RankChannel.to(rank, group, timeout_s)
    magic, num_bytes, version, *kv_header = channel.receive(
        torch.zeros(HEADER_WORDS, dtype=torch.int64), "header"
    ).tolist()
    if magic != MAGIC or not 0 < num_bytes <= MAX_TEXT_BYTES:
        raise ConnectionError(f"rank {rank} sent something that is not a sample: is it calling send_sample?")
    text = channel.receive(torch.zeros(num_bytes, dtype=torch.uint8), "text of a sample")
    prompt = decode_prompt(text.numpy().tobytes())
    if _is_compatible(engine, prompt, version, kv_header):
        channel.send(torch.tensor([SEND_KV]), "answer")
        kv = channel.receive(torch.zeros(kv_header[1:], dtype=DTYPES[kv_header[0]]), "keys and values")
        assert prompt.partial is not None
        prompt = replace(prompt, partial=replace(prompt.partial, kv=SampleKV(kv, version)))
    try:
        rollout = engine.add(prompt)
    except ValueError:
        channel.send(torch.tensor([REFUSED]), "answer")
        return None
    channel.send(torch.tensor([ACCEPTED]), "answer")
    return rollout


def _header(num_bytes: int, kv: SampleKV | None) -> Tensor:
    if kv is None or kv.kv.dtype not in DTYPES:
        return torch.tensor([MAGIC, num_bytes, -1, 0, 0, 0, 0, 0, 0])
    return torch.tensor([MAGIC, num_bytes, kv.version, DTYPES.index(kv.kv.dtype), *kv.kv.shape])


def _is_compatible(engine: Engine, prompt: Prompt, version: int, kv_header: list[int]) -> bool:
    """Return true if keys and values with this header fit the engine's policy and the tokens."""
    dtype, *sizes = kv_header
    num_begun = len(prompt.partial.tokens) if prompt.partial else 0
    layers, two, heads, _, head_dim = engine.target.read_kv(0, 0).shape
    num_tokens = len(prompt.tokens) + num_begun - 1
    same = version == engine.target.version and DTYPES.index(engine.target.dtype) == dtype
    return (
        same
        and sizes == [layers, two, heads, num_tokens, head_dim]
        and 0 < num_tokens <= engine.target.max_tokens
    )
