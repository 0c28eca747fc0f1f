"""Tests best-first trees against an enumeration of all trees."""

import itertools

import pytest
import torch

from aedit.spec_rollout.drafters import tree
from aedit.spec_rollout.model import ancestors


def grown(seed, levels=3, width=2, rows=3):
    """Return (scores, parents) of trees, by levels, with `width` children per node and many equal scores."""
    random = torch.Generator().manual_seed(seed)
    parents, scores, frontier = [], [], [-1]
    for _ in range(levels):
        level = [node for node in frontier for _ in range(width)]
        steps = -torch.randint(0, 3, (rows, len(level)), generator=random).float()
        above = torch.cat([*scores, torch.zeros(rows, 1)], 1)
        frontier = list(range(len(parents), len(parents) + len(level)))
        scores.append(above[:, level] + steps)
        parents += level
    return torch.cat(scores, 1), torch.tensor(parents).expand(rows, -1)


def connected(nodes, parents):
    return all(parents[node] in (-1, *nodes) for node in nodes)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 14])
def test_the_best_nodes_are_the_connected_tree_with_the_highest_scores(nodes):
    for seed in range(3):
        scores, parents = grown(seed)
        picked, _ = tree.best(scores, parents, nodes)
        for row, (s, p) in enumerate(zip(scores.tolist(), parents.tolist(), strict=True)):
            every = itertools.combinations(range(len(s)), nodes)
            highest = max(sum(s[i] for i in some) for some in every if connected(some, p))
            assert sum(s[i] for i in picked[row].tolist()) == highest
            assert connected(picked[row].tolist(), p)


@pytest.mark.parametrize("nodes", [1, 4, 9, 40])
def test_parents_come_first_and_are_the_same_nodes_as_before(nodes):
    scores, parents = grown(5)
    picked, renamed = tree.best(scores, parents, nodes)
    assert picked.shape == (3, min(nodes, 14))
    for row in range(3):
        for place, (node, parent) in enumerate(zip(picked[row].tolist(), renamed[row].tolist(), strict=True)):
            assert parent < place
            was = parents[row, node].item()
            assert (picked[row, parent].item() if parent >= 0 else -1) == was


def test_the_first_n_of_the_best_are_the_best_n():
    scores, parents = grown(9)
    whole, _ = tree.best(scores, parents, 14)
    for n in range(1, 15):
        assert torch.equal(tree.best(scores, parents, n)[0], whole[:, :n])


def test_among_equals_the_parent_comes_before_its_child():
    scores = torch.zeros(1, 4)
    parents = torch.tensor([[-1, 0, 1, 2]])
    picked, renamed = tree.best(scores, parents, 3)
    assert picked.tolist() == [[0, 1, 2]]
    assert renamed.tolist() == [[-1, 0, 1]]


def test_children_are_the_first_by_rank_and_their_scores_are_of_the_whole_path():
    random = torch.Generator().manual_seed(1)
    logq = torch.log_softmax(torch.randn(2, 3, 11, generator=random), -1)
    ranking = torch.randn(2, 3, 11, generator=random)
    scores = -torch.rand(2, 3, generator=random)
    tokens, summed = tree.children(ranking, logq, scores, 4)
    assert tokens.shape == summed.shape == (2, 12)
    for row, node in itertools.product(range(2), range(3)):
        expected = sorted(range(11), key=lambda v: -ranking[row, node, v])[:4]
        mine = slice(4 * node, 4 * node + 4)
        assert tokens[row, mine].tolist() == expected
        wanted = [scores[row, node] + logq[row, node, v] for v in expected]
        torch.testing.assert_close(summed[row, mine], torch.stack(wanted))
        assert (summed[row, mine] <= scores[row, node]).all()


def test_a_vocabulary_that_is_smaller_than_the_width_gives_all_its_tokens():
    tokens, scores = tree.children(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.zeros(1, 1), 8)
    assert sorted(tokens[0].tolist()) == [0, 1, 2]
    assert scores.shape == (1, 3)


def test_the_frontier_is_the_best_of_the_candidates():
    scores = torch.tensor([[-1.0, -0.5, -0.5, -3.0], [-4.0, -3.0, -2.0, -1.0]])
    assert tree.frontier(scores, 2).tolist() == [[1, 2], [3, 2]]
    assert tree.frontier(scores, 9).shape == (2, 4)


def test_of_a_best_first_tree_each_node_is_seen_from_its_descendants_only():
    scores, parents = grown(2)
    _, renamed = tree.best(scores, parents, 9)
    seen = ancestors(renamed)
    for row in range(3):
        for node in range(9):
            path, at = {0, node + 1}, node
            while (at := renamed[row, at].item()) >= 0:
                path.add(at + 1)
            assert set(seen[row, node + 1].nonzero().flatten().tolist()) == path
