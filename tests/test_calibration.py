"""What scores are worth: against drafters whose worth is known."""

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression

from aedit.spec_rollout.calibration import Calibration, Nodes, accepted_nodes, isotonic
from aedit.spec_rollout.drafts import Draft


def overconfident(chance):
    return 0.9 * chance**1.7


def humble(chance):
    return np.sqrt(chance)


def chains(rng, rows, depth, short=False):
    """A draft of lines with random scores."""
    chance = rng.beta(2, 1, size=(rows, depth))
    scores = torch.tensor(np.log(chance).cumsum(1), dtype=torch.float32)
    counts = torch.tensor(rng.integers(0, depth + 1, rows)) if short else None
    return Draft(torch.zeros(rows, depth, dtype=torch.int64), None, counts, scores)


def up_to(nodes, num_verified):
    """(B, N): the first nodes of each row."""
    return np.broadcast_to(np.arange(nodes.real_BN.shape[1]) < num_verified, nodes.real_BN.shape)


def judged(rng, nodes, num_verified, worth):
    """How many nodes of each line a policy accepts that agrees with `worth` of the drafter's chance."""
    says = (rng.random(nodes.chance_BN.shape) < worth(nodes.chance_BN)) & nodes.real_BN
    says[:, num_verified:] = False
    return np.cumprod(says, axis=1).sum(1)


def taught(worth, steps, *, seed=0, verified=lambda rng, nodes: 6, calibration=None):
    rng = np.random.default_rng(seed)
    calibration = calibration or Calibration()
    for _ in range(steps):
        nodes = Nodes.of(chains(rng, 4, 6, short=True))
        count = verified(rng, nodes)
        accepted = judged(rng, nodes, count, worth)
        calibration.learn(nodes, up_to(nodes, count), accepted_nodes(nodes.real_BN.shape, accepted, None))
    return calibration


def expected_error(calibration, worth, seed=99):
    """On drafts that it has not seen: expected calibration error, in 20 bins of what it says."""
    rng = np.random.default_rng(seed)
    nodes = Nodes.of(chains(rng, 20_000, 1))
    said = calibration.chances(nodes)[:, 0]
    came = rng.random(len(said)) < worth(nodes.chance_BN[:, 0])
    bins = (said * 20).astype(int)
    off = [abs(said[bins == b].mean() - came[bins == b].mean()) * (bins == b).mean() for b in set(bins)]
    return sum(off)


@pytest.mark.parametrize("worth", [overconfident, humble])
def test_scores_become_chances_within_5_percent(worth):
    calibration = taught(worth, 400)
    assert expected_error(Calibration(), worth) > 0.08
    assert expected_error(calibration, worth) <= 0.04
    assert calibration.error <= 0.05


@pytest.mark.parametrize(
    "verified",
    [
        lambda rng, nodes: int(rng.integers(1, 7)),
        lambda rng, nodes: 6 if nodes.chance_BN[:, :2].mean() > 0.7 else 2,
    ],
)
def test_verifying_only_what_looks_good_does_not_bias_the_map(verified):
    assert expected_error(taught(overconfident, 600, verified=verified), overconfident) <= 0.04


def test_before_anything_is_known_scores_are_taken_at_their_word():
    nodes = Nodes.of(chains(np.random.default_rng(0), 3, 4))
    assert Calibration().chances(nodes) == pytest.approx(np.clip(nodes.chance_BN, 0.025, 0.975))
    assert Calibration().error == 0


def test_a_new_version_of_the_drafter_starts_from_the_old_map_and_soon_has_its_own():
    calibration = taught(overconfident, 400)
    calibration.see(1)
    before = expected_error(calibration, overconfident)
    calibration.see(2)
    assert expected_error(calibration, overconfident) == before
    taught(humble, 60, calibration=calibration)
    assert expected_error(calibration, humble) <= 0.06
    unannounced = taught(humble, 60, calibration=taught(overconfident, 400))
    assert expected_error(unannounced, humble) > 0.1


def test_a_policy_that_moves_is_followed():
    calibration = taught(humble, 1200, calibration=taught(overconfident, 400))
    assert expected_error(calibration, humble) <= 0.05


def tree(parents, chance):
    """One row; chances given the parent."""
    scores = []
    for parent, each in zip(parents, chance, strict=True):
        scores.append((scores[parent] if parent >= 0 else 0.0) + np.log(each))
    tokens = torch.zeros(1, len(parents), dtype=torch.int64)
    return Draft(tokens, torch.tensor([parents]), None, torch.tensor([scores], dtype=torch.float32))


PARENTS, CHANCE = [-1, 0, -1, 1, 2, 0], [0.6, 0.5, 0.3, 0.9, 0.8, 0.2]


def test_a_tree_is_read_by_its_parents():
    nodes = Nodes.of(tree(PARENTS, CHANCE))
    assert nodes.chance_BN[0] == pytest.approx(CHANCE, rel=1e-5)
    assert nodes.first_BN[0].tolist() == [True, True, False, True, True, False]
    along = nodes.along_paths(nodes.chance_BN.copy())
    assert along[0] == pytest.approx([0.6, 0.3, 0.3, 0.27, 0.24, 0.12], rel=1e-5)


def test_only_nodes_of_accepted_parents_are_judged():
    nodes = Nodes.of(tree(PARENTS, CHANCE))
    accepted = accepted_nodes((1, 6), [2], [[0, 1, 2, 5]])
    assert accepted[0].tolist() == [True, True, False, False, False, False]
    assert nodes.seen(up_to(nodes, 6), accepted)[0].tolist() == [True, True, True, True, False, True]
    assert nodes.seen(up_to(nodes, 3), accepted)[0].tolist() == [True, True, True, False, False, False]


def test_a_chain_is_judged_up_to_the_first_refusal():
    draft = chains(np.random.default_rng(0), 3, 4)
    nodes = Nodes.of(Draft(draft.tokens_BN, None, torch.tensor([4, 4, 1]), draft.scores_BN))
    accepted = accepted_nodes((3, 4), [2, 4, 1], None)
    assert nodes.seen(up_to(nodes, 4), accepted).astype(int).tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]


def test_a_later_sibling_has_a_map_of_its_own():
    rng, calibration = np.random.default_rng(0), Calibration()
    nodes = Nodes.of(tree([-1, -1], [0.5, 0.4]))
    for _ in range(400):
        draw = rng.random()
        path = [0, 1] if draw < 0.8 else [0, 2] if draw < 0.9 else [0, 0]
        accepted = accepted_nodes((1, 2), [int(path[1] > 0)], [path])
        calibration.learn(nodes, up_to(nodes, 2), accepted)
    assert calibration.chances(nodes)[0] == pytest.approx([0.8, 0.1], abs=0.06)


def test_drafts_are_learnt_from_together_as_they_are_one_by_one():
    rng = np.random.default_rng(3)
    parts = [Nodes.of(chains(rng, 2, 5, short=True)) for _ in range(3)]
    whole = Nodes.joined(parts)
    along = whole.along_paths(whole.chance_BN)
    assert np.array_equal(along, np.concatenate([each.along_paths(each.chance_BN) for each in parts]))
    forest = Nodes.joined([Nodes.of(tree(PARENTS, CHANCE))] * 2)
    assert forest.along_paths(forest.chance_BN)[1] == pytest.approx(
        [0.6, 0.3, 0.3, 0.27, 0.24, 0.12], rel=1e-5
    )


def test_a_draft_that_is_used_again_changes_nothing():
    draft = chains(np.random.default_rng(0), 2, 3)
    nodes = Nodes.of(draft)
    before = nodes.chance_BN.copy()
    draft.scores_BN.zero_()
    assert (nodes.chance_BN == before).all()


@pytest.mark.parametrize("seed", range(20))
def test_adjacent_violators_are_pooled_as_scipy_does(seed):
    rng = np.random.default_rng(seed)
    values, weights = rng.random(20).round(1), rng.random(20) + 0.1
    expected = isotonic_regression(values, weights=weights).x
    assert isotonic(values, weights) == pytest.approx(expected)
