"""All nodes have one model: parameters, frozen ones included, and buffers of one node."""

import torch
from torch import Tensor, nn

from aedit.edit.exchange import Peers
from aedit.edit.shards import reshard
from aedit.edit.tensors import digest_of, from_floats, hash_of, named_buffers, shape_of, to_floats


def equalize(model: nn.Module, peers: Peers, *, source: int = 0, key: str = "start") -> list[str]:
    """Make parameters and buffers of all nodes those of node `source`, bit for bit.

    Only tensors that differ travel; returns their names. Buffers that are not part of the state dict stay as
    they are if nodes have others, or of another shape. All nodes call this together, with the same parameters
    and persistent buffers; a node of a hub has no peers to be compared with.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer, persistent in named_buffers(model) if persistent}
    others = {name: buffer for name, buffer, persistent in named_buffers(model) if not persistent}
    names = torch.tensor([hash_of(list(others))], dtype=torch.float64)
    named = peers.rows(f"{key}/names", names).result().rows
    if (named == named[0]).all():
        tensors |= others
    floats = {name: to_floats(tensor) for name, tensor in tensors.items()}
    row = [[hash_of(shape_of(tensors[name])), *digest_of(flat)] for name, flat in floats.items()]
    found = peers.rows(f"{key}/digests", torch.tensor(row, dtype=torch.float64).flatten()).result()
    same_T3 = (found.rows == found.rows[0]).all(0).view(-1, 3).tolist()
    differing = [
        name
        for name, (shape, high, low) in zip(tensors, same_T3, strict=True)
        if shape and not (high and low)
    ]
    for name in differing:
        weight = torch.tensor(float(found.mine == source), device=floats[name].device)
        from_floats(peers.average(f"{key}/{name}", floats[name], weight).result(), tensors[name])
    if differing:
        reshard(model.modules())
    return differing
