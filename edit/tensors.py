"""Tensors of a model as fp32 vectors that a transport can carry, and their digests."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from aedit.edit.shards import local

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def to_floats(tensor: Tensor) -> Tensor:
    """Return a new fp32 vector that holds `tensor` exactly.

    fp32, bf16 and fp16 are converted; of every other type each byte becomes a number. Of a DTensor this
    rank's part.
    """
    flat = local(tensor).detach().reshape(-1)
    if flat.dtype in _NARROW:
        return flat.to(torch.float32, copy=True)
    return flat.contiguous().view(torch.uint8).float()


@torch.no_grad()
def from_floats(floats: Tensor, into: Tensor) -> None:
    """Write what `to_floats` returned for a tensor of the same shape and type into `into`."""
    part = local(into)
    if part.dtype in _NARROW:
        part.copy_(floats.view_as(part))
    else:
        part.copy_(floats.to(torch.uint8).view(part.dtype).view_as(part))


def is_averaged(tensor: Tensor) -> bool:
    """Return whether values of this type have a mean that they can hold."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)


@torch.no_grad()
def to_mean(tensor: Tensor) -> Tensor:
    """Return a new fp32 vector whose mean over nodes stands for the mean of `tensor`.

    float64 numbers become two, of which the second holds what the first rounds away.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if flat.dtype != torch.float64:
        return flat.to(torch.float32, copy=True)
    rounded = flat.float()
    return torch.cat([rounded, (flat - rounded.double()).float()])


@torch.no_grad()
def from_mean(floats: Tensor, into: Tensor) -> None:
    """Write a mean of what `to_mean` returned into `into`."""
    real = torch.view_as_real(into) if into.is_complex() else into
    if real.dtype == torch.float64:
        floats = floats.double().view(2, -1).sum(0)
    real.copy_(floats.view_as(real))


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name and value of every buffer, and whether it is part of the state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{prefix}.{name}".lstrip("."), buffer, name not in module._non_persistent_buffers_set


def digest_of(floats: Tensor) -> tuple[float, float]:
    """Return the digest of an fp32 vector as two numbers that float64 holds exactly."""
    return halves(int(digest(floats)))


def hash_of(what: object) -> float:
    """Return a hash of `what`, of its `repr`, that float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big"))


def shape_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return type and whole shape."""
    return str(tensor.dtype), tuple(tensor.shape)


_CHUNK = 1 << 21
_ODD = 0x1E3779B97F4A7C15


@torch.no_grad()
def digest(flat: Tensor) -> Tensor:
    """Return a 0-dim int64 digest of the bits and places of an fp32 vector.

    Sums wrap, so the order of additions cannot matter.
    """
    if flat.numel() % 2 or flat.storage_offset() % 2:
        flat = torch.cat([flat, flat.new_zeros(flat.numel() % 2)])
    pairs = flat.view(torch.int64)  # two numbers at a time: half the work of a slow multiplication
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, pairs.numel(), _CHUNK):
        bits = pairs[start : start + _CHUNK]
        weights = torch.arange(start, start + bits.numel(), device=flat.device).mul_(_ODD).bitwise_or_(1)
        total += (bits << 29).bitwise_xor_(bits).mul_(weights).sum()
    return total


def halves(digest: int) -> tuple[float, float]:
    """Return a digest as two numbers that float64 holds exactly."""
    unsigned = digest & 0xFFFFFFFFFFFFFFFF
    return float(unsigned >> 32), float(unsigned & 0xFFFFFFFF)
