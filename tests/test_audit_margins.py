"""Tests of margins, against an engine bit for bit and against NumPy in float64."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from tests.kit import tiny_policies
from tests.kit.audited import PROMPT, generate, noise

from aedit.spec_rollout.audit import ClaimedTokens, margins, not_auditable
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import LARGE_VOCABULARY, Prompt, Sampling, gumbel

ALLOWED = torch.arange(48) % 3 > 0
SETTINGS = {
    "plain": Sampling(max_new_tokens=12),
    "cool": Sampling(max_new_tokens=12, temperature=0.7),
    "cold": Sampling(max_new_tokens=12, temperature=1e-3),
    "greedy": Sampling(max_new_tokens=12, temperature=0.0),
    "stops": Sampling(max_new_tokens=12, min_new_tokens=6, stop_tokens=tuple(range(1, 40))),
    "allowed": Sampling(max_new_tokens=12, allowed=ALLOWED),
}


def seen_by_engine(monkeypatch, model, sampling):
    """Return the rollout of an engine and the logits that it drew each token from, (T, V)."""
    engine, seen = Engine.of(model, rows=1, max_tokens=64), []
    logits = engine.target.logits

    def recorded(features):
        found = logits(features)
        seen.append(found.flatten(0, -2)[-1].clone())
        return found

    monkeypatch.setattr(engine.target, "logits", recorded)
    rollout = next(engine.generate([Prompt(tokens=PROMPT, rollout=-9, sample=3, sampling=sampling)]))
    return rollout, torch.stack(seen)


def claim(rollout, first=0):
    prompt = rollout.prompt
    place = len(prompt.tokens) + first
    return ClaimedTokens(prompt.key, prompt.sampling, place, first, rollout.tokens[first:])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_on_equal_logits_every_token_of_an_engine_is_the_right_one_to_the_last_bit(monkeypatch, name, dtype):
    rollout, logits_TV = seen_by_engine(monkeypatch, tiny_policies.policy(dtype=dtype), SETTINGS[name])
    found = margins(logits_TV, claim(rollout))
    assert found.right_T.tolist() == rollout.tokens
    assert found.margins_T.tolist() == [0.0] * len(rollout.tokens)
    assert found.logprobs_T.tolist() == rollout.logprobs
    later = margins(logits_TV[2:], claim(rollout, 2))
    assert later.right_T.tolist() == rollout.tokens[2:]


@pytest.mark.parametrize("name", SETTINGS)
def test_margins_are_those_of_numpy(name):
    sampling, key = SETTINGS[name], (2**40 + 5, -3)
    logits_TV = torch.randn(12, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    tokens = [int(x) for x in np.random.default_rng(0).integers(0, 48, 12)]
    found = margins(logits_TV, ClaimedTokens(key, sampling, 9, 0, tokens))
    for t, z_V in enumerate(logits_TV.numpy()):
        x_V = z_V / float(np.float32(sampling.temperature or 1.0))  # the temperature is kept in float32
        logp_V = x_V - logsumexp(x_V)
        score_V = x_V + (noise(key, 9 + t, 48) if sampling.temperature else 0)
        if sampling.allowed is not None:
            score_V[~ALLOWED.numpy()] = -np.inf
        if t < sampling.min_new_tokens:
            score_V[list(sampling.stop_tokens)] = -np.inf
        y = tokens[t]
        assert found.right_T[t] == score_V.argmax()
        np.testing.assert_allclose(
            float(found.margins_T[t]), score_V.max() - score_V[y], rtol=1e-9, atol=1e-9
        )
        gap = np.diff(np.sort(score_V)[-2:])[0]
        np.testing.assert_allclose(float(found.gaps_T[t]), gap, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(float(found.logprobs_T[t]), logp_V[y], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(
            float(found.spread_T[t]), 1 - 2 * np.exp(logp_V[y]) + np.exp(2 * logp_V).sum(), atol=1e-9
        )


def test_a_large_vocabulary_gives_the_same_margins_in_parts():
    vocabulary = LARGE_VOCABULARY + 3
    logits_TV = torch.randn(300, vocabulary, generator=torch.Generator().manual_seed(2)) * 2
    tokens = list(range(5, 305))
    found = margins(logits_TV, ClaimedTokens((5, 6), Sampling(temperature=0.8), 20, 0, tokens))
    sums_TV = logits_TV / 0.8 + gumbel(5, 6, torch.arange(20, 320)[None], vocabulary)[0]
    right_T = sums_TV.argmax(-1)
    mine_T = sums_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert found.right_T.tolist() == right_T.tolist()
    assert found.margins_T.tolist() == (sums_TV.amax(-1) - mine_T).double().tolist()
    best_T2 = sums_TV.topk(2).values
    assert found.gaps_T.tolist() == (best_T2[:, 0] - best_T2[:, 1]).double().tolist()
    for t in (0, 150, 299):
        score_V = logits_TV[t].double().numpy() / 0.8 + noise((5, 6), 20 + t, vocabulary)
        assert found.right_T[t] == score_V.argmax()
        assert float(found.margins_T[t]) == pytest.approx(score_V.max() - score_V[tokens[t]], abs=1e-4)


def test_another_key_place_or_temperature_is_seen():
    model = tiny_policies.policy(loudness=1.0)
    rollout = generate(model, sampling=Sampling(max_new_tokens=40))[0]
    logits_TV = model(input_ids=torch.tensor([[*PROMPT, *rollout.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert float(margins(logits_TV, claim(rollout)).margins_T.max()) < 1e-9
    one = claim(rollout)
    changed = (
        ClaimedTokens((7, 1), one.sampling, one.position, 0, one.tokens),
        ClaimedTokens((8, 0), one.sampling, one.position, 0, one.tokens),
        ClaimedTokens(one.key, one.sampling, one.position + 1, 0, one.tokens),
        ClaimedTokens(one.key, Sampling(temperature=0.5), one.position, 0, one.tokens),
        ClaimedTokens(one.key, Sampling(temperature=0.0), one.position, 0, one.tokens),
    )
    for other in changed:
        assert int((margins(logits_TV, other).margins_T > 0.1).sum()) >= 4, other


def test_logits_that_are_not_finite_give_no_number():
    logits_TV = torch.zeros(3, 48)
    logits_TV[1, 5], logits_TV[2, 0] = torch.nan, torch.inf
    found = margins(logits_TV, ClaimedTokens((1, 1), Sampling(), 5, 0, [1, 2, 3]))
    assert found.margins_T.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (Sampling(top_k=5), "top_k"),
        (Sampling(top_p=0.9), "top_p"),
        (Sampling(min_p=0.1), "min_p"),
        (Sampling(repetition_penalty=1.1), "repetition_penalty"),
        (Sampling(frequency_penalty=0.1), "frequency_penalty"),
        (Sampling(presence_penalty=0.1), "presence_penalty"),
        (Sampling(logit_bias={1: 2.0}), "logit_bias"),
    ],
)
def test_settings_that_cannot_be_audited_are_refused_by_name(sampling, name):
    with pytest.raises(ValueError, match=f"^{name} cannot be audited"):
        margins(torch.zeros(1, 48), ClaimedTokens((1, 1), sampling, 5, 0, [1]))
    assert not_auditable(Sampling(temperature=0.3, stop_tokens=(1,), min_new_tokens=2, allowed=ALLOWED)) == ""
