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
from aedit.spec_rollout.sampling.samples import KeptKV, Prompt, Rollout, Sampling

WITHIN_S = 10.0
MAX_TEXT_BYTES = 64 << 20
MAGIC = 0xAED17
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
REFUSED, TAKEN, SEND_KV = range(3)
HEADER = 9
"""int64: MAGIC, bytes of text, version, dtype, and the five sizes of keys and values, 0 if there are none."""


@dataclass(frozen=True, slots=True)
class Line:
    """A rank of a group that one talks to, until a deadline."""

    rank: int
    """In the group."""
    group: ProcessGroup | None
    deadline: float
    """On the monotonic clock."""

    @classmethod
    def to(cls, rank: int, group: ProcessGroup | None, within_s: float) -> "Line":
        return cls(rank, group, time.monotonic() + within_s)

    def send(self, tensor: Tensor, what: str) -> None:
        begin = partial(dist.isend, tensor, group=self.group, group_dst=self.rank)
        self._done(begin, f"{what} to rank {self.rank}")

    def receive(self, tensor: Tensor, what: str) -> Tensor:
        begin = partial(dist.irecv, tensor, group=self.group, group_src=self.rank)
        self._done(begin, f"{what} from rank {self.rank}")
        return tensor

    def _done(self, begin: Callable[[], Any], what: str) -> None:
        """A group says with a RuntimeError that the other is gone, or that time is up."""
        left_s = max(0.001, self.deadline - time.monotonic())
        try:
            begin().wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise ConnectionError(f"{what}: {str(error).splitlines()[0]}") from error


def send_sample(
    prompt: Prompt, rank: int, *, group: ProcessGroup | None = None, within_s: float = WITHIN_S
) -> bool:
    """Give a sample that was taken out of an engine to a rank of the group, which calls `receive_sample`.

    True: it is there. False: its engine cannot serve it, and it is still here. OSError after `within_s`, or
    as soon as the other is gone: it is still here.
    """
    line, kept = Line.to(rank, group, within_s), prompt.begun.kv if prompt.begun else None
    text = torch.frombuffer(bytearray(_written(prompt)), dtype=torch.uint8)
    line.send(_header(len(text), kept), "header of a sample")
    line.send(text, "text of a sample")
    answer = int(line.receive(torch.zeros(1, dtype=torch.int64), "answer")[0])
    if answer == SEND_KV:
        assert kept is not None
        line.send(kept.kv.cpu().contiguous(), "keys and values")
        answer = int(line.receive(torch.zeros(1, dtype=torch.int64), "answer")[0])
    return answer == TAKEN


def receive_sample(
    engine: Engine, rank: int, *, group: ProcessGroup | None = None, within_s: float = WITHIN_S
) -> Rollout | None:
    """Take the sample that a rank of the group sends: it waits for a row of the engine. None if the engine
    cannot serve it. OSError if nothing has come within `within_s`."""
    line = Line.to(rank, group, within_s)
    magic, num_bytes, version, *form = line.receive(torch.zeros(HEADER, dtype=torch.int64), "header").tolist()
    if magic != MAGIC or not 0 < num_bytes <= MAX_TEXT_BYTES:
        raise ConnectionError(f"rank {rank} sends something that is no sample")
    text = line.receive(torch.zeros(num_bytes, dtype=torch.uint8), "text of a sample")
    prompt = _read(text.numpy().tobytes())
    if _fits(engine, prompt, version, form):
        line.send(torch.tensor([SEND_KV]), "answer")
        kv = line.receive(torch.zeros(form[1:], dtype=DTYPES[form[0]]), "keys and values")
        prompt = _with_kv(prompt, KeptKV(kv, version))
    try:
        rollout = engine.add(prompt)
    except ValueError:
        line.send(torch.tensor([REFUSED]), "answer")
        return None
    line.send(torch.tensor([TAKEN]), "answer")
    return rollout


def _header(num_bytes: int, kept: KeptKV | None) -> Tensor:
    if kept is None or kept.kv.dtype not in DTYPES:
        return torch.tensor([MAGIC, num_bytes, -1, 0, 0, 0, 0, 0, 0])
    return torch.tensor([MAGIC, num_bytes, kept.version, DTYPES.index(kept.kv.dtype), *kept.kv.shape])


def _fits(engine: Engine, prompt: Prompt, version: int, form: list[int]) -> bool:
    """Whether the engine's policy could have made such keys and values of these tokens."""
    dtype, *sizes = form
    kv, num_begun = engine.target.cache.kv, len(prompt.begun.tokens) if prompt.begun else 0
    layers, two, _, heads, slots, head_dim = kv.shape
    num_tokens = len(prompt.tokens) + num_begun - 1
    same = version == engine.target.version and DTYPES.index(kv.dtype) == dtype
    return same and sizes == [layers, two, heads, num_tokens, head_dim] and 0 < num_tokens <= slots


def _with_kv(prompt: Prompt, kept: KeptKV) -> Prompt:
    assert prompt.begun is not None
    return replace(prompt, begun=replace(prompt.begun, kv=kept))


def _written(prompt: Prompt) -> bytes:
    """Everything of it but keys and values."""
    sampling, begun = prompt.sampling, prompt.begun
    settings = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    if sampling.allowed is not None:
        settings["allowed"] = sampling.allowed.int().tolist()
    told = {
        "tokens": prompt.tokens,
        "rollout": prompt.rollout,
        "sample": prompt.sample,
        "group": prompt.group,
        "sampling": settings,
        "begun": None if begun is None else _told(begun),
    }
    return json.dumps(told).encode()


def _told(begun: Rollout) -> dict[str, Any]:
    return {name: getattr(begun, name) for name in ("tokens", "logprobs", "versions", "passes")}


def _read(text: bytes) -> Prompt:
    told = json.loads(text)
    settings = told.pop("sampling")
    for name in ("stop_tokens", "stop_strings"):
        settings[name] = tuple(settings[name])
    if settings["allowed"] is not None:
        settings["allowed"] = torch.tensor(settings["allowed"], dtype=torch.bool)
    begun, tokens = told.pop("begun"), tuple(told.pop("tokens"))
    prompt = Prompt(tokens=tokens, sampling=Sampling(**settings), **told)
    return prompt if begun is None else replace(prompt, begun=Rollout(prompt, **begun))
