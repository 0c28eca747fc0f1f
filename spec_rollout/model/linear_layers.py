"""Linear layer with the CPU kernel that reads the weights fastest, by a fixed rule.

Decoding multiplies few rows with large weights, and `F.linear` does not use the fastest kernel for them. On
one core of an AMD EPYC (Zen 5), in GB/s of weights, of the shapes of a model with 124 M parameters:

    rows                            1         2 to 4     8         16        512
    float32   F.linear (MKL)        15 to 21  5 to 12    7 to 10   5 to 7    0.4
              oneDNN                18 to 27  13 to 19   11 to 15  10 to 12  0.8
              MKL, (W x')'          15 to 21  7 to 20    5 to 9    5 to 7    -
      weights transposed, MKL       27 to 32  11 to 16   10        7 to 8    0.4
      weights transposed, oneDNN    22 to 38  21 to 38   20 to 27  14 to 19  0.9
    bfloat16  F.linear (oneDNN)     14 to 15  14 to 15   12 to 13  10 to 11  -
              PyTorch's own kernel  18 to 29  -          -         -         -

The rule depends on dtype and sizes only, and not on measured times: two processes on equal machines choose
the same kernels and round alike, so that they draw the same tokens.

oneDNN compiles a kernel for each number of rows that it meets and keeps it (0.4 MiB each, for one weight): a
server that meets prompts of all lengths would hold more memory for kernels than for its model. Many rows are
therefore padded to one of few numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_WEIGHTS = 1 << 17
"""Weights of fewer numbers stay in the cache, where the overhead of oneDNN is not worth it for few rows."""

MANY_ROWS = 32
"""Number of rows from which on oneDNN is faster with small weights, too."""

EXACT_ROWS = 32
"""Up to this number of rows, a step of decoding, no row is added."""

_HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Return x W' + b, as `F.linear`, of another rounding.

    Calls that need gradients, and devices other than the CPU, use `F.linear` itself.
    """
    if x_Ti.is_cuda or torch.is_grad_enabled() or not _HAS_ONEDNN:
        return F.linear(x_Ti, weight_oi, bias_o)
    rows = x_Ti.numel() // x_Ti.shape[-1]
    num_added = padded_rows(rows) - rows
    if not num_added or weight_oi.dtype == torch.float64:  # float64 has no kernels of oneDNN
        return _product(x_Ti, weight_oi, bias_o, rows)
    padded_Ti = F.pad(x_Ti.reshape(rows, -1), (0, 0, 0, num_added))
    out_To = _product(padded_Ti, weight_oi, bias_o, rows + num_added)
    return out_To[:rows].view(*x_Ti.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """Return how many rows to compute for `rows`: at most an eighth more, of 8 numbers per power of two."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step


def _product(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, rows: int) -> Tensor:
    """Return `F.linear` by the kernel that the rule selects."""
    if not weight_oi.is_contiguous():
        return _strided(x_Ti, weight_oi, bias_o, rows)
    if weight_oi.dtype == torch.bfloat16 and rows == 1:
        return _without_onednn(x_Ti, weight_oi, bias_o)
    is_small = weight_oi.numel() < SMALL_WEIGHTS and rows < MANY_ROWS
    if weight_oi.dtype != torch.float32 or is_small or not rows:
        return F.linear(x_Ti, weight_oi, bias_o)
    out, size = weight_oi.shape
    if 2 <= rows <= 4 and out >= size and x_Ti.dim() == 2 and bias_o is None:
        return torch.mm(weight_oi, x_Ti.t()).t().contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_Ti, weight_oi, bias_o, "none", [], "")  # type: ignore[no-any-return]


def _strided(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, rows: int) -> Tensor:
    """Return `F.linear`, by oneDNN for several rows and a weight that is stored transposed (GPT-2)."""
    is_slow = weight_oi.dtype == torch.float32 and rows > 1 and weight_oi.numel() >= SMALL_WEIGHTS
    if not is_slow or not weight_oi.t().is_contiguous():
        return F.linear(x_Ti, weight_oi, bias_o)
    return torch.ops.mkldnn._linear_pointwise(x_Ti, weight_oi, bias_o, "none", [], "")  # type: ignore[no-any-return]


def _without_onednn(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return `F.linear` by PyTorch's own matrix-vector product, which sums in float32.

    There is no argument that selects it. The switch is the process's: another thread that calls a linear
    layer in the meantime gets a right result, perhaps more slowly.
    """
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x_Ti, weight_oi, bias_o)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
