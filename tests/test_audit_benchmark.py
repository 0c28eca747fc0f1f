"""Tests of the parts of the audit's benchmark: lies are what they are called, proofs obey their rules."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import audit
from benchmarks.audit import alarms, calibration, detection, judge, tally
from benchmarks.kit.small_llama import llama

from aedit.spec_rollout.audit import Calibration
from aedit.spec_rollout.sampling import Sampling

SAMPLING = Sampling(max_new_tokens=12, stop_tokens=(audit.END,))
WIDE = Calibration.default(torch.float32)


@pytest.fixture
def asked(monkeypatch):
    """Return prompts out of random bytes: the corpus would take seconds."""
    texts = np.random.default_rng(0).integers(0, 256, (64, 257))
    monkeypatch.setattr(audit, "corpus", lambda seq_len: SimpleNamespace(train=texts))
    return audit.prompts(6, SAMPLING, 100)


@pytest.fixture(scope="module")
def model():
    made = llama(64, 2, 128).eval().requires_grad_(False)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(1.5)
    return made


def test_every_lie_keeps_its_key_and_all_but_near_ones_are_found(asked, model):
    other = llama(64, 2, 128, seed=1).eval().requires_grad_(False)
    policy = audit._verifier(model)
    right = {each.key: each.tokens for each in audit.honest(model, asked)}
    for name, lie in audit._lies(model, other).items():
        told = lie(model, asked)
        assert sorted(each.key[0] for each in told) == [p.rollout for p in asked], name
        found = detection([judge(policy, each) for each in told], WIDE, 3)
        if name not in (*audit.NEAR, "8-bit weights", "one step older, lr 1e-4"):
            assert found.share == 1.0, name
            assert found.tokens <= found.tokens_95 <= 6 * 12
    edited = audit.edited(model, asked)
    for each in edited:
        first = next(i for i, (a, b) in enumerate(zip(each.tokens, right[each.key], strict=False)) if a != b)
        assert first == 7 * each.key[0] % max(1, len(right[each.key]) - 1)


def test_honest_servers_are_counted_and_not_convicted(asked, model):
    policy = audit._verifier(model)
    judged = [judge(policy, each) for each in audit.honest(model, asked)]
    done = tally(judged)
    assert (done.tokens, done.other) == (sum(each.num_tokens for each in judged), 0)
    assert alarms(judged, WIDE, 4) == (2, 0)
    limits = calibration(judged, torch.float32)
    assert 1e-8 < limits.eps < 1e-5
    assert detection(judged, WIDE, 2).share == 0.0


def test_the_sketch_accepts_states_of_noise_and_of_ones_as_its_range_says(asked, model):
    told = audit.honest(model, asked)
    noise, other = audit.random_hidden(1.0), audit.random_hidden(3.0, seed=1)
    assert all(audit.grail_passes(each, noise, other) for each in told)
    assert all(audit.grail_passes(each, audit.constant_hidden, noise) for each in told)
    loud = [audit.random_hidden(1e4, seed=seed) for seed in range(20)]
    passed = [audit.grail_passes(each, a, b) for each in told for a, b in itertools.pairwise(loud)]
    assert not all(passed), "the rule is no rule at all"


def test_toploc_is_asked_with_states_of_prover_and_verifier(asked, model):
    seen = []

    def build(states, at_once, top, skip):
        seen.append(torch.cat([each.flatten() for each in states]))
        return states

    def verify(mine, proofs, at_once, top, skip):
        apart = torch.cat([each.flatten() for each in mine]) - seen[-1]
        return [SimpleNamespace(exp_mismatches=int((apart != 0).sum()), mant_err_mean=0, mant_err_median=0)]

    fake, (claim, *_) = (
        SimpleNamespace(build_proofs_bytes=build, verify_proofs_bytes=verify),
        audit.honest(model, asked),
    )
    own = audit.hidden_of(model)
    assert audit.toploc_passes(fake, claim, own, own)
    assert not audit.toploc_passes(fake, claim, audit.random_hidden(1.0), own)
    assert seen[0].dtype == torch.bfloat16
