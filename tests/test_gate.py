"""Tests that only a better drafter is published, and that training pauses when it does not help."""

import math
from dataclasses import replace

import pytest
import torch
from kit.tiny_policies import drafter, ends, policy, said

from aedit.spec_rollout.training import GateConfig, Match, held_out_match, pack_samples
from aedit.spec_rollout.training.gate import (
    GateState,
    after_move,
    after_rest,
    decide,
    difference_error,
    is_near_peak,
    match_sums,
    rest_versions,
    row_noise,
    should_rest,
    with_measurement,
)
from aedit.spec_rollout.training.losses import predict_features

CONFIG = GateConfig()


def test_a_drafter_that_matches_better_is_published():
    decision, state = decide(0.500, 0.506, 0.0, GateState(lr_factor=0.25, num_rejected=2), CONFIG)
    assert decision == "publish"
    assert state == GateState(lr_factor=0.5, num_rejected=0, average=0.506, peak=0.506)
    assert decide(0.5, 0.506, 0.0, GateState(), CONFIG)[1].lr_factor == 1.0


def test_one_that_is_hardly_better_is_kept_back_and_learns_at_half_the_rate():
    for candidate in (0.504, 0.5, 0.485):
        decision, state = decide(0.5, candidate, 0.0, GateState(average=0.5, peak=0.5), CONFIG)
        assert decision == "keep"
        assert (state.lr_factor, state.num_rejected, state.average) == (0.5, 1, 0.5)


def test_one_that_is_no_better_after_few_steps_goes_on_as_before():
    state = GateState(lr_factor=0.5, num_rejected=1, average=0.5, peak=0.5)
    for candidate in (0.504, 0.485):
        assert decide(0.5, candidate, 0.0, state, CONFIG, is_early=True) == ("keep", state)
    assert decide(0.5, 0.51, 0.0, state, CONFIG, is_early=True)[0] == "publish"
    decision, spoilt = decide(0.5, 0.47, 0.0, state, CONFIG, is_early=True)
    assert (decision, spoilt.num_rejected, spoilt.lr_factor) == ("revert", 2, 0.25)


def test_one_that_was_spoilt_goes_back_to_what_was_published():
    assert decide(0.5, 0.47, 0.0, GateState(), CONFIG)[0] == "revert"


def test_the_rate_is_not_halved_for_ever():
    state = GateState()
    for _ in range(20):
        _, state = decide(0.5, 0.5, 0.0, state, CONFIG)
    assert state.lr_factor == CONFIG.smallest_lr


def test_one_that_seems_better_by_chance_trains_on_at_the_same_rate():
    state = GateState(lr_factor=0.25, num_rejected=2, average=0.5, peak=0.5)
    assert decide(0.5, 0.53, 0.021, state, CONFIG) == ("keep", state)
    assert decide(0.5, 0.53, 0.019, state, CONFIG)[0] == "publish"
    assert decide(0.5, 0.53, math.inf, state, CONFIG)[0] == "keep"
    assert [decide(0.5, 0.47, error, state, CONFIG)[0] for error in (0.019, 0.021)] == ["revert", "keep"]


def test_equal_drafters_are_seldom_published():
    """The oracle is a simulation: 400 drafters as good as the published one, on 192 chains that are alike."""
    rng, published = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        text = torch.randn(192 + 8, generator=rng, dtype=torch.float64)
        alike = text.unfold(0, 9, 1).mean(-1)[:192]  # near chains share tokens
        theirs = 0.5 + 0.1 * alike
        ours = 0.5 + 0.1 * torch.randn(200, generator=rng, dtype=torch.float64).unfold(0, 9, 1).mean(-1)[:192]
        error = difference_error(theirs, ours)
        published += (
            decide(float(theirs.mean()), float(ours.mean()), error, GateState(), CONFIG)[0] == "publish"
        )
    assert published < 0.15 * 400
    assert difference_error(theirs[:7], ours[:7]) == math.inf


def settled(num_rejected=3):
    """Return the state after a drafter was published at 0.6 and no better one was found afterwards."""
    _, state = decide(0.5, 0.6, 0.0, GateState(), CONFIG)
    for _ in range(num_rejected):
        _, state = decide(0.6, 0.6, 0.0, state, CONFIG)
    return state


def test_training_rests_only_when_it_finds_nothing_better():
    assert should_rest(settled(), CONFIG)
    assert not should_rest(settled(num_rejected=2), CONFIG)
    assert not should_rest(GateState(), CONFIG)
    assert should_rest(after_move(settled()), CONFIG), "a policy moves in each step"


def test_a_rest_ends_when_the_drafter_in_use_matches_less_than_at_its_best():
    state = settled()
    for _ in range(10):
        state = with_measurement(0.59, state, CONFIG)
    assert is_near_peak(state, CONFIG)
    for _ in range(10):
        state = with_measurement(0.58, state, CONFIG)
    assert not is_near_peak(state, CONFIG)
    assert not should_rest(state, CONFIG)
    anew = after_rest(replace(state, num_rests=4), CONFIG)
    assert (anew.num_rejected, anew.num_rests, anew.lr_factor) == (0, 0, 1.0)


def test_one_bad_measurement_does_not_end_it():
    assert is_near_peak(with_measurement(0.565, settled(), CONFIG), CONFIG)


def test_rests_in_a_row_grow_longer_and_one_evaluation_decides_about_the_next():
    state, lengths = settled(), []
    for _ in range(6):
        assert should_rest(state, CONFIG)
        lengths.append(rest_versions(state, CONFIG))
        state = after_rest(state, CONFIG)
        assert not should_rest(state, CONFIG)
        _, state = decide(0.6, 0.6, 0.0, state, CONFIG)
    assert lengths == [8, 16, 32, 64, 64, 64]
    decision, found = decide(0.6, 0.7, 0.0, after_rest(state, CONFIG), CONFIG)
    assert (decision, rest_versions(found, CONFIG)) == ("publish", 8)
    assert rest_versions(replace(state, num_rests=10**6), CONFIG) == 64


def test_a_move_of_the_policy_raises_the_rate():
    state = GateState(lr_factor=0.125, num_rejected=3, average=0.6, peak=0.6)
    assert after_move(state) == replace(state, lr_factor=0.25)
    assert after_move(GateState(lr_factor=0.75)).lr_factor == 1.0


def test_the_rate_of_a_match_is_the_share_of_a_chain_that_is_accepted():
    overlap, coupled = (0.5, 0.8, 0.25), (0.0, 0.0, 0.0)
    torch.manual_seed(0)
    stays = (torch.rand(200_000, 3) < torch.tensor(overlap)).long().cumprod(1)
    assert Match(overlap, coupled, 1).rate == pytest.approx(float(stays.double().mean()), abs=0.003)


def test_a_match_is_what_rejection_and_coupled_drafting_would_accept():
    model = policy()
    samples = said(model, [[1, 2, 3], [4, 5, 6]], 12)
    layer, policy_ends = drafter(model), ends(model)
    rows = pack_samples(samples, 64)
    match = held_out_match(layer, rows, policy_ends, 2)
    (row,) = rows
    noise = row_noise(0, row, policy_ends)
    with torch.no_grad():
        passes = predict_features(layer, row, policy_ends.embedding_Vd, 2)
    for depth, made in enumerate(passes):
        guess = dict(zip(made.at_C.tolist(), made.predicted_Cd, strict=True))
        overlaps, same = [], []
        for number, sample in enumerate(samples):
            logits = model(input_ids=sample.tokens_N[None]).logits[0].detach()
            for t in range(1 + depth, len(sample.tokens_N) - 2):
                at = number * (len(sample.tokens_N) - 1) + t
                p, q = logits[t + 1].softmax(-1), (policy_ends.head_Vd @ guess[at]).softmax(-1)
                overlaps.append(float(torch.minimum(p, q).sum()))
                same.append(float((p.log() + noise[at]).argmax() == (q.log() + noise[at]).argmax()))
        assert match.overlap_D[depth] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-9)
        assert match.coupled_D[depth] == pytest.approx(sum(same) / len(same), rel=1e-9)
        if depth == 0:
            assert match.num_pairs == len(overlaps)
            first = overlaps
    chains = match_sums(layer, row, policy_ends, noise, 2)[1]
    second = dict(zip((passes[1].at_C - 1).tolist(), overlaps, strict=True))
    starts = passes[0].at_C.tolist()
    wanted = [(x + x * second.get(at, 0.0)) / 2 for at, x in zip(starts, first, strict=True)]
    assert chains.tolist() == pytest.approx(wanted, rel=1e-9)


def test_coupled_matches_are_near_what_the_overlap_promises():
    """P(match) >= (1 - TV) / (1 + TV) with shared noise (Daliri et al. 2024), and overlap = 1 - TV."""
    model = policy()
    layer = drafter(model)
    match = held_out_match(layer, pack_samples(said(model, [[1, 2, 3]] * 12, 60), 256), ends(model), 1)
    overlap = match.overlap_D[0]
    assert match.coupled_D[0] > overlap / (2 - overlap) - 4 * 0.5 / math.sqrt(match.num_pairs)
    assert match.coupled_D[0] < 1


def test_samples_of_the_versions_before_judge_too():
    """Their features are of another version; what they say follows the text and the present head alone."""
    model = policy()
    now, old = said(model, [[1, 2, 3]], 8), said(model, [[4, 5, 6]], 20, version=0)
    both, alone = (
        held_out_match(drafter(model), pack_samples(samples, 64), ends(model), 2)
        for samples in (now + old, old)
    )
    assert both.num_pairs > alone.num_pairs
    first = held_out_match(drafter(model), pack_samples(now, 64), ends(model), 2)
    assert both.num_pairs == first.num_pairs + alone.num_pairs
    with pytest.raises(ValueError, match="no held-out pair"):
        held_out_match(drafter(model), [], ends(model), 2)


def test_rules_that_mean_nothing_are_refused():
    wrong = {"gain": -1.0, "smoothing": 0.0, "patience": 0, "rest_versions": 0, "smallest_lr": 2.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            GateConfig(**{name: value})
