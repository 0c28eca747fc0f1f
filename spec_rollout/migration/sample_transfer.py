"""A sample goes from one rank of a process group to another, with its keys and values.

Both ranks know that it will: one calls `send_sample`, the other `receive_sample`. Its text and settings go as
JSON, its keys and values as they lie in memory, and only if the receiver can read them: made by the same
version of the policy, of the same shape and type. Nothing is pickled. Tensors pass through the CPU, and the
group's backend must take such ones (gloo).

The sender has the sample until the receiver has said that it took it. When the answer is lost both have it,
and both would go on with it: with coupled sampling to the same tokens, so that it does no harm to take the
first of the two.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.sampling.samples import Prompt, Rollout, SampleKV, Sampling

TIMEOUT_S = 10.0
MAX_TEXT_BYTES = 64 << 20
MAGIC = 0xAED17
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
REFUSED, ACCEPTED, SEND_KV = range(3)
HEADER_WORDS = 9
"""int64: MAGIC, bytes of text, version, dtype, and the five sizes of keys and values, 0 if there are none."""


@dataclass(frozen=True, slots=True)
class RankChannel:
    """A rank of a group that one talks to, until a deadline."""

    rank: int
    """In the group."""
    group: ProcessGroup | None
    deadline: float
    """On the monotonic clock."""

    @classmethod
    def to(cls, rank: int, group: ProcessGroup | None, timeout_s: float) -> "RankChannel":
        return cls(rank, group, time.monotonic() + timeout_s)

    def send(self, tensor: Tensor, what: str) -> None:
        begin = partial(dist.isend, tensor, group=self.group, group_dst=self.rank)
        self._wait(begin, f"{what} to rank {self.rank}")

    def receive(self, tensor: Tensor, what: str) -> Tensor:
        begin = partial(dist.irecv, tensor, group=self.group, group_src=self.rank)
        self._wait(begin, f"{what} from rank {self.rank}")
        return tensor

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        """A group says with a RuntimeError that the other is gone, or that time is up."""
        left_s = max(0.001, self.deadline - time.monotonic())
        try:
            begin().wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise ConnectionError(f"{what}: {str(error).splitlines()[0]}") from error


def send_sample(
    prompt: Prompt, rank: int, *, group: ProcessGroup | None = None, timeout_s: float = TIMEOUT_S
) -> bool:
    """Give a sample that was taken out of an engine to a rank of the group, which calls `receive_sample`.

    True: it is there. False: its engine cannot serve it, and it is still here. OSError after `timeout_s`, or
    as soon as the other is gone: it is still here.
    """
    channel, kv = RankChannel.to(rank, group, timeout_s), prompt.partial.kv if prompt.partial else None
    text = torch.frombuffer(bytearray(_encode(prompt)), dtype=torch.uint8)
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
    """Take the sample that a rank of the group sends: it waits for a row of the engine. None if the engine
    cannot serve it. OSError if nothing has come within `timeout_s`."""
    channel = RankChannel.to(rank, group, timeout_s)
    magic, num_bytes, version, *kv_header = channel.receive(
        torch.zeros(HEADER_WORDS, dtype=torch.int64), "header"
    ).tolist()
    if magic != MAGIC or not 0 < num_bytes <= MAX_TEXT_BYTES:
        raise ConnectionError(f"rank {rank} sends something that is no sample")
    text = channel.receive(torch.zeros(num_bytes, dtype=torch.uint8), "text of a sample")
    prompt = _decode(text.numpy().tobytes())
    if _is_compatible(engine, prompt, version, kv_header):
        channel.send(torch.tensor([SEND_KV]), "answer")
        kv = channel.receive(torch.zeros(kv_header[1:], dtype=DTYPES[kv_header[0]]), "keys and values")
        prompt = _with_kv(prompt, SampleKV(kv, version))
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
    """Whether the engine's policy could have made such keys and values of these tokens."""
    dtype, *sizes = kv_header
    kv, num_begun = engine.target.cache.kv, len(prompt.partial.tokens) if prompt.partial else 0
    layers, two, _, heads, slots, head_dim = kv.shape
    num_tokens = len(prompt.tokens) + num_begun - 1
    same = version == engine.target.version and DTYPES.index(kv.dtype) == dtype
    return same and sizes == [layers, two, heads, num_tokens, head_dim] and 0 < num_tokens <= slots


def _with_kv(prompt: Prompt, kv: SampleKV) -> Prompt:
    assert prompt.partial is not None
    return replace(prompt, partial=replace(prompt.partial, kv=kv))


def _encode(prompt: Prompt) -> bytes:
    """Everything of it but keys and values."""
    sampling, partial = prompt.sampling, prompt.partial
    settings = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    if sampling.allowed is not None:
        settings["allowed"] = sampling.allowed.int().tolist()
    data = {
        "tokens": prompt.tokens,
        "rollout": prompt.rollout,
        "sample": prompt.sample,
        "group": prompt.group,
        "sampling": settings,
        "begun": None if partial is None else _told(partial),
    }
    return json.dumps(data).encode()


def _told(partial: Rollout) -> dict[str, Any]:
    return {name: getattr(partial, name) for name in ("tokens", "logprobs", "versions", "passes")}


def _decode(text: bytes) -> Prompt:
    data = json.loads(text)
    settings = data.pop("sampling")
    for name in ("stop_tokens", "stop_strings"):
        settings[name] = tuple(settings[name])
    if settings["allowed"] is not None:
        settings["allowed"] = torch.tensor(settings["allowed"], dtype=torch.bool)
    partial, tokens = data.pop("begun"), tuple(data.pop("tokens"))
    prompt = Prompt(tokens=tokens, sampling=Sampling(**settings), **data)
    return prompt if partial is None else replace(prompt, partial=Rollout(prompt, **partial))
