"""Tests the digest of anchors against the same sum in Python integers."""

import numpy as np
import pytest
import torch

from aedit.edit.digest import digest, halves

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
