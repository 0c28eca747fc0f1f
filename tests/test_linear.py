"""Tests that the linear layer is right with every kernel it may choose. The oracle is a float64 product."""

import psutil
import pytest
import torch
import torch.nn.functional as F

from aedit.spec_rollout.model import linear
from aedit.spec_rollout.model.layers import (
    EXACT_ROWS,
    NARROW_INPUTS,
    SMALL_WEIGHTS,
    Linear,
    _packed_dtypes,
    padded_rows,
)

SHAPES = [(8, 12), (700, 200), (200, 700), (1030, 130), (130, 1300), (1400, 1300)]
"""The first is small, and the last two have wide inputs."""


def tensors(rows, shape, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    out, size = shape
    x, weight, bias = (
        torch.randn(s, generator=draw, dtype=torch.float64) for s in ((rows, size), (out, size), (out,))
    )
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def check(result, x, weight, bias=None):
    assert result.dtype == x.dtype
    assert result.is_contiguous()
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8}[x.dtype]
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_number_of_rows_gives_the_product(dtype, shape):
    with torch.inference_mode():
        for rows in (0, 1, 2, 3, 4, 5, 16, 40, 41, 143):
            x, weight, bias = tensors(rows, shape, dtype)
            check(linear(x, weight), x, weight)
            check(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_that_is_stored_transposed_gives_the_product(dtype, shape):
    with torch.inference_mode():
        for rows in (0, 1, 2, 5, 40, 41):
            x, weight, bias = tensors(rows, shape, dtype)
            stored = weight.t().contiguous()
            check(linear(x, stored.t(), bias), x, weight, bias)
            stored.mul_(-2)
            check(linear(x, stored.t()), x, -2 * weight)


def test_many_rows_are_padded_to_few_numbers():
    numbers = range(8193)
    assert all(rows <= padded_rows(rows) <= rows * 9 / 8 for rows in numbers)
    assert all(padded_rows(rows) == rows for rows in range(EXACT_ROWS + 1))
    assert len({padded_rows(rows) for rows in numbers if rows > EXACT_ROWS}) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_all_numbers_of_rows_need_little_memory(dtype):
    """oneDNN keeps each kernel: without padding these calls hold about 200 MiB more."""
    with torch.inference_mode():
        _, weight, _ = tensors(1, (1000, 400), dtype)
        before = psutil.Process().memory_info().rss
        for rows in range(1, 600):
            linear(torch.zeros(rows, 400, dtype=dtype), weight)
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_the_shapes_are_on_both_sides_of_the_rule():
    assert [out * size < SMALL_WEIGHTS for out, size in SHAPES] == [True] + 5 * [False]
    assert [size <= NARROW_INPUTS for _, size in SHAPES] == 4 * [True] + 2 * [False]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_copy_gives_the_product_of_any_number_of_rows(dtype, shape):
    if dtype not in _packed_dtypes():
        pytest.skip("this CPU does not gain by it")
    for rows in (1, 2, 3, 4, 5, 32, 33):
        x, weight, bias = tensors(rows, shape, dtype)
        for one in (Linear(weight), Linear(weight, bias)):
            one.pack()
            with torch.inference_mode():
                check(one(x), x, weight, one.bias_o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_the_weights_in_place_takes_effect_at_once(dtype):
    with torch.inference_mode():
        for rows in (1, 2, 8, 40):
            x, weight, _ = tensors(rows, (700, 200), dtype)
            linear(x, weight)
            weight.mul_(-3).add_(1)
            check(linear(x, weight), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_wider_inputs_several_dimensions_and_strided_weights_give_the_product(dtype):
    with torch.inference_mode():
        for rows in (1, 3, 6):
            wide, weight, bias = tensors(rows, (700, 300), dtype)
            x = wide[:, :200]
            check(linear(x, weight[:, :200]), x, weight[:, :200])
            check(linear(x, weight[:, :200].contiguous()), x, weight[:, :200])
            batch = linear(wide[:, None], weight, bias)
            assert batch.shape == (rows, 1, 700)
            check(batch[:, 0].contiguous(), wide, weight, bias)
            check(linear(wide[0], weight)[None], wide[:1], weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_calls_give_equal_bits(dtype):
    with torch.inference_mode():
        for rows in (1, 2, 8, 40):
            x, weight, _ = tensors(rows, (700, 200), dtype)
            first = linear(x, weight)
            assert torch.equal(linear(x.clone(), weight.clone()), first)
            assert rows == 1 or dtype is not torch.float64 or torch.equal(F.linear(x, weight), first)


def test_where_gradients_are_needed_it_is_the_layer_of_torch():
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, _ = (each.requires_grad_() for each in tensors(1, (700, 200), dtype))
        result = linear(x, weight)
        assert torch.equal(result, F.linear(x, weight))
        result.sum().backward()
        torch.testing.assert_close(x.grad[0], weight.detach().sum(0), rtol=0.02, atol=0.5)


def test_the_switch_of_the_process_is_restored_after_a_call_and_after_an_error():
    x, weight, _ = tensors(1, (700, 200), torch.bfloat16)
    try:
        for enabled in (False, True):
            torch._C._set_mkldnn_enabled(enabled)
            with torch.inference_mode():
                linear(x, weight)
                assert torch._C._get_mkldnn_enabled() == enabled
                with pytest.raises(RuntimeError):
                    linear(x[:, :7], weight)
                assert torch._C._get_mkldnn_enabled() == enabled
    finally:
        torch._C._set_mkldnn_enabled(True)
