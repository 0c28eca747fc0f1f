"""Tests the digest of anchors against the same sum in Python integers."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from kit.nodes import in_threads
from torch import nn

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, EverySteps, LayerSync, MeanExchange
from aedit.edit.tensors import digest, halves

ODD = 0x1E3779B97F4A7C15
MASK = 2**64 - 1


def by_hand(numbers):
    """Compute the digest by definition, in Python integers.

    Pairs of fp32 form one little-endian 64-bit word each, mixed, weighted by place and summed modulo 2^64.
    """
    padded = np.append(numbers, np.zeros(len(numbers) % 2)).astype(np.float32)
    words = [int(word) for word in padded.view(np.uint64)]
    return sum((w ^ (w << 29)) * ((i * ODD) | 1) for i, w in enumerate(words)) & MASK


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_the_digest_is_the_sum_by_hand(size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert int(digest(flat)) & MASK == by_hand(flat.numpy())


def test_one_flipped_bit_or_two_numbers_that_change_places_change_it():
    flat = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for i in range(64):
        flipped = flat.clone()
        flipped.view(torch.int32)[i] ^= 1
        assert int(digest(flipped)) != int(digest(flat))
    swapped = flat.clone()
    swapped[[3, 40]] = flat[[40, 3]]
    assert int(digest(swapped)) != int(digest(flat))


def test_a_slice_that_starts_at_an_odd_place_has_the_digest_of_its_copy():
    flat = torch.arange(9, dtype=torch.float32)
    assert int(digest(flat[1:])) == int(digest(flat[1:].clone()))


def test_halves_are_exact_in_float64():
    for number in (0, 1, -1, 2**63 - 1, -(2**63)):
        high, low = halves(number)
        assert (int(high) << 32) + int(low) == number & MASK


def test_anchors_of_two_units_that_change_places_are_noticed_and_healed():
    """The digests of single anchors are the same then, and so is their plain sum."""

    start = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def job(transport, node):
        model = deepcopy(start)
        exchange, seen = MeanExchange(transport, outer=Average()), []
        sync = LayerSync.of(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            exchange=exchange,
            schedule=EverySteps(2),
            config=EditConfig(units=("0", "1")),
        )
        sync.on_round = lambda outcome, waited_s: seen.append(outcome.healed_from)
        with sync:
            for step in range(4):
                if step == 2 and node == 1:
                    sync.finish()
                    (one, state), (other, its_state) = (exchange.store.read(i) for i in range(2))
                    one, other = one.clone(), other.clone()
                    exchange.store.write(0, other, state)
                    exchange.store.write(1, one, its_state)
                model(torch.ones(1, 4)).sum().backward()
                sync.step()
            sync.finish()
            anchors = [exchange.store.read(i)[0].clone() for i in range(2)]
        return seen[:2], anchors, [p.detach().clone().view(-1) for p in model.parameters()]

    (first, anchors, _), (second, healed, landed) = in_threads(2, job)
    assert (first, second) == ([None, None], [None, 0])
    for ours, theirs, parameters in zip(anchors, healed, landed, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(parameters, theirs)
