"""Comparison of model and settings between nodes, and equal models, before anything else is exchanged.

Nodes that differ would otherwise end in a collective of unequal sizes, in a time-out, or in a mean of
tensors that have nothing to do with each other.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from aedit.edit import flat_layout
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange
from aedit.edit.schedule import RoundSchedule
from aedit.edit.shards import Shards, reshard
from aedit.edit.tensors import digest_of, from_floats, halves, hash_of, named_buffers, shape_of, to_floats
from aedit.edit.units import SyncUnit
from aedit.proto.transports import Transport

_MISSING = "nothing"
_PROGRESS = ("schedule.last_id", "schedule.last_step")


def described_layout(units: Sequence[SyncUnit], shards: Shards) -> dict[str, str]:
    """Return number of units, ranks per node, and each parameter's unit and whole shape, in their order."""
    found = {"ranks per node": str(shards.size), "number of units": str(len(units))}
    for unit in flat_layout.layout(units).units:
        found |= {f"parameter {t.name}": f"shape {t.shape} in unit {unit.name}" for t in unit.tensors}
    return found


def described_loop(model: nn.Module, config: EditConfig, schedule: RoundSchedule) -> dict[str, str]:
    """Return what a training loop has that no exchange knows: settings, frozen parameters and buffers."""
    found = {f"edit.{name}": str(getattr(config, name)) for name in ("fragments", "warmup_steps")}
    settings = described("schedule", schedule)
    found |= {name: text for name, text in settings.items() if name not in _PROGRESS}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    for name, p in frozen.items():
        found[f"parameter {name}"] = f"shape {tuple(p.shape)}, frozen"
    for name, buffer, persistent in named_buffers(model):
        if persistent:
            found[f"buffer {name}"] = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
    return found


def described(prefix: str, value: object) -> dict[str, str]:
    """Return the class of `value` and its public numbers, strings and None, as PREFIX.NAME: text.

    A setting that may differ between nodes has a name that begins with an underscore.
    """
    names = [field.name for field in fields(value)] if is_dataclass(value) else sorted(vars(value))
    public = {name: getattr(value, name) for name in names if not name.startswith("_")}
    scalars = {name: v for name, v in public.items() if v is None or isinstance(v, int | float | str)}
    return {prefix: type(value).__qualname__} | {f"{prefix}.{name}": repr(v) for name, v in scalars.items()}


def compare(transport: Transport, key: str, mine: Mapping[str, str]) -> None:
    """Raise ValueError on every node if `mine` is not equal on all of them. All nodes together.

    The message names the first entry that differs, its value here and at the other node, and that node.
    """
    text = json.dumps(dict(mine)).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    row = torch.tensor([*halves(number), len(text)], dtype=torch.float64)
    rows = transport.gather(f"{key}/digest", row).result()
    same_N = (rows.rows == rows.rows[0]).all(1)
    if same_N.all():
        return
    padded = torch.zeros(int(rows.rows[:, 2].max()), dtype=torch.float64)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).double()
    texts = transport.gather(f"{key}/texts", padded).result().rows
    here = rows.mine or 0
    other = int(same_N.int().argmin()) if same_N[here] else 0
    theirs: dict[str, str] = json.loads(bytes(texts[other].to(torch.uint8).tolist()).rstrip(b"\0"))
    name = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
    raise ValueError(
        f"{name}: node {here} has {mine.get(name, _MISSING)}, node {other} has {theirs.get(name, _MISSING)};"
        " give all nodes the same model and settings"
    )


def equalize(model: nn.Module, peers: Exchange, *, source: int = 0, key: str = "start") -> list[str]:
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
