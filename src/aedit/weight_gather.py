"""Gather sharded weights tensor by tensor: all ranks of a node call it together.

A tensor is cast on each rank before it is gathered and dropped before the next one, so that no rank ever
holds a second copy of the model.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Write = Callable[[Tensor, Tensor], None]
"""Takes a sharded tensor and its whole value, which is valid during the call."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_DTYPE = -1000


def sharded(weights: Mapping[str, Tensor]) -> list[DTensor]:
    """Return the sharded tensors of `weights`, each once."""
    found = {id(tensor): tensor for tensor in weights.values() if isinstance(tensor, DTensor)}
    return list(found.values())


def agree(weights: Mapping[str, Tensor], dtype: torch.dtype | None, *, refused: bool) -> torch.dtype | None:
    """Return the dtype in which `weights` are gathered. All ranks call it together, before `gather`.

    Args:
        weights: Tensors by name, of which at least one is sharded.
        dtype: The dtype that this rank wants; None if it needs none of the values.
        refused: This rank refuses the weights. Then every rank raises.

    Returns:
        The dtype, or None for each tensor's own, if ranks want different ones.

    Raises:
        ValueError: A rank refuses the weights, or the ranks pass different ones.
    """
    tensors = sharded(weights)
    code = _NO_DTYPE if dtype is None else _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
    digest = _digest(weights)
    least = code if code == _NO_DTYPE else -code
    said = torch.tensor([int(refused), code, least, digest, -digest], device=_control_device(tensors[0]))
    for dim in range(tensors[0].device_mesh.ndim):
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=tensors[0].device_mesh.get_group(dim))
    any_refused, most, least, digest, minus = said.tolist()
    if any_refused and not refused:
        raise ValueError(
            "weights: another rank of the node refuses them and names the tensor in its own error; nothing "
            "has changed"
        )
    if digest != -minus and not refused:
        raise ValueError(
            "weights: the ranks of the node pass different names or shapes: pass the state_dict of one "
            "sharded model on all of them"
        )
    return _DTYPES[most] if most == -least and most < len(_DTYPES) else None


@torch.no_grad()
def gather(weights: Mapping[str, Tensor], dtype: torch.dtype | None, write: Write) -> None:
    """Gather each sharded tensor of `weights` and pass it to `write`. All ranks call it together.

    Args:
        weights: Tensors by name, in the same order on all ranks.
        dtype: What `agree` returned.
        write: Called with each sharded tensor and its whole value.

    Raises:
        RuntimeError: A rank was lost.
    """
    for tensor in sharded(weights):
        try:
            to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            part: DTensor = tensor.detach().to(to)  # type: ignore[assignment]
            whole = part.full_tensor()
        except RuntimeError as error:
            name = next(name for name, each in weights.items() if each is tensor)
            raise RuntimeError(f"weights: {name} could not be gathered from the node's ranks") from error
        write(tensor, whole)
        del part, whole  # before the next one is gathered


def take_part(weights: Mapping[str, Tensor]) -> None:
    """Take part in an update of other ranks' engines, on a rank that has none."""
    gather(weights, agree(weights, None, refused=False), lambda tensor, whole: None)


def gather_bytes(shapes: Iterable[tuple[int, ...]], num_ranks: int, dtype: torch.dtype) -> int:
    """Return the most additional bytes that `gather` takes on a rank.

    That is one tensor, its copy inside Gloo (NCCL needs none), and this rank's part of it.

    Args:
        shapes: Whole shapes of the tensors, which are sharded by their first dimension.
        num_ranks: Number of ranks of the node.
        dtype: Dtype in which they are gathered.
    """

    def needed(shape: tuple[int, ...]) -> int:
        part = ceil(shape[0] / num_ranks) * prod(shape[1:]) if shape else 1
        return part * (2 * num_ranks + 1)

    return max((needed(shape) for shape in shapes), default=0) * dtype.itemsize


def _digest(weights: Mapping[str, Tensor]) -> int:
    said = repr([(name, tuple(tensor.shape)) for name, tensor in weights.items()])
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:6], "little")


def _control_device(tensor: DTensor) -> str:
    """Return the device for small numbers: the CPU if the group has Gloo, so that no GPU is waited for."""
    group = tensor.device_mesh.get_group(0)
    return "cpu" if "gloo" in str(dist.get_backend(group)) else tensor.device_mesh.device_type
