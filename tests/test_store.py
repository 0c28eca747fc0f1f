"""Tests the stores of anchors: what is read is what was written, on the device or in host memory."""

import pytest
import torch

from aedit.async_sgd.rules import OuterState
from aedit.edit.anchor_store import DeviceStore, PinnedStore


def kept(count, size=5, device="cpu"):
    return [
        (
            torch.full((size,), float(i), device=device),
            OuterState(torch.full((size,), -float(i), device=device)),
        )
        for i in range(count)
    ]


def check_holds(store, i, number):
    for anchor, state in (store.read(i), store.peek(i)):
        assert anchor.eq(number).all()
        assert state.momentum.eq(-number).all()


def test_a_device_store_keeps_what_it_is_given():
    store = DeviceStore(kept(3))
    assert len(store) == 3
    for i in range(3):
        store.ahead(i)
        check_holds(store, i, i)
    store.write(1, torch.full((5,), 7.0), OuterState(torch.full((5,), -7.0)))
    check_holds(store, 1, 7)
    check_holds(store, 0, 0)
    check_holds(store, 2, 2)


def test_a_device_store_makes_no_copies():
    given = kept(1)
    assert DeviceStore(given).read(0)[0] is given[0][0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_store_keeps_what_it_is_given_and_two_units_on_the_device_at_most():
    size, count = 1 << 18, 6
    store = PinnedStore(kept(count, size, "cuda"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for turn in range(1, 4):
        for i in range(count):
            store.ahead(i + 1)
            anchor, state = store.read(i)
            assert anchor.is_cuda
            assert anchor.eq(i * turn).all()
            assert state.momentum.eq(-i * turn).all()
            store.write(i, anchor + i, state.map(lambda t, i=i: t - i))
            del anchor, state
    for i in range(count):
        anchor, state = store.peek(i)
        assert anchor.is_pinned()
        assert state.momentum.is_pinned()
        assert anchor.eq(i * 4).all()
        assert state.momentum.eq(-i * 4).all()
    # Two units of anchor and momentum, and the new values of one.
    assert torch.cuda.max_memory_allocated() - before <= 3.5 * 2 * 4 * size
