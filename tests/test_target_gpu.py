"""Tests the policy's step as recorded CUDA graphs and, without a GPU, the padding that recording adds."""

import pytest
import torch
from kit.rollouts import prefilled
from test_target import made

from aedit.spec_rollout.model import GraphCache, KVMemory, Target, batch_bucket, cache, context_bucket

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TREE = torch.tensor([[-1, 0, 0, 2]])
TREES = torch.tensor(
    [[-1, 0, 0, 2], [-1, -1, 0, 1], [-1, 0, 1, 2], [-1, -1, -1, 2], [-1, 0, 0, 0], [-1, -1, 1, 1]]
)
"""Each row has another tree, so that using a neighbour's tree is detected."""


class Unrecorded:
    """Stand-in for `GraphCache` that runs what would be recorded."""

    def __init__(self):
        self.keys = []

    def run(self, key, function, *inputs):
        self.keys.append(key)
        return function(*inputs)


def drawn(device, *shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def filled(target, lengths):
    for row, length in enumerate(lengths):
        prefilled(target, drawn(target.device, length, seed=row), row)
    return target


def two_targets(lengths, dtype=torch.float64, device="cpu"):
    model = made("llama", dtype).to(device)
    return [filled(Target.of(model, rows=7, max_tokens=60, nodes=4), lengths) for _ in range(2)]


def check_steps_are_equal(target, eager, lengths, tolerance):
    """Check chains, trees and rows of several sizes, one after the other, on two targets."""
    steps = [
        (1, 1, False),
        (5, 1, False),
        (5, 3, False),
        (6, 5, True),
        (5, 5, True),
        (3, 5, False),
        (5, 1, False),
    ]
    for seed, (num_rows, q, is_tree) in enumerate(steps):
        tokens = drawn(target.device, num_rows, q, seed=seed)
        tree = TREES[:num_rows].to(target.device) if is_tree else None
        ours = target.step(tokens, lengths[:num_rows], tree)
        theirs = eager.step(tokens, lengths[:num_rows], tree)
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)


LENGTHS = [9, 30, 1, 17, 60, 4, 25]


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_rows_and_slots_that_a_recording_adds_change_nothing(layout, monkeypatch):
    monkeypatch.setattr(cache, "default_layout", lambda device: layout)
    target, eager = two_targets(LENGTHS)
    target.graphs = Unrecorded()
    check_steps_are_equal(target, eager, LENGTHS, 1e-12)
    # (rows, q, context, chain): 5 rows are computed as 6, 6 as 6, and 65 slots are all there are.
    assert target.graphs.keys == [
        (1, 1, 65, True),
        (6, 1, 65, True),
        (6, 3, 65, True),
        (6, 5, 65, False),
        (6, 5, 65, False),
        (3, 5, 65, True),
        (6, 1, 65, True),
    ]


def test_a_row_that_is_only_computed_along_keeps_all_it_could_be_asked_for():
    (target, _) = two_targets(LENGTHS)
    target.graphs = Unrecorded()
    kept = [*LENGTHS[:5], 60, 25]
    before = [target.read_kv(row, length) for row, length in enumerate(kept)]
    last = target.read_kv(5, 65)
    target.step(drawn("cpu", 5, 5), LENGTHS[:5])
    assert not torch.equal(target.read_kv(5, 65), last)
    for row, length in enumerate(kept):
        assert torch.equal(target.read_kv(row, length), before[row])


def test_a_row_that_is_only_computed_along_does_not_write_to_blocks_that_it_gave_back():
    """Row 5 was full; its last block is another row's when a recording of 6 rows computes 5."""
    target = Target.of(made("llama"), rows=6, max_tokens=60, nodes=4, kv=KVMemory("blocks"))
    target.graphs = Unrecorded()
    prefilled(target, drawn("cpu", 65, seed=5), 5)
    target.release_row(5)
    for row in range(5):
        prefilled(target, drawn("cpu", 60, seed=row), row)
    before = [target.read_kv(row, 60) for row in range(5)]
    target.step(drawn("cpu", 5, 1), [60] * 5)
    assert target.graphs.keys == [(6, 1, 65, True)]
    for row in range(5):
        assert torch.equal(target.read_kv(row, 60), before[row])


def test_buckets_are_few_and_never_too_small():
    rows = [batch_bucket(n, 24) for n in range(1, 25)]
    assert sorted(set(rows)) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert all(n <= bucket < max(4, 1.6 * n) for n, bucket in enumerate(rows, 1))
    assert batch_bucket(11, 11) == 11
    contexts = [context_bucket(n, 5000) for n in range(1, 5001)]
    assert all(n <= bucket <= max(256, 1.25 * n + 1) for n, bucket in enumerate(contexts, 1))
    assert len(set(contexts)) < 25
    assert context_bucket(60, 65) == 65


@pytest.fixture
def recorded():
    target, eager = two_targets(LENGTHS, device="cuda")
    eager.graphs = Unrecorded()
    return target, eager


class TestOnAGpu:
    pytestmark = gpu

    def test_a_recorded_step_is_the_step(self, recorded):
        check_steps_are_equal(*recorded, LENGTHS, 1e-10)
        assert len(recorded[0].graphs) == 5

    def test_a_recorded_step_in_bfloat16_is_the_step(self):
        target, eager = two_targets(LENGTHS, torch.bfloat16, "cuda")
        eager.graphs = Unrecorded()
        check_steps_are_equal(target, eager, LENGTHS, 1e-2)

    def test_new_weights_are_seen_by_what_was_recorded_before(self, recorded):
        target, eager = recorded
        tokens = drawn("cuda", 5, 2)
        before = target.step(tokens, LENGTHS[:5])[1]
        with torch.no_grad():
            target.head.mul_(2.0)
            target.weights.norm.mul_(0.5)
        after = target.step(tokens, LENGTHS[:5])[1]
        torch.testing.assert_close(after, before * 0.5)
        torch.testing.assert_close(after, eager.step(tokens, LENGTHS[:5])[1])

    def test_hidden_states_outlive_the_next_step(self, recorded):
        target, _ = recorded
        hidden = target.step(drawn("cuda", 2, 1, seed=1), LENGTHS[:2])[1]
        kept = hidden.clone()
        target.step(drawn("cuda", 2, 1, seed=2), LENGTHS[:2])
        assert torch.equal(hidden, kept)

    def test_a_step_and_keeping_its_path_wait_for_nothing(self, recorded):
        target, _ = recorded
        tokens, tree = drawn("cuda", 5, 5), TREE.expand(5, -1).cuda()
        path, counts = torch.tensor([[0, 1, 2]]).expand(5, -1).cuda(), torch.full((5,), 2).cuda()
        target.step(tokens, LENGTHS[:5], tree)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            target.step(tokens, LENGTHS[:5], tree)
            target.keep_path(LENGTHS[:5], path, counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_of_too_many_recordings_the_one_least_used_is_forgotten(self):
        graphs, made_of = GraphCache(torch.device("cuda"), max_graphs=2), []

        def doubled(x):
            made_of.append(x)
            return (x * 2,)

        x = torch.arange(3.0, device="cuda")
        for key, expected in (("a", 3), ("b", 6), ("a", 6), ("c", 9), ("a", 9), ("b", 12)):
            assert graphs.run(key, doubled, x)[0].tolist() == [0, 2, 4]
            assert (len(made_of), len(graphs)) == (expected, min(2, expected // 3))
