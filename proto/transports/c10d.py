"""Nodes of one `torch.distributed` world: NCCL or Gloo collectives over the `sync` axis of the mesh.

All nodes must take part: a missing node fails the round on all others, at the deadline and by name.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from aedit.proto.transports.store_notes import StoreNotes
from aedit.proto.transports.transport import Mean, PeersMissing, Rows

T = TypeVar("T")


class _Collective(Generic[T]):
    def __init__(self, key: str, work: dist.Work, timeout_s: float, read: Callable[[], T]) -> None:
        self._key, self._work, self._timeout_s, self._read = key, work, timeout_s, read
        self._answer: list[T] = []

    def done(self) -> bool:
        return self._work.is_completed()

    def result(self) -> T:
        if not self._answer:
            try:
                self._work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:  # what c10d raises for a dead peer as well as for a passed deadline
                reason = str(error).splitlines()[0]
                raise PeersMissing(
                    f"{self._key}: waited up to {self._timeout_s:g} s for the other nodes: {reason}"
                ) from error
            self._answer.append(self._read())
        return self._answer[0]


class TorchTransport:
    """Transport over one process group. Creating it is a collective call of all ranks of the group.

    group: ranks that hold the same shard, one per node, such as `mesh.get_group("sync")`; None is the whole
    world.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.bytes_sent = 0
        # Small rows go over Gloo where the group has it, so that no GPU is waited for.
        self._device = torch.device("cpu" if "gloo" in str(dist.get_backend(group)) else "cuda")
        self._notes = StoreNotes(group, timeout_s)

    def gather(self, key: str, row: Tensor) -> _Collective[Rows]:
        """See `Transport.gather`."""
        mine = row.detach().to(self._device, torch.float64, copy=True)
        rows = mine.new_empty(dist.get_world_size(self.group), mine.numel())
        work = dist.all_gather(list(rows), mine, group=self.group, async_op=True)
        rank = dist.get_rank(self.group)
        return self._under_way(key, work, mine, lambda: Rows(rows.cpu(), rank))

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> _Collective[Mean]:
        """See `Transport.weighted_mean`."""
        # The weight rides behind its value: one collective, not two.
        packed = value.new_empty(value.numel() + 1)
        _weigh(value.detach().reshape(-1), weight, out=packed[:-1])
        packed[-1] = weight
        work = dist.all_reduce(packed, group=self.group, async_op=True)

        def mean() -> Mean:
            total = packed[-1]
            return Mean(packed[:-1].div_(torch.where(total > 0, total, 1.0)).view_as(value), total)

        return self._under_way(key, work, packed, mean)

    def _under_way(
        self, key: str, work: dist.Work | None, sent: Tensor, read: Callable[[], T]
    ) -> _Collective[T]:
        assert work is not None, "this rank is not a member of the transport's group"
        self.bytes_sent += sent.numel() * sent.element_size()
        return _Collective(key, work, self.timeout_s, read)

    def post(self, key: str, text: str) -> None:
        """See `Transport.post`."""
        self._notes.post(key, text)

    def read(self, key: str) -> str | None:
        """See `Transport.read`."""
        return self._notes.read(key)

    def close(self) -> None:
        """See `Transport.close`."""
        self._notes.close()


def _weigh(value: Tensor, weight: float | Tensor, out: Tensor) -> None:
    """Write weight * value, but zeros for weight 0, where 0 * nan would be nan."""
    if isinstance(weight, Tensor):  # on its device: nothing is waited for
        out.copy_(torch.where(weight > 0, value * weight, 0.0))
    elif weight > 0:
        torch.mul(value, weight, out=out)
    else:
        out.zero_()
