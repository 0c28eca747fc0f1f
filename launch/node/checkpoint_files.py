"""Files of a node's checkpoint: storage of torch.distributed.checkpoint in one safetensors file per rank.

The planner decides which rank writes which tensor. A rank writes all of its tensors to one file, each from
where it is, so that no copy of the state is made; two names of one tensor are one entry. `.metadata` names
file and entry of each tensor and is written last, after all files are on disk. A file that was cut short is
refused when it is read, as its size does not fit its header.
"""

import io
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in a safetensors file."""
_ALIGNED_BYTES = 8
"""The tensors of a file begin at a multiple of this, the largest element size."""


class SafetensorsWriter(dcp.FileSystemWriter):
    """Storage writer of torch.distributed.checkpoint that puts all tensors of a rank into one file."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = directory

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks, each with the name of its file."""
        return [replace(plan, storage_data=f"rank_{i}.safetensors") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, and values that are none as bytes; return where each one is.

        Raises ValueError for a dtype that safetensors does not have.
        """
        file, names, tensors = plan.storage_data, dict[tuple[Any, ...], str](), dict[str, Tensor]()
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                data = torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
            at = item.index.offset
            name = f"{item.index.fqn} {list(at)}" if at is not None and any(at) else item.index.fqn
            if data.dtype not in _DTYPES:
                raise ValueError(f"{name} has the dtype {data.dtype}, which a safetensors file cannot hold")
            memory = (data.device, data.data_ptr(), data.dtype, data.shape, data.stride())
            name = names.setdefault(memory, name)
            tensors[name] = data.detach()
            results.append(WriteResult(item.index, data.nbytes, (file, name)))
        _write(self._directory / file, tensors)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file to disk, one tensor after another."""
    header, end = dict[str, dict[str, Any]](), 0
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that each one is aligned
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        about = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    with path.open("wb", buffering=2**20) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            values = tensors[name].cpu().contiguous()
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class SafetensorsReader(dcp.FileSystemReader):
    """Storage reader for what `SafetensorsWriter` wrote, or `torch.distributed.checkpoint` by itself."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs into its tensors, one after another.

        Raises SafetensorError if a file is not whole.
        """
        files: dict[str, list[tuple[ReadItem, str]]] = {}
        for item in plan.items:
            entry = self.storage_data[item.storage_index]
            if not isinstance(entry, tuple):  # written by versions that called torch.save for each tensor
                return super().read_data(plan, planner)
            files.setdefault(entry[0], []).append((item, entry[1]))
        for file, items in files.items():
            with safe_open(Path(self.path) / file, "pt") as opened:
                for item, name in items:
                    _read(item, opened.get_tensor(name), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(item: ReadItem, saved: Tensor, planner: LoadPlanner) -> None:
    """Copy what `item` asks of a saved tensor to its place."""
    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(saved.numpy().tobytes()))
        return
    for axis, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(axis, begin, length)
    place = planner.resolve_tensor(item).detach()
    if place.shape != saved.shape:
        raise ValueError(
            f"{item.dest_index.fqn} has the shape {tuple(saved.shape)}, not {tuple(place.shape)}"
        )
    place.copy_(saved)
    planner.commit_tensor(item, place)
