"""The ranks of one node: sums over their shards, and decisions that all of them share.

A node with one rank is a group of size 1, where a sum is the number itself: there is no other code path for
it.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter: the shard of a DTensor, or the tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Return what `local` returns, outside autograd and the same object in each call."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def reshard(modules: Iterable[nn.Module]) -> None:
    """Make FSDP2 gather the parameters anew.

    A forward pass without a backward pass leaves the root module gathered, with the old values;
    `reshard_after_forward=False` leaves all modules gathered.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


class Shards:
    """The ranks of this node. group: such as `mesh.get_group("shard")`; None is a node of one rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    @property
    def leads(self) -> bool:
        """Return whether this rank decides for its node."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the node's ranks, equal bits on all. `values` is not changed."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.group)
        return values

    def decide(self, numbers: Sequence[int]) -> list[int]:
        """Return the leader's numbers, on every rank: ranks never compare their own clocks."""
        if self.size == 1:
            return list(numbers)
        said = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(said, group=self.group, group_src=0)
        return [int(n) for n in said.tolist()]

    def all(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on every rank of the node."""
        if self.size == 1 or not flags:
            return list(flags)
        count = torch.tensor([int(flag) for flag in flags], device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(n) for n in count.tolist()]

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over the node's ranks."""
        if self.size == 1:
            return [int(n) for n in numbers]
        said = torch.tensor([int(n) for n in numbers], dtype=torch.int64, device=self._device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        return [int(n) for n in said.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks. They are pickled."""
        if self.size == 1:
            return [value]
        found: list[T] = [value for _ in range(self.size)]
        dist.all_gather_object(found, value, group=self.group)
        return found

    @property
    def _device(self) -> str:
        return control_device(self.group)


def control_device(group: dist.ProcessGroup | None) -> str:
    """Return the device for small numbers.

    The CPU over Gloo if the group has it, so that no GPU is waited for.
    """
    return "cpu" if "gloo" in str(dist.get_backend(group)) else "cuda"


def shards_of(params: Sequence[Tensor]) -> Shards:
    """Return the node that FSDP2 has split `params` over: one rank if they are plain tensors.

    Raises ValueError if they are split over more than one mesh axis.
    """
    meshes = {p.device_mesh for p in params if isinstance(p, DTensor)}
    if not meshes:
        return Shards()
    if len(meshes) > 1 or (mesh := meshes.pop()).ndim != 1:
        raise ValueError(
            'LayerSync needs parameters sharded over one mesh axis: fully_shard(..., mesh=mesh["shard"])'
        )
    return Shards(mesh.get_group())
