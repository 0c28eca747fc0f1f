"""The codecs of `codecs` for torch tensors, where they are: the same payloads, bit for bit.

Encoded on the GPU, two to eight times less has to come from it. Nothing here makes the host wait: numbers go
into kernels by `masked_fill`, while `torch.where` would copy them to the GPU first. And no arithmetic depends
on the device: integers, and fp32 operations that IEEE 754 rounds in one way only (so no division by a Python
number, which PyTorch turns into a multiplication on a GPU). Shapes as in `blocks`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from aedit.proto.codecs import blocks
from aedit.proto.codecs.codecs import BLOCK

NAMES = ("bf16", "int8", "e3m0")


def encode(name: str, x: Tensor) -> Tensor:
    """The payload of the 1-d contiguous fp32 `x`, as uint8 on its device. ValueError for codecs not in
    NAMES."""
    if name == "bf16":
        return _encode_bf16(x)
    step, largest, encode_block, _ = _blocks(name)
    x_BK = pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales_B = _scales(x_BK, step, largest)
    codes = encode_block(x_BK, scales_B)[: _code_bytes(name, x.numel())]
    payload = torch.empty(2 * scales_B.numel() + codes.numel(), dtype=torch.uint8, device=x.device)
    payload[: 2 * scales_B.numel()].view(torch.int16).copy_(scales_B)
    payload[2 * scales_B.numel() :].copy_(codes)
    return payload


def decode(name: str, payload: Tensor, numel: int) -> Tensor:
    """The `numel` fp32 elements of a valid payload, on its device. ValueError for codecs not in NAMES."""
    if name == "bf16":
        return (payload.view(torch.int16).int() << 16).view(torch.float32)
    _, _, _, decode_block = _blocks(name)
    num_blocks = -(-numel // BLOCK)
    scales_B = payload[: 2 * num_blocks].view(torch.int16).int()
    codes = payload[2 * num_blocks :]
    whole = _code_bytes(name, num_blocks * BLOCK)
    codes_BK = pad(codes, (0, whole - codes.numel())).view(num_blocks, -1)
    return decode_block(codes_BK, scales_B).view(-1)[:numel]


def _blocks(
    name: str,
) -> tuple[float, int, Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Of a codec with scales: what its scale is of the largest magnitude, the largest scale, and how one way
    and the other."""
    match name:
        case "int8":
            return float(blocks.PER_STEP), blocks.LARGEST_INT8, _encode_int8, _decode_int8
        case "e3m0":
            return 1.0, blocks.LARGEST_E3M0, _encode_e3m0, _decode_e3m0
    raise ValueError(f"no codec for tensors is called {name!r}, only {', '.join(NAMES)}")


def _code_bytes(name: str, numel: int) -> int:
    return -(-numel // 2) if name == "e3m0" else numel


def _encode_bf16(x: Tensor) -> Tensor:
    """What a GPU itself makes of NaN differs from what a CPU does."""
    rounded = _to_bf16(x.view(torch.int32)).masked_fill_(x.isnan(), blocks.NOT_FINITE)
    return rounded.to(torch.int16).view(torch.uint8)


def _to_bf16(bits: Tensor) -> Tensor:
    return (((bits >> 16) & 1) + 0x7FFF + bits) >> 16


def _from_bf16(scales_B: Tensor) -> Tensor:
    return (scales_B << 16).view(torch.float32)


def _scales(x_BK: Tensor, step: float, largest: int) -> Tensor:
    """As `blocks.scales`, as int32."""
    top_B = (x_BK.view(torch.int32) & blocks.ABSOLUTE).amax(1)
    poisoned_B = top_B >= blocks.INFINITE
    step_B = top_B.masked_fill(poisoned_B, 0).view(torch.float32) * step
    scales_B = _to_bf16(step_B.view(torch.int32)).clamp(max=largest)
    return scales_B.masked_fill(scales_B < blocks.SMALLEST, 0).masked_fill(poisoned_B, blocks.NOT_FINITE)


def _useless(scales_B: Tensor) -> Tensor:
    return (scales_B == 0) | (scales_B == blocks.NOT_FINITE)


def _encode_int8(x_BK: Tensor, scales_B: Tensor) -> Tensor:
    divisor_B = _from_bf16(scales_B).masked_fill(_useless(scales_B), torch.inf)
    ratio_BK = (x_BK / divisor_B[:, None]).nan_to_num_(nan=0.0)
    return ratio_BK.round_().to(torch.int8).view(-1).view(torch.uint8)


def _decode_int8(codes_BK: Tensor, scales_B: Tensor) -> Tensor:
    return codes_BK.view(torch.int8) * _from_bf16(scales_B)[:, None]


def _encode_e3m0(x_BK: Tensor, scales_B: Tensor) -> Tensor:
    bits_BK = x_BK.view(torch.int32)
    bound_B = (_from_bf16(scales_B) * float(blocks.SQRT_HALF)).view(torch.int32) - (7 << blocks.EXPONENT_BIT)
    bound_BK = bound_B.masked_fill(_useless(scales_B), blocks.INFINITE)[:, None]
    code_BK = torch.maximum(bits_BK & blocks.ABSOLUTE, bound_BK).sub_(bound_BK)
    code_BK = (code_BK >> blocks.EXPONENT_BIT) | ((bits_BK >> 28) & 8)
    pairs = code_BK.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _decode_e3m0(packed_BK: Tensor, scales_B: Tensor) -> Tensor:
    code_BK = torch.stack((packed_BK & 15, packed_BK >> 4), dim=2).flatten(1).int()
    magnitude_BK = code_BK & 7
    power_BK = ((magnitude_BK + 120) << blocks.EXPONENT_BIT).masked_fill_(magnitude_BK == 0, 0)
    signed_BK = power_BK | ((code_BK & 8) << 28)
    return signed_BK.view(torch.float32) * _from_bf16(scales_B)[:, None]
