"""Tests that samples packed in one row do not affect each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.tiny_policies import drafter, ends, policy, said

from aedit.spec_rollout.training import FeatureSample, pack_samples
from aedit.spec_rollout.training.batches import visible
from aedit.spec_rollout.training.losses import LossConfig, draft_losses


def sample(num_tokens, num_prompt=1, number=1, version=1):
    """Return sample n, whose token i is 1000 n + i, as is the feature of position i."""
    tokens = torch.arange(num_tokens) + 1000 * number
    return FeatureSample(tokens, tokens[:-1, None].double(), num_prompt, version, 0, number, True)


def pairs(rows):
    """Return (feature, token, target) of every pair that counts, sorted."""
    found = []
    for row in rows:
        parts = (row.features_Pw[:, 0].long(), row.tokens_P, row.targets_P)
        found += torch.stack(parts, 1)[row.counts_P].tolist()
    return sorted(found)


def test_the_feature_of_a_position_goes_with_the_next_token_and_guesses_the_one_after():
    (row,) = pack_samples([sample(5)], 16)
    assert row.features_Pw[:, 0].tolist() == [1000, 1001, 1002, 1003]
    assert row.tokens_P.tolist() == [1001, 1002, 1003, 1004]
    assert row.targets_P[:3].tolist() == [1002, 1003, 1004]
    assert row.counts_P.tolist() == [True, True, True, False]


def test_no_pair_guesses_across_a_boundary():
    (row,) = pack_samples([sample(6, number=1), sample(4, number=2)], 16)
    for feature, token, target in pairs([row]):
        assert feature + 1 == token == target - 1
    assert row.positions_P.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row.segments_P.tolist() == [0] * 5 + [1] * 3


def test_pairs_see_what_came_before_them_in_their_own_sample_only():
    (row,) = pack_samples([sample(4), sample(3, number=2)], 16)
    seen = visible(row.segments_P, torch.arange(5))
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert visible(row.segments_P, torch.tensor([2, 4]), 1).int().tolist() == [
        [1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0],
    ]


def test_only_what_guesses_the_response_counts():
    for num_prompt, first in ((1, 1002), (2, 1002), (3, 1003), (6, 1006)):
        rows = pack_samples([sample(8, num_prompt)], 16)
        assert [target for _, _, target in pairs(rows)] == list(range(first, 1008))
        assert len(pairs(pack_samples([sample(8, num_prompt)], 16, response_only=False))) == 6
    assert pack_samples([sample(8, 8)], 16) == []
    assert pack_samples([sample(2)], 16) == []


@given(
    lengths=st.lists(st.tuples(st.integers(2, 90), st.integers(1, 40)), min_size=1, max_size=8),
    num_pairs=st.integers(4, 40),
)
@settings(deadline=None, max_examples=60)
def test_every_pair_counts_once_however_samples_are_cut(lengths, num_pairs):
    samples = [sample(n, p, number) for number, (n, p) in enumerate(lengths)]
    rows = pack_samples(samples, num_pairs)
    wanted = [
        [1000 * number + t + i for i in range(3)]
        for number, (n, p) in enumerate(lengths)
        for t in range(max(p - 2, 0), n - 2)
    ]
    assert pairs(rows) == sorted(wanted)
    assert all(len(row.tokens_P) <= num_pairs for row in rows)


def test_a_long_sample_keeps_context_where_it_is_cut():
    rows = pack_samples([sample(100)], 32)
    for row in rows:
        first = int(row.counts_P.nonzero()[0])
        assert first == 8 or int(row.tokens_P[0]) == 1001


def test_rows_too_short_to_cut_are_refused():
    with pytest.raises(ValueError, match="at least 4 pairs"):
        pack_samples([sample(9)], 3)


def gradients(layer, rows, policy_ends, config):
    layer.zero_grad()
    for row in rows:
        draft_losses(layer, row, policy_ends, config).total.backward()
    return torch.cat([value.grad.flatten() for value in layer.parameters() if value.grad is not None])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_gradient_of_a_row_is_the_sum_of_those_of_its_samples(kind, dtype, tolerance):
    model = policy(kind, dtype)
    samples = [
        *said(model, [[1, 2, 3], [4, 5, 6]], 9, seed=1),
        *said(model, [[7, 8]], 14, seed=2),
        *said(model, [[9, 10, 11, 12]], 5, version=2, seed=3),
    ]
    layer = drafter(model).to(dtype)
    for config in (LossConfig(), LossConfig(tokens="lk", num_passes=4)):
        packed = pack_samples(samples, 256)
        assert len(packed) == 1
        alone = [row for one in samples for row in pack_samples([one], 256)]
        assert len(alone) == len(samples)
        together = gradients(layer, packed, ends(model), config)
        apart = gradients(layer, alone, ends(model), config)
        assert torch.allclose(together, apart, rtol=0, atol=tolerance * float(apart.abs().max()))
