"""All nodes start from one model: parameters, frozen ones included, and buffers of the first node."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from aedit.edit.tensors import digest_of, from_floats, hash_of, shape_of, to_floats
from aedit.proto.transport import Pending, Rows


class Peers(Protocol):
    """What is needed of an `Exchange` to compare and average any tensor."""

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return one small float64 row per node."""

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Return the weighted mean of an fp32 vector over nodes."""


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name and value of every buffer, and whether it is part of the state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{prefix}.{name}".lstrip("."), buffer, name not in module._non_persistent_buffers_set


def equalize(model: nn.Module, peers: Peers) -> list[str]:
    """Make parameters and buffers of all nodes those of the first node, bit for bit.

    Only tensors that differ travel; returns their names. Buffers that are not part of the state dict stay as
    they are if they have another shape elsewhere. All nodes call this together; a node of a hub is compared
    with nobody.

    Raises:
        ValueError: The models have other parameters or persistent buffers.
    """
    fixed: dict[str, Tensor] = dict(model.named_parameters())
    fixed |= {name: buffer for name, buffer, persistent in named_buffers(model) if persistent}
    others = {name: buffer for name, buffer, persistent in named_buffers(model) if not persistent}
    tensors = fixed | (others if _same_model(fixed, others, peers) else {})
    floats = {name: to_floats(tensor) for name, tensor in tensors.items()}
    row = [[hash_of(shape_of(tensors[name])), *digest_of(flat)] for name, flat in floats.items()]
    found = peers.rows("start/digests", torch.tensor(row, dtype=torch.float64).flatten()).result()
    same_T3 = (found.rows == found.rows[0]).all(0).view(-1, 3).tolist()
    differing = [
        name
        for name, (shape, high, low) in zip(tensors, same_T3, strict=True)
        if shape and not (high and low)
    ]
    for name in differing:
        weight = torch.tensor(float(found.mine == 0), device=floats[name].device)
        from_floats(peers.average(f"start/{name}", floats[name], weight).result(), tensors[name])
    for module in model.modules() if differing else ():
        if isinstance(module, FSDPModule):
            module.reshard()  # what has been gathered before has the old values
    return differing


def _same_model(fixed: dict[str, Tensor], others: dict[str, Tensor], peers: Peers) -> bool:
    """Return whether the other buffers have the same names on all nodes."""
    shapes = [(name, shape_of(tensor)) for name, tensor in fixed.items()]
    numbers = [float(len(fixed)), hash_of(shapes), hash_of(list(others))]
    rows = peers.rows("start/model", torch.tensor(numbers, dtype=torch.float64)).result().rows
    for node, row in enumerate(rows):
        if not torch.equal(row[:2], rows[0, :2]):
            raise ValueError(
                f"nodes 0 and {node} have different models: {int(rows[0, 0])} and {int(row[0])} parameters "
                "and persistent buffers, with other names, types or shapes; compare their state_dict()"
            )
    return bool((rows[:, 2] == rows[0, 2]).all())
