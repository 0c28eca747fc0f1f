"""Weights of the policy in memory that a rank shares with its rollout workers."""

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from aedit.spec_rollout.training import SharedSlots, SlotLayout, TensorSpec
from aedit.system import anonymous_memory
from aedit.weights import agree, gather, sharded


class SharedWeights:
    """Two slots for the tensors of a state dict, which the rank writes and all its workers read.

    It takes twice the policy's bytes in the workers' dtype, once per rank. Tied tensors are kept once.
    """

    def __init__(self, name: str, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Make the memory.

        Args:
            name: Shown by tools such as `lsof`.
            weights: Tensors of the shapes to publish, which may be sharded.
            dtype: Dtype of the floating-point tensors.
        """
        self.layout = SlotLayout(
            tuple(
                TensorSpec(key, tuple(each.shape), dtype if each.is_floating_point() else each.dtype)
                for key, each in _untied(weights).items()
            )
        )
        self.dtype = dtype
        self.fd = anonymous_memory(name, self.layout.num_bytes)
        self._slots = SharedSlots(self.layout, memoryview(mmap.mmap(self.fd, self.layout.num_bytes)))

    @property
    def number(self) -> int:
        """Return the number of publications."""
        return self._slots.newest_number

    def described(self) -> dict[str, Any]:
        """Return the layout and the file descriptor as values that JSON can hold."""
        specs = [
            [spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")]
            for spec in self.layout.specs
        ]
        return {"fd": self.fd, "specs": specs}

    def close(self) -> None:
        """Close the file descriptor. The memory is freed with the last process that has it."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish `weights`. Sharded ones are gathered tensor by tensor: all ranks of the node call it.

        Raises:
            ValueError: A tensor does not fit, here or on another rank. Nothing is published.
            RuntimeError: A rank failed on the way. Nothing is published.
        """
        untied = _untied(weights)
        refusal = self._refusal(untied)
        dtype = None
        if sharded(weights):
            dtype = agree(weights, self.dtype, refused=refusal is not None)
        if refusal is not None:
            raise refusal
        names = {id(tensor): name for name, tensor in untied.items()}

        def write(views: Mapping[str, Tensor]) -> None:
            for name, view in views.items():
                if not isinstance(untied[name], DTensor):
                    view.copy_(untied[name].detach())
            gather(weights, dtype, lambda part, whole: _copy(views, names.get(id(part)), whole))

        self._slots.publish_by(write, version)

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        """Return whether the newest publication has these values; sharded tensors are not compared."""
        newest = self._slots.newest()
        return newest is not None and all(
            name not in newest.tensors
            or isinstance(tensor, DTensor)
            or torch.equal(newest.tensors[name], tensor.detach().to(newest.tensors[name]))
            for name, tensor in weights.items()
        )

    def _refusal(self, weights: Mapping[str, Tensor]) -> ValueError | None:
        expected = {spec.name: spec.shape for spec in self.layout.specs}
        for name in sorted({*expected, *weights}):
            found = tuple(weights[name].shape) if name in weights else "missing"
            if found != expected.get(name):
                return ValueError(
                    f"weights: {name} is {found}, expected {expected.get(name, 'no such tensor')}"
                )
        return None


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once, under its first name."""
    seen: set[object] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = id(tensor) if isinstance(tensor, DTensor) else (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen or not tensor.numel():
            seen.add(place)
            found[name] = tensor
    return found


def _copy(views: Mapping[str, Tensor], name: str | None, whole: Tensor) -> None:
    if name is not None:
        views[name].copy_(whole)
