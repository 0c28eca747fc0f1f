"""Tests that a drafter trains on the task it drafts for, with the right teacher."""

import pytest
import torch
import torch.nn.functional as F
from kit.tiny_policies import SIZES, drafter, ends, policy, said

from aedit.spec_rollout.training import FeatureSample, PolicyEmbeddings, pack_samples
from aedit.spec_rollout.training.losses import (
    LossConfig,
    chained,
    draft_losses,
    overlap,
    predict_features,
    teacher,
    token_loss,
)


def drafted(layer, sample, embedding, root, depth):
    """Return the layer's guesses for a chain that begins at pair `root` of a sample and follows its text.

    The chain is fed one pair at a time through a cache, as a drafter does.
    """
    features, tokens = sample.features_MF[None, : root + 1], sample.tokens_N
    causal = torch.ones(root + 1, root + 1).tril().bool()[None]
    at = torch.arange(root + 1)
    guess, cache = layer(features, embedding[tokens[at + 1]][None], at[None], causal)
    found = [guess[0, -1]]
    for step in range(1, depth):
        pair = root + step
        embedded = embedding[tokens[pair + 1]][None, None]
        sees = torch.ones(1, 1, pair + 1).bool()
        guess, kv = layer(found[-1][None, None], embedded, torch.tensor([[pair]]), sees, cache)
        cache = torch.cat((cache, kv), 1)
        found.append(guess[0, -1])
    return found


@pytest.mark.parametrize("response_only", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_each_pass_is_what_the_drafter_computes_so_deep_in_a_chain(kind, response_only):
    model = policy(kind)
    samples = said(model, [[1, 2, 3], [4, 5, 6]], 7)
    layer, embedding = drafter(model), ends(model).embedding_Vd
    (row,) = pack_samples(samples, 64, response_only=response_only)
    passes = predict_features(layer, row, embedding, 4)
    length, first = len(samples[0].features_MF), 1 if response_only else 0
    compared = 0
    for number, sample in enumerate(samples):
        for root in range(first, length - 1):
            chain = drafted(layer, sample, embedding, root, min(4, length - 1 - root))
            for s, guess in enumerate(chain):
                (place,) = (passes[s].at_C == number * length + root + s).nonzero()
                torch.testing.assert_close(passes[s].predicted_Cd[place[0]], guess, rtol=0, atol=1e-12)
                compared += 1
    assert compared == sum(len(made.at_C) for made in passes) == 2 * (4 * (length - 1 - first) - 6)


def test_a_chain_begins_and_stays_in_one_sample():
    model = policy()
    (row,) = pack_samples(said(model, [[1, 2, 3], [4, 5, 6]], 5), 64)
    per_sample = [[1, 2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5], [4, 5]]
    for s, places in enumerate(per_sample):
        both = [*places, *(7 + place for place in places)]
        assert chained(row.counts_P, s).nonzero()[:, 0].tolist() == both


def by_hand(layer, samples, policy_ends, config):
    """Compute the loss from its definition, one chain and one pair at a time."""
    total = 0.0
    for sample in samples:
        num_pairs = len(sample.features_MF)
        for root in range(sample.num_prompt - 2, num_pairs - 1):
            depth = min(config.num_passes, num_pairs - 1 - root)
            for s, guess in enumerate(drafted(layer, sample, policy_ends.embedding_Vd, root, depth)):
                true = sample.features_MF[root + s + 1]
                logq = (policy_ends.head_Vd @ guess).log_softmax(-1)
                p = (policy_ends.head_Vd @ true).softmax(-1)
                if sample.version != policy_ends.version:
                    p = F.one_hot(sample.tokens_N[root + s + 2], len(p)).double()
                if config.tokens == "ce":
                    of_tokens = -(p * logq).sum()
                else:
                    of_tokens = -torch.minimum(p, logq.exp()).sum().log()
                of_features = F.smooth_l1_loss(guess, true)
                weighted = config.token_weight * of_tokens + config.feature_weight * of_features
                total = total + config.decay**s * weighted
    return total


@pytest.mark.parametrize("tokens", ["ce", "lk"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_loss_is_its_definition(tokens, version):
    model = policy()
    samples = said(model, [[1, 2, 3], [4, 5, 6]], 6, version=version)
    layer = drafter(model)
    config = LossConfig(tokens=tokens, token_weight=0.7, feature_weight=0.9, num_passes=3, decay=0.8)
    (row,) = pack_samples(samples, 64)
    losses = draft_losses(layer, row, ends(model, version=1), config)
    torch.testing.assert_close(losses.total, by_hand(layer, samples, ends(model), config), rtol=1e-11, atol=0)


def test_the_teacher_is_the_policys_own_distribution_of_the_token_after_next():
    model = policy()
    (sample,) = said(model, [[1, 2, 3]], 8)
    (row,) = pack_samples([sample], 64, response_only=False)
    at = row.counts_P.nonzero()[:, 0]
    true = model(input_ids=sample.tokens_N[None]).logits[0].softmax(-1)
    exact = torch.ones(len(at), dtype=torch.bool)
    p = teacher(row.features_Pw[at + 1], row.targets_P[at], exact, ends(model).head_Vd)
    torch.testing.assert_close(p, true[at + 1], rtol=1e-10, atol=1e-12)
    assert row.targets_P[at].tolist() == sample.tokens_N[at + 2].tolist()


def test_features_of_an_older_policy_are_not_put_through_the_new_head():
    old, new = policy(), policy()
    with torch.no_grad():
        new.lm_head.weight.add_(torch.randn(new.lm_head.weight.shape, dtype=torch.float64))
    (sample,) = said(old, [[1, 2, 3]], 8, version=1)
    (row,) = pack_samples([sample], 64)
    layer, config = drafter(new), LossConfig(feature_weight=0.0, token_weight=1.0, num_passes=1)
    losses = draft_losses(layer, row, ends(new, version=2), config)
    (made,) = predict_features(layer, row, ends(new).embedding_Vd, 1)
    assert made.at_C.tolist() == row.counts_P.nonzero()[:, 0].tolist()
    logits = F.linear(made.predicted_Cd, ends(new).head_Vd)
    drawn = F.cross_entropy(logits, row.targets_P[made.at_C], reduction="sum")
    torch.testing.assert_close(losses.total, drawn)
    assert losses.num_overlap_S.tolist() == [0]


def test_gradients_reach_the_layer_and_nothing_of_the_policy():
    model = policy()
    (row,) = pack_samples(said(model, [[1, 2, 3]], 8), 64)
    layer = drafter(model)
    embedding, head = (torch.nn.Parameter(x) for x in (ends(model).embedding_Vd, ends(model).head_Vd))
    draft_losses(layer, row, PolicyEmbeddings(embedding, head, 1), LossConfig()).total.backward()
    assert embedding.grad is None
    assert head.grad is None
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in layer.parameters())


def test_overlap_is_the_chance_that_a_drafted_token_is_accepted():
    torch.manual_seed(0)
    p, q = torch.randn(2, 8, dtype=torch.float64).softmax(-1)
    drafts = torch.multinomial(q, 200_000, replacement=True)
    accepted = torch.rand(200_000, dtype=torch.float64) < p[drafts] / q[drafts]
    assert abs(float(overlap(p, q.log())) - float(accepted.double().mean())) < 0.005


def test_the_lk_loss_is_zero_where_drafter_and_policy_agree_and_falls_towards_it():
    torch.manual_seed(0)
    p = torch.randn(5, 8, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(token_loss(p, p.log(), "lk"), torch.zeros(5, dtype=torch.float64))
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    before = token_loss(p, logits.log_softmax(-1), "lk").sum()
    (gradient,) = torch.autograd.grad(before, logits)
    after = token_loss(p, (logits - 0.1 * gradient).log_softmax(-1), "lk").sum()
    assert after < before


def test_a_feature_with_taps_is_judged_by_its_last_hidden_state():
    model = policy()
    (plain,) = said(model, [[1, 2, 3]], 8)
    taps = torch.randn(len(plain.features_MF), 3 * SIZES["hidden_size"], dtype=torch.float64)
    wide = torch.cat((plain.features_MF, taps), 1)
    sample = FeatureSample(plain.tokens_N, wide, 3, 1, 0, 1, True)
    layer = drafter(model, taps=3)
    config = LossConfig(num_passes=2, token_weight=0.5)
    (row,) = pack_samples([sample], 64)
    losses = draft_losses(layer, row, ends(model), config)
    hidden = SIZES["hidden_size"]
    total = 0.0
    for root in range(1, len(wide) - 1):
        for s, guess in enumerate(
            drafted(layer, sample, ends(model).embedding_Vd, root, min(2, len(wide) - 1 - root))
        ):
            true = wide[root + s + 1, :hidden]
            p, logq = ((ends(model).head_Vd @ x).log_softmax(-1) for x in (true, guess))
            total = total + 0.8**s * (F.smooth_l1_loss(guess, true) - 0.5 * (p.exp() * logq).sum())
    torch.testing.assert_close(losses.total, total, rtol=1e-11, atol=0)


def test_weights_of_the_loss_that_mean_nothing_are_refused():
    for wrong in ({"tokens": "mse"}, {"num_passes": 0}, {"decay": 0.0}, {"token_weight": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LossConfig(**wrong)
