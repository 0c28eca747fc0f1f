"""Tests the calibration of draft scores against drafters of known acceptance."""

import numpy as np
import pytest
import torch

from aedit.spec_rollout.choose import DraftNodes, accepted_nodes
from aedit.spec_rollout.choose.calibration import NUM_LEVELS, AcceptanceCalibration
from aedit.spec_rollout.drafters import Draft


def overconfident(chance):
    return 0.9 * chance**1.7


def humble(chance):
    return np.sqrt(chance)


def chains(rng, rows, depth, short=False):
    """Return a draft of chains with random scores."""
    chance = rng.beta(2, 1, size=(rows, depth))
    scores = torch.tensor(np.log(chance).cumsum(1), dtype=torch.float32)
    counts = torch.tensor(rng.integers(0, depth + 1, rows)) if short else None
    return Draft(torch.zeros(rows, depth, dtype=torch.int64), None, counts, scores)


def said(draft):
    """Return the drafter's probability of each node of the chains, given its parent, (B, N)."""
    scores = draft.scores_BN.double().numpy()
    return np.exp(np.diff(scores, axis=1, prepend=0.0))


def up_to(nodes, num_verified):
    """Return a mask of the first `num_verified` nodes of each row, (B, N)."""
    return np.broadcast_to(np.arange(nodes.real_BN.shape[1]) < num_verified, nodes.real_BN.shape)


def judged(rng, nodes, num_verified, worth):
    """Return how many nodes of each row a policy accepts whose agreement is `worth(chance)`."""
    chance = (nodes.levels_BN + 0.5) / NUM_LEVELS
    says = (rng.random(chance.shape) < worth(chance)) & nodes.real_BN
    says[:, num_verified:] = False
    return np.cumprod(says, axis=1).sum(1)


def taught(worth, steps, *, seed=0, verified=lambda rng, nodes: 6, calibration=None):
    rng = np.random.default_rng(seed)
    calibration = calibration or AcceptanceCalibration()
    for _ in range(steps):
        nodes = DraftNodes.of(chains(rng, 4, 6, short=True))
        count = verified(rng, nodes)
        accepted = judged(rng, nodes, count, worth)
        calibration.learn(nodes, up_to(nodes, count), accepted_nodes(nodes.real_BN.shape, accepted, None))
    return calibration


def expected_error(calibration, worth, seed=99):
    """Return the expected calibration error on unseen drafts, in 20 bins of the predicted chance."""
    rng = np.random.default_rng(seed)
    draft = chains(rng, 20_000, 1)
    promised = calibration.probabilities(DraftNodes.of(draft))[:, 0]
    came = rng.random(len(promised)) < worth(said(draft)[:, 0])
    bins = (promised * 20).astype(int)
    off = [abs(promised[bins == b].mean() - came[bins == b].mean()) * (bins == b).mean() for b in set(bins)]
    return sum(off)


@pytest.mark.parametrize("worth", [overconfident, humble])
def test_scores_become_chances_within_5_percent(worth):
    calibration = taught(worth, 400)
    assert expected_error(AcceptanceCalibration(), worth) > 0.08
    assert expected_error(calibration, worth) <= 0.04


@pytest.mark.parametrize(
    "verified",
    [
        lambda rng, nodes: int(rng.integers(1, 7)),
        lambda rng, nodes: 6 if nodes.levels_BN[:, :2].mean() > 0.7 * NUM_LEVELS else 2,
    ],
)
def test_verifying_only_what_looks_good_does_not_bias_the_map(verified):
    assert expected_error(taught(overconfident, 600, verified=verified), overconfident) <= 0.04


def test_before_anything_is_known_scores_are_taken_at_their_word():
    draft = chains(np.random.default_rng(0), 3, 4)
    chances = AcceptanceCalibration().probabilities(DraftNodes.of(draft))
    assert chances == pytest.approx(said(draft), abs=0.5 / NUM_LEVELS + 1e-6)


def test_a_new_version_of_the_drafter_starts_from_the_old_map_and_soon_has_its_own():
    calibration = taught(overconfident, 400)
    calibration.set_version(1)
    before = expected_error(calibration, overconfident)
    calibration.set_version(2)
    assert expected_error(calibration, overconfident) == before
    taught(humble, 60, calibration=calibration)
    assert expected_error(calibration, humble) <= 0.06
    unannounced = taught(humble, 60, calibration=taught(overconfident, 400))
    assert expected_error(unannounced, humble) > 0.1


def test_a_policy_that_moves_is_followed():
    calibration = taught(humble, 1200, calibration=taught(overconfident, 400))
    assert expected_error(calibration, humble) <= 0.05


def tree(parents, chance):
    """Return a tree of one row from chances given the parent."""
    scores = []
    for parent, each in zip(parents, chance, strict=True):
        scores.append((scores[parent] if parent >= 0 else 0.0) + np.log(each))
    tokens = torch.zeros(1, len(parents), dtype=torch.int64)
    return Draft(tokens, torch.tensor([parents]), None, torch.tensor([scores], dtype=torch.float32))


PARENTS, CHANCE = [-1, 0, -1, 1, 2, 0], [0.6, 0.5, 0.3, 0.9, 0.8, 0.2]


def test_a_tree_is_read_by_its_parents():
    nodes = DraftNodes.of(tree(PARENTS, CHANCE))
    later = nodes.levels_BN[0] >= NUM_LEVELS
    assert later.tolist() == [False, False, True, False, False, True]
    assert nodes.levels_BN[0] % NUM_LEVELS == pytest.approx(np.array(CHANCE) * NUM_LEVELS, abs=1)
    along = nodes.along_paths(np.array([CHANCE]))
    assert along[0] == pytest.approx([0.6, 0.3, 0.3, 0.27, 0.24, 0.12])


def test_only_nodes_of_accepted_parents_are_judged():
    nodes = DraftNodes.of(tree(PARENTS, CHANCE))
    accepted = accepted_nodes((1, 6), [2], [[0, 1, 2, 5]])
    assert accepted[0].tolist() == [True, True, False, False, False, False]
    assert nodes.observed(up_to(nodes, 6), accepted)[0].tolist() == [True, True, True, True, False, True]
    assert nodes.observed(up_to(nodes, 3), accepted)[0].tolist() == [True, True, True, False, False, False]


def test_a_chain_is_judged_up_to_the_first_refusal():
    draft = chains(np.random.default_rng(0), 3, 4)
    nodes = DraftNodes.of(Draft(draft.tokens_BN, None, torch.tensor([4, 4, 1]), draft.scores_BN))
    accepted = accepted_nodes((3, 4), [2, 4, 1], None)
    assert nodes.observed(up_to(nodes, 4), accepted).astype(int).tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]


def test_a_later_sibling_has_a_map_of_its_own():
    rng, calibration = np.random.default_rng(0), AcceptanceCalibration()
    nodes = DraftNodes.of(tree([-1, -1], [0.53, 0.4]))
    for _ in range(400):
        draw = rng.random()
        path = [0, 1] if draw < 0.8 else [0, 2] if draw < 0.9 else [0, 0]
        accepted = accepted_nodes((1, 2), [int(path[1] > 0)], [path])
        calibration.learn(nodes, up_to(nodes, 2), accepted)
    assert calibration.probabilities(nodes)[0] == pytest.approx([0.8, 0.1], abs=0.06)


@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("short", [False, True])
def test_what_a_draft_will_bring_is_the_same_by_loops_and_by_arrays(rows, short):
    rng = np.random.default_rng(rows)
    lines = chains(rng, rows, 6, short)
    forest = Draft(lines.tokens_BN, torch.tensor([PARENTS] * rows), lines.counts_B, lines.scores_BN)
    calibration = taught(overconfident, 40)
    for draft in (lines, forest):
        nodes = DraftNodes.of(draft)
        expected = nodes.along_paths(calibration.probabilities(nodes)).sum(0)
        assert calibration.expected_accepted(draft) == pytest.approx(expected)


def test_a_draft_that_is_used_again_changes_nothing():
    draft = chains(np.random.default_rng(0), 2, 3)
    nodes = DraftNodes.of(draft)
    before = nodes.levels_BN.copy()
    draft.scores_BN.zero_()
    assert (nodes.levels_BN == before).all()


def test_what_is_no_node_counts_for_nothing_whatever_stands_there():
    draft = Draft(
        torch.zeros(2, 3, dtype=torch.int64),
        None,
        torch.tensor([1, 0]),
        torch.tensor([[-0.1, -torch.inf, -torch.inf], [-torch.inf] * 3]),
    )
    nodes = DraftNodes.of(draft)
    assert nodes.real_BN.tolist() == [[True, False, False], [False] * 3]
    assert (AcceptanceCalibration().probabilities(nodes) > 0).tolist() == nodes.real_BN.tolist()
    assert not nodes.observed(up_to(nodes, 3), np.ones((2, 3), dtype=bool))[1].any()
