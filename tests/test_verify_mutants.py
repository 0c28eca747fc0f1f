"""Tests that the checks of lossless decoding detect known faults of other implementations.

Rejection is compared with the exact probability of every text, coupled sampling with the text without drafts.
Faults of the engine alone (its cache, where a rollout ends) are in the tests of the engine.
"""

from dataclasses import replace

import pytest
import torch
from kit.markov import (
    DEPTH,
    TREE_PARENTS,
    V,
    by_coupling,
    by_rejection,
    chain_lengths,
    draw_chain,
    draw_tree,
    p_value,
    plain,
    point_masses,
    rolled_out,
    same,
    world,
)

from aedit.spec_rollout.sampling import verify

WORLD = world()
NUM_JUDGED = 25_000
NUM_COMPARED = 2_000


def judged(change=same, draft=draw_chain, shift=lambda numbers: numbers):
    return p_value(rolled_out(by_rejection(WORLD, change, draft, shift), NUM_JUDGED), WORLD)


def assert_passes(p):
    assert p > 1e-3


def assert_is_killed(p):
    assert p < 1e-6


def draw_best(made, rows):
    """Return the most likely tokens, declared as drawn."""
    draft, before, tokens = draw_chain(made, rows), rows.roots, []
    for _ in range(DEPTH):
        before = made.drafter[before].argmax(-1)
        tokens.append(before)
    tokens = torch.stack(tokens, 1)
    before = torch.cat((rows.roots[:, None], tokens[:, :-1]), dim=1)
    return replace(draft, tokens_BN=tokens, logq_BNV=made.drafter[before])


MODES = pytest.mark.parametrize(("change", "draft"), [(same, draw_chain), (point_masses, draw_best)])


@MODES
def test_rejection_as_it_is_passes(change, draft):
    assert_passes(judged(change, draft))


def another_temperature(rows, draft, logits):
    return replace(draft, logq_BNV=(draft.logq_BNV / 0.8).log_softmax(-1)), logits


def at_the_end(draft, logits, wrong):
    """Replace the logits after the last guess by `wrong`."""
    num_nodes = draft.tokens_BN.shape[1]
    ends = num_nodes if draft.counts_B is None else draft.counts_B[:, None, None]
    return draft, wrong.where(torch.arange(num_nodes + 1)[:, None] == ends, logits)


def last_from_the_drafter(rows, draft, logits):
    verified = torch.cat((rows.roots[:, None], draft.tokens_BN), dim=1)
    return at_the_end(draft, logits, WORLD.drafter[verified])


def last_from_the_context_before(rows, draft, logits):
    return at_the_end(draft, logits, logits.roll(1, dims=1))


def contexts_one_token_short(rows, draft, logits):
    return draft, logits.roll(1, dims=1)


def stale_policy(rows, draft, logits):
    apart = torch.randn(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draft, logits * (1 + 0.05 * apart)


def filler_is_judged(rows, draft, logits):
    return replace(draft, counts_B=None), logits


def cut_where_it_is_unsure(rows, draft, logits):
    """Choose the arm by the tokens that have just been drawn, not by the past."""
    chosen = draft.logq_BNV.gather(-1, draft.tokens_BN[..., None])[..., 0]
    sure = (chosen > -1.5).long().cumprod(1).sum(1)
    return replace(draft, counts_B=torch.minimum(draft.counts_B, sure)), logits


def sharper_policy(rows, draft, logits):
    return draft, logits / 0.8


@pytest.mark.parametrize(
    "change",
    [
        another_temperature,
        last_from_the_drafter,
        last_from_the_context_before,
        contexts_one_token_short,
        stale_policy,
        filler_is_judged,
        cut_where_it_is_unsure,
        sharper_policy,
    ],
)
def test_rejection_with_a_wrong_distribution_is_killed(change):
    assert_is_killed(judged(change))


def test_rejection_of_the_best_tokens_as_if_they_were_drawn_is_killed():
    assert_is_killed(judged(draft=draw_best))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_residual", lambda p, q: p),  # SPEC-RL
        ("_residual", lambda p, q: (p - q).abs()),
        ("_is_accepted", lambda u, p, q: u * q < p / 0.9),  # lenience
        ("_is_accepted", lambda u, p, q: p == p),
        ("_q_of_rejected", lambda draft, is_real, counts, p: torch.zeros_like(p)),
    ],
)
@MODES
def test_rejection_with_a_wrong_rule_is_killed(monkeypatch, name, wrong, change, draft):
    monkeypatch.setattr(verify, name, wrong)
    assert_is_killed(judged(change, draft))


@pytest.mark.parametrize(
    "shift",
    [
        lambda numbers: numbers[..., :1].expand_as(numbers),
        lambda numbers: numbers[:, :1].expand_as(numbers),
        lambda numbers: numbers.new_full(numbers.shape, 0.5),
    ],
    ids=["one number for both", "one position for all", "no numbers"],
)
def test_rejection_with_numbers_used_twice_is_killed(shift):
    assert_is_killed(judged(shift=shift))


UNDRAFTED = rolled_out(plain(WORLD), NUM_COMPARED)


def num_changed(change=same, draft=draw_chain, shift=0):
    texts = rolled_out(by_coupling(WORLD, change, draft, shift), NUM_COMPARED)
    return int((texts != UNDRAFTED).any(1).sum())


DRAFTS = pytest.mark.parametrize("draft", [draw_chain, draw_tree, draw_best])


@DRAFTS
def test_coupled_sampling_as_it_is_passes(draft):
    assert num_changed(draft=draft) == 0


@DRAFTS
@pytest.mark.parametrize("shift", [-1, 1])
def test_noise_of_the_next_position_is_killed(draft, shift):
    assert num_changed(draft=draft, shift=shift) > 0


@DRAFTS
@pytest.mark.parametrize(
    "change", [last_from_the_context_before, contexts_one_token_short, stale_policy, sharper_policy]
)
def test_coupled_sampling_from_a_wrong_distribution_is_killed(draft, change):
    assert num_changed(change, draft) > 0


def noise_by_the_order_of_nodes(parents, depth=None):
    return torch.arange(parents.shape[1] + 1).clamp(max=DEPTH).expand(len(parents), -1)


def test_noise_by_the_order_of_the_nodes_instead_of_their_depth_is_killed(monkeypatch):
    monkeypatch.setattr("kit.markov.node_depths", noise_by_the_order_of_nodes)
    assert num_changed(draft=draw_tree) > 0


def siblings_confused(rows, draft, logits):
    """Look up nodes under the sibling of their parent."""
    other = {-1: -1, 0: 1, 1: 0, 2: 3}
    parents = torch.tensor([[other[parent] for parent in TREE_PARENTS]]).expand_as(draft.parents_BN)
    return replace(draft, parents_BN=parents), logits


def test_confused_siblings_are_killed():
    assert num_changed(siblings_confused, draw_tree) > 0


@DRAFTS
def test_a_lenient_walk_is_killed(monkeypatch, draft):
    """The fault keeps a sufficiently likely token although another one was drawn."""
    drawn_from = []

    def keeps(guess, tokens, depth=None):
        logits = drawn_from.pop()
        parents = guess.parents_BN
        at = torch.arange(guess.tokens_BN.shape[1])[None] if parents is None else parents + 1
        likely = logits.gather(1, at[..., None].expand(len(tokens), -1, V)).softmax(-1)
        likely = likely.gather(-1, guess.tokens_BN[..., None])[..., 0] > 0.3
        here = tokens.gather(1, at.expand_as(guess.tokens_BN))
        said = tokens.scatter(1, at.expand_as(likely), guess.tokens_BN.where(likely, here))
        return verify.accept_path(guess, said, depth)

    def remember(rows, guess, logits):
        drawn_from.append(logits)
        return guess, logits

    monkeypatch.setattr("kit.markov.accept_path", keeps)
    assert num_changed(remember, draft) > 0


def num_beyond(change):
    """Return the number of rows in which more tokens are accepted than were guessed."""
    found = []

    def step(rows):
        accepted = by_coupling(WORLD, change)(rows)
        found.append(int((accepted.counts_B > chain_lengths(rows)).sum()))
        return accepted

    rolled_out(step, NUM_COMPARED)
    return sum(found)


def test_filler_that_stands_is_killed():
    """The tokens are right even then, but were never drafted."""
    assert num_beyond(same) == 0
    assert num_beyond(filler_is_judged) > 0
