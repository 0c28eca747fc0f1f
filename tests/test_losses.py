"""Tests that a drafter trains on the task it drafts for, with the right teacher."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from kit.tiny_policies import SIZES, drafter, ends, policy, said
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.training import FeatureSample, PolicyEmbeddings, pack_samples
from aedit.spec_rollout.training.losses import (
    LossConfig,
    chained,
    draft_losses,
    overlap,
    predict_features,
    rejected,
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


def accepted(p, q, token, kind):
    """Return the probability that a token is drafted and accepted, from its definition."""
    if kind == "tv":  # drawn from q, then accepted with the probability p / q
        return q[token] * torch.clamp(p[token] / q[token], max=1)
    worst = [torch.maximum(p[y] / p[token], q[y] / q[token]) for y in range(len(p))]
    return 1 / sum(worst)


@pytest.mark.parametrize("kind", ["tv", "coupled"])
def test_the_chance_of_acceptance_is_that_of_draws_with_the_noise_of_the_engine(kind):
    generator = torch.Generator().manual_seed(0)
    logp, logq = torch.randn(2, 6, dtype=torch.float64, generator=generator).mul(1.5).log_softmax(-1)
    uniform = torch.rand(200_000, 6, dtype=torch.float64, generator=generator)
    noise = -torch.log(-torch.log(uniform))
    drafts = (logq + noise).argmax(-1)
    if kind == "tv":
        coins = torch.rand(len(drafts), dtype=torch.float64, generator=generator)
        kept = coins < (logp - logq).exp()[drafts]
    else:
        kept = drafts == (logp + noise).argmax(-1)
    for token in range(6):
        miss, ratio = rejected(logp.exp()[None], logq[None], torch.tensor([token]), kind)
        m = ratio * logp.exp()[token]
        assert abs(float(m) - float((kept & (drafts == token)).double().mean())) < 0.004
        torch.testing.assert_close(m[0], accepted(logp.exp(), logq.exp(), token, kind))
        assert abs(float(miss) - float((~kept).double().mean())) < 0.004
    overlapping = float(overlap(logp.exp(), logq))
    least = overlapping / (2 - overlapping)
    assert least - 1e-9 <= 1 - float(miss) <= overlapping + 1e-9


@pytest.mark.parametrize("kind", ["tv", "coupled"])
def test_tokens_of_probability_0_and_equal_distributions_are_no_special_cases(kind):
    one_hot = F.one_hot(torch.tensor([1]), 4).double()
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    for drawn in (1, 2):
        miss, ratio = rejected(one_hot, q.log(), torch.tensor([drawn]), kind)
        torch.testing.assert_close(miss, q.detach()[:, 0] * 0 + 0.8)
        torch.testing.assert_close(ratio, q.detach()[:, 0] * 0 + (0.2 if drawn == 1 else 0.0))
        (gradient,) = torch.autograd.grad(miss.sum() + ratio.sum(), q)
        assert torch.isfinite(gradient).all()
    p = torch.rand(5, 7, dtype=torch.float64).softmax(-1)
    miss, ratio = rejected(p, p.log(), torch.arange(5), kind)
    torch.testing.assert_close(miss, torch.zeros_like(miss), atol=1e-12, rtol=0)
    torch.testing.assert_close(ratio, torch.ones_like(ratio))


@pytest.mark.parametrize("kind", ["tv", "coupled"])
def test_the_gradient_is_that_of_the_expected_rejections_over_all_drafts_and_all_texts(kind):
    """Enumerate each text of a policy of three tokens, and each draft."""
    torch.manual_seed(1)
    sizes = SIZES | {"vocab_size": 3, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlamaConfig(**sizes | {"num_key_value_heads": 1}, initializer_range=0.4)
    model = LlamaForCausalLM(config).double().eval()
    policy_ends, prompt, passes = ends(model), [0, 1, 2], 3
    layer = drafter(model)
    with torch.no_grad():
        texts = [torch.tensor([*prompt, *text]) for text in itertools.product(range(3), repeat=3)]
        hidden = [model.model(input_ids=text[None]).last_hidden_state[0] for text in texts]
    samples = [FeatureSample(t, h[:-1], 3, 1, 0, 1, True) for t, h in zip(texts, hidden, strict=True)]
    chances = [(policy_ends.head_Vd @ h.T).T.softmax(-1) for h in hidden]  # of the token after each

    settings = LossConfig(tokens=kind, feature_weight=0.0, num_passes=passes)
    loss = 0.0
    for sample, p in zip(samples, chances, strict=True):
        weight = torch.stack([p[i - 1, sample.tokens_N[i]] for i in (3, 4, 5)]).prod()
        (row,) = pack_samples([sample], 64)
        loss = loss + weight * draft_losses(layer, row, policy_ends, settings).total

    def expected(number, root, depth):
        """Return the expected acceptances of a chain: `number` is of any text with the same beginning."""
        sample, total = samples[number], 0.0
        guesses = drafted(layer, sample, policy_ends.embedding_Vd, root, depth)
        q = (policy_ends.head_Vd @ guesses[-1]).softmax(-1)
        here = chances[number][root + depth]
        for token in range(3):
            m = accepted(here, q, token, kind)
            total = total + m
            after = [*sample.tokens_N[: root + depth + 1].tolist(), token]
            if len(after) < 6 and depth < passes:
                deeper = next(i for i, t in enumerate(texts) if t[: len(after)].tolist() == after)
                total = total + m * expected(deeper, root, depth + 1)
        return total

    exact = 0.0
    for root in (1, 2, 3):  # a chain of at most three tokens begins at each
        known = root + 2
        for begun in itertools.product(range(3), repeat=known - 3):
            number = next(i for i, t in enumerate(texts) if t[3:known].tolist() == [*begun])
            weight = 1.0
            for i, token in enumerate(begun, 3):
                weight = weight * chances[number][i - 1, token]
            exact = exact + weight * (min(passes, 6 - known) - expected(number, root, 1))
    torch.testing.assert_close(loss, exact)
    for found, wanted in zip(
        *(torch.autograd.grad(x, [*layer.parameters()]) for x in (loss, exact)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert wanted.abs().sum() > 0


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
