"""Tests rejection sampling: the emitted tokens have the policy's distribution, whatever was drafted."""

import numpy as np
import pytest
import torch
from kit.markov import (
    DEPTH,
    V,
    by_coupling,
    by_rejection,
    chi_square,
    draw_tree,
    p_value,
    plain,
    point_masses,
    rolled_out,
    same,
    total_variation,
    world,
)

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.sampling import coupled_tokens, gumbel, rejection_accept
from aedit.spec_rollout.sampling.noise import uniforms

WORLD = world()
NUM = 200_000


def test_the_world_of_these_tests_is_hard_enough():
    assert 0.25 < total_variation(WORLD) < 0.35


@pytest.mark.parametrize(("change", "num"), [(same, NUM), (point_masses, 60_000)])
def test_every_text_is_as_likely_as_the_policy_makes_it(change, num):
    assert p_value(rolled_out(by_rejection(WORLD, change), num), WORLD) > 1e-3


def test_so_is_every_text_of_coupled_sampling_which_is_that_without_drafts():
    texts = rolled_out(plain(WORLD), NUM)
    assert p_value(texts, WORLD) > 1e-3
    for step in (by_coupling(WORLD), by_coupling(WORLD, draft=draw_tree)):
        assert torch.equal(rolled_out(step, 20_000), texts[:20_000])


def random_distributions(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = 1.5 * torch.randn(size, generator=generator, dtype=torch.float64)
    return p, (p + torch.randn(size, generator=generator, dtype=torch.float64)).log_softmax(-1)


def counted(draw, size, num, at_a_time=10_000):
    return sum(
        torch.bincount(draw(torch.arange(first, first + at_a_time)), minlength=size)
        for first in range(0, num, at_a_time)
    ).numpy()


def assert_is_distributed(seen, logits, num):
    p = logits.softmax(-1).numpy()
    assert np.abs((seen - num * p) / np.sqrt(num * p * (1 - p))).max() < 5
    assert chi_square(seen, num * p) > 1e-3


def test_the_first_token_of_a_million_is_distributed_as_the_policy():
    size, num = 64, 1_000_000
    logits, logq = random_distributions(size)
    generator = torch.Generator().manual_seed(1)

    def draw(ids):
        guesses = torch.multinomial(logq.exp(), len(ids), replacement=True, generator=generator)[:, None]
        draft = Draft(guesses, None, None, guesses.double(), logq.expand(len(ids), 1, size))
        numbers = uniforms(ids, 0 * ids, torch.tensor([[7, 8]]).expand(len(ids), 2))
        return rejection_accept(draft, logits.expand(len(ids), 2, size), numbers).emitted_BM[:, 0]

    assert_is_distributed(counted(draw, size, num), logits, num)


def test_coupled_tokens_are_distributed_as_the_policy_in_float32():
    size, num = 64, 300_000
    logits, _ = random_distributions(size)

    def draw(ids):
        noise = gumbel(ids, 0 * ids, torch.full((len(ids), 1), 9), size)
        return coupled_tokens(logits.float().expand(len(ids), 1, size), noise)[:, 0]

    assert_is_distributed(counted(draw, size, num), logits, num)


def one_by_one(draft, logits, numbers):
    """Run the paper's algorithm for one row, in plain loops."""
    p, count = logits.softmax(-1).numpy(), int(draft.counts_B[0])
    emitted = []
    for n in range(count + 1):
        left = p[n]
        if n < count:
            x, q = int(draft.tokens_BN[0, n]), draft.logq_BNV[0, n].exp().numpy()
            if numbers[n, 0] * q[x] < p[n, x]:
                emitted.append(x)
                continue
            left = np.maximum(p[n] - q, 0)
        emitted.append(int(np.searchsorted(np.cumsum(left), numbers[n, 1].item() * left.sum(), side="right")))
        return emitted


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_judged_as_the_paper_says(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, DEPTH + 1, V, generator=generator, dtype=torch.float64)
    logq = torch.randn(3, DEPTH, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    tokens = torch.randint(V, (3, DEPTH), generator=generator)
    counts = torch.randint(DEPTH + 1, (3,), generator=generator)
    numbers = torch.rand(3, DEPTH + 1, 2, generator=generator, dtype=torch.float64)
    draft = Draft(tokens, None, counts, torch.zeros(3, DEPTH), logq)
    accepted = rejection_accept(draft, logits, numbers)
    for b in range(3):
        row = Draft(tokens[b : b + 1], None, counts[b : b + 1], draft.scores_BN, logq[b : b + 1])
        wanted = one_by_one(row, logits[b], numbers[b])
        assert accepted.counts_B[b] == len(wanted) - 1
        assert accepted.emitted_BM[b, : len(wanted)].tolist() == wanted
    assert accepted.path_BM.tolist() == [list(range(DEPTH + 1))] * 3


def few(tokens, logq, counts=None):
    tokens = torch.tensor([tokens], dtype=torch.long)
    return Draft(tokens, None, counts, torch.zeros(tokens.shape), logq)


def test_a_token_that_may_not_be_drawn_never_stays_and_never_comes():
    logits = torch.tensor([[[0.0, -torch.inf, -torch.inf], [-torch.inf, 0.0, -torch.inf]]])
    logq = torch.tensor([[[-torch.inf, 0.0, -torch.inf]]])
    for u in (2.0**-33, 0.5, 1 - 2.0**-33):
        numbers = torch.full((1, 2, 2), u, dtype=torch.float64)
        for draft in (few([1], logq), few([1], None), few([2], logq)):
            assert rejection_accept(draft, logits, numbers).counts_B.item() == 0
            assert rejection_accept(draft, logits, numbers).emitted_BM[0, 0] == 0
        accepted = rejection_accept(few([0], None), logits, numbers)
        assert (accepted.counts_B.item(), accepted.emitted_BM.tolist()) == (1, [[0, 1]])


def test_where_rounding_leaves_nothing_of_the_residual_the_policy_speaks():
    logits = torch.tensor([[[0.3, -0.4, -torch.inf], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    logq = logits[:, :1].log_softmax(-1) + 1e-8  # as from another order of additions
    for u in (0.1, 0.9):
        numbers = torch.tensor([[[1 - 2.0**-33, u], [0.5, 0.5]]], dtype=torch.float64)
        accepted = rejection_accept(few([0], logq), logits, numbers)
        assert (accepted.counts_B.item(), accepted.emitted_BM[0, 0].item()) == (0, int(u > 0.5))


def test_greedy_rows_emit_the_argmax_whatever_was_drafted():
    logits = torch.tensor([[[0.0, 1.0, 0.5], [3.0, 0.0, 0.0], [0.0, 0.0, 2.0]]]).expand(4, 3, 3)
    guesses = torch.tensor([[1, 0], [1, 2], [0, 0], [2, 2]])
    numbers = torch.rand(4, 3, 2, dtype=torch.float64)
    for logq in (None, torch.zeros(4, 2, 3).log_softmax(-1)):
        draft = Draft(guesses, None, None, guesses.float(), logq)
        accepted = rejection_accept(draft, logits, numbers, torch.zeros(4))
        assert accepted.counts_B.tolist() == [2, 1, 0, 0]
        kept = [
            row[: count + 1] for row, count in zip(accepted.emitted_BM.tolist(), (2, 1, 0, 0), strict=True)
        ]
        assert kept == [[1, 0, 2], [1, 0], [1], [1]]


def test_without_guesses_one_token_is_drawn_from_the_policy():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]])
    draft = few([], None)
    assert [
        rejection_accept(draft, logits, torch.tensor([[[0.9, u]]], dtype=torch.float64)).emitted_BM.tolist()
        for u in (0.1, 0.49, 0.51, 0.99)
    ] == [[[0]], [[0]], [[1]], [[1]]]


def test_a_tree_is_refused():
    draft = Draft(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[-1]]), None, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="chains only"):
        rejection_accept(draft, torch.zeros(1, 2, 4), torch.full((1, 2, 2), 0.5))
