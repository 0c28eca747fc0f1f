"""Tests which tokens may be sampled, which are, and which drafts are accepted.

The oracles are transformers and plain loops.
"""

import random

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.sampling import (
    RowSampling,
    Sampling,
    accept_path,
    coupled_tokens,
    distribution,
    logprobs,
    node_depths,
    warp_logits,
)

V = 40

PLAIN = Sampling()
ALL_KINDS = [
    PLAIN,
    Sampling(temperature=0.0),
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_k=1000, temperature=1.5),
    Sampling(top_p=0.6),
    Sampling(top_p=0.05, temperature=2.0),
    Sampling(temperature=1.3, top_k=12, top_p=0.9),
    Sampling(allowed=torch.arange(V) % 3 == 0),
    Sampling(allowed=torch.arange(V) % 2 == 0, temperature=0.5, top_k=4, top_p=0.8),
    Sampling(min_new_tokens=3, stop_tokens=(1, 7)),
    Sampling(min_new_tokens=3, stop_tokens=(0,), temperature=0.8, top_p=0.7),
]


def draw_logits(*shape, seed=0, dtype=torch.float64):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_transformers(logits_V, sampling, drawn):
    """Return one distribution by transformers' own processors, in its order."""
    x = logits_V[None].clone()
    if sampling.allowed is not None:
        x[:, ~sampling.allowed] = -torch.inf
    if sampling.min_new_tokens:
        minimum = MinNewTokensLengthLogitsProcessor(
            0, sampling.min_new_tokens, list(sampling.stop_tokens), "cpu"
        )
        x = minimum(torch.zeros(1, drawn, dtype=torch.long), x)
    if sampling.temperature not in (0, 1):
        x = TemperatureLogitsWarper(sampling.temperature)(None, x)
    if sampling.top_k:
        x = TopKLogitsWarper(sampling.top_k)(None, x)
    if sampling.top_p < 1:
        x = TopPLogitsWarper(sampling.top_p)(None, x)
    return x[0]


@pytest.mark.parametrize("kinds", [ALL_KINDS, [PLAIN] * 2, ALL_KINDS[:3], ALL_KINDS[3:5], ALL_KINDS[-2:]])
def test_every_row_is_shaped_as_transformers_would_shape_it(kinds):
    logits = draw_logits(len(kinds), 5, V)
    drawn = torch.arange(5).expand(len(kinds), 5) + torch.arange(len(kinds))[:, None] % 2
    result = warp_logits(logits, RowSampling.of(kinds, V), drawn)
    for row, sampling in enumerate(kinds):
        for i in range(5):
            wanted = by_transformers(logits[row, i], sampling, int(drawn[row, i]))
            np.testing.assert_allclose(result[row, i], wanted, rtol=1e-6)  # a temperature is a float32


def test_a_row_is_shaped_alike_alone_and_among_others():
    for dtype in (torch.float32, torch.float64):
        logits = draw_logits(len(ALL_KINDS), 3, V, dtype=dtype)
        drawn = torch.tensor([[1, 2, 3]])
        together = warp_logits(logits, RowSampling.of(ALL_KINDS, V), drawn.expand(len(ALL_KINDS), 3))
        for row, sampling in enumerate(ALL_KINDS):
            alone = warp_logits(logits[row : row + 1, 1:2], RowSampling.of([sampling], V), drawn[:, 1:2])
            assert torch.equal(alone[0, 0], together[row, 1]), sampling


def test_a_row_that_asks_for_nothing_costs_nothing():
    logits = draw_logits(2, 3, V)
    assert warp_logits(logits, RowSampling.of([PLAIN, Sampling(temperature=0)], V)) is logits


def test_low_precision_logits_are_shaped_in_float32():
    logits = draw_logits(1, 2, V).bfloat16()
    rows = RowSampling.of([Sampling(top_p=0.9)], V)
    assert warp_logits(logits, rows).dtype == torch.float32
    assert torch.equal(warp_logits(logits, rows), warp_logits(logits.float(), rows))


def test_of_equally_likely_tokens_top_p_takes_the_first():
    result = warp_logits(torch.zeros(1, 1, 8), RowSampling.of([Sampling(top_p=0.5)], 8))
    assert torch.isfinite(result[0, 0]).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("at_once", [0, 2 * 3 * V, 10**9])
def test_the_log_probability_is_that_at_the_temperature_before_any_mask(at_once, monkeypatch):
    """Large logits are computed a few rows at once."""
    monkeypatch.setattr(distribution, "CACHED_NUMBERS", at_once)
    kinds = [*ALL_KINDS, Sampling(temperature=1e-3)]
    logits, tokens = draw_logits(len(kinds), 3, V), torch.randint(V, (len(kinds), 3))
    result = logprobs(logits, tokens, RowSampling.of(kinds, V))
    for row, sampling in enumerate(kinds):
        x = logits[row].numpy() / (np.float32(sampling.temperature) or 1.0)
        x = x - x.max(-1, keepdims=True)
        wanted = x - np.log(np.exp(x).sum(-1, keepdims=True))
        np.testing.assert_allclose(result[row], wanted[np.arange(3), tokens[row]], rtol=1e-12)


def test_a_token_is_the_argmax_with_the_noise_and_without_it_where_greedy():
    logits, noise = draw_logits(3, 4, V), draw_logits(3, 4, V, seed=1)
    temperature = torch.tensor([1.0, 0.0, 0.5])
    tokens = coupled_tokens(logits, noise, temperature)
    for row in (0, 2):
        assert torch.equal(tokens[row], (logits + noise)[row].argmax(-1))
    assert torch.equal(tokens[1], logits[1].argmax(-1))
    assert torch.equal(coupled_tokens(logits, None), logits.argmax(-1))
    assert coupled_tokens(torch.zeros(1, 1, 5), None).item() == 0


def draft_of(tokens, parents=None, counts=None):
    return Draft(
        torch.tensor(tokens),
        None if parents is None else torch.tensor(parents),
        None if counts is None else torch.tensor(counts),
        torch.zeros(len(tokens), len(tokens[0])),
    )


def by_hand(guesses, parents, count, drawn):
    """Return the path from the root, and what is emitted, of one row."""
    path = [0]
    while True:
        here = path[-1]
        children = [n + 1 for n in range(count) if parents[n] + 1 == here and guesses[n] == drawn[here]]
        if not children:
            return path, [drawn[i] for i in path]
        path.append(children[0])


def random_tree(rng, num_nodes):
    parents = [rng.randrange(-1, n) for n in range(num_nodes)]
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return parents, depths


def assert_walks_as_by_hand(accepted, guesses, parents, counts, drawn):
    for b, tokens in enumerate(drawn):
        path, emitted = by_hand(guesses[b], parents[b], counts[b], tokens)
        kept = int(accepted.counts_B[b]) + 1
        assert accepted.path_BM[b, :kept].tolist() == path
        assert accepted.emitted_BM[b, :kept].tolist() == emitted
        assert 0 <= accepted.path_BM[b].min() <= accepted.path_BM[b].max() <= len(guesses[b])


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_down_any_trees_is_that_of_a_plain_loop(seed):
    rng = random.Random(seed)
    num_rows, num_nodes = rng.randint(1, 4), rng.randint(1, 9)
    trees = [random_tree(rng, num_nodes) for _ in range(num_rows)]
    guesses = [[rng.randrange(3) for _ in range(num_nodes)] for _ in range(num_rows)]
    drawn = [[rng.randrange(3) for _ in range(num_nodes + 1)] for _ in range(num_rows)]
    counts = [rng.randint(0, num_nodes) for _ in range(num_rows)] if seed % 2 else [num_nodes] * num_rows
    parents = [tree[0] for tree in trees]
    draft = draft_of(guesses, parents, counts if seed % 2 else None)
    deepest = max(max(tree[1]) for tree in trees)
    for depth in (None, deepest):
        accepted = accept_path(draft, torch.tensor(drawn), depth)
        assert_walks_as_by_hand(accepted, guesses, parents, counts, drawn)
        assert node_depths(draft.parents_BN, depth).tolist() == [tree[1] for tree in trees]


@pytest.mark.parametrize("seed", range(30))
def test_the_walk_along_chains_is_that_of_a_plain_loop(seed):
    rng = random.Random(seed)
    num_rows, num_nodes = rng.randint(1, 4), rng.randint(0, 6)
    guesses = [[rng.randrange(2) for _ in range(num_nodes)] for _ in range(num_rows)]
    drawn = [[rng.randrange(2) for _ in range(num_nodes + 1)] for _ in range(num_rows)]
    counts = [rng.randint(0, num_nodes) for _ in range(num_rows)] if seed % 2 else [num_nodes] * num_rows
    chain = [list(range(-1, num_nodes - 1))] * num_rows
    tokens = torch.tensor(guesses, dtype=torch.long)
    kept = torch.tensor(counts) if seed % 2 else None
    accepted = accept_path(Draft(tokens, None, kept, tokens.float()), torch.tensor(drawn))
    assert_walks_as_by_hand(accepted, guesses, chain, counts, drawn)
    if num_nodes:
        as_tree = accept_path(Draft(tokens, torch.tensor(chain), kept, tokens.float()), torch.tensor(drawn))
        assert torch.equal(as_tree.counts_B, accepted.counts_B)


def test_of_two_children_that_say_the_same_the_first_stands():
    draft = draft_of([[5, 5, 6, 7]], parents=[[-1, -1, 1, 0]])
    accepted = accept_path(draft, torch.tensor([[5, 7, 6, 0, 9]]))
    assert accepted.counts_B.tolist() == [2]
    assert accepted.path_BM[0, :3].tolist() == [0, 1, 4]
    assert accepted.emitted_BM[0, :3].tolist() == [5, 7, 9]


def test_nothing_stands_of_an_empty_draft():
    accepted = accept_path(draft_of([[3, 4]], counts=[0]), torch.tensor([[3, 4, 5]]))
    assert (accepted.counts_B.tolist(), accepted.emitted_BM[0, 0].item()) == ([0], 3)
