"""Tests policy losses: value and gradient against a float64 oracle, and what must hold for all of them."""

import numpy as np
import pytest
import torch
from kit.policy_losses import SETTINGS, case, gradient, oracle

from aedit.spec_rollout import LossInputs, LossOutput, LossSettings, find_loss, loss_metrics, mean_metrics
from aedit.spec_rollout.rl.losses import LOSSES

SEEDS = range(4)


def run(name, inputs, settings=None):
    """Return loss, gradient and kept tokens."""
    out = find_loss(name)(inputs, settings or LossSettings())
    out.loss.backward()
    return out.loss.item(), inputs.logp_BT.grad, out.kept_BT


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_equation(name, setting):
    for seed in SEEDS:
        for proximal in (False, True):
            c, s = case(seed, proximal=proximal), SETTINGS[setting]
            loss, grad, _ = run(name, c.inputs(), s)
            assert loss == pytest.approx(oracle(name, c.logp, c, s), rel=1e-12)
            if seed < 2:  # two evaluations of the oracle for each token
                assert np.allclose(grad.numpy(), gradient(name, c, s), rtol=1e-6, atol=1e-8)


def test_the_cases_reach_both_sides_of_every_clip_and_leave_most_tokens_alone():
    """Otherwise the comparison with the oracle would not see a wrong clip."""
    for name in LOSSES:
        sides, lost, tokens = set(), 0, 0
        for seed in SEEDS:
            c = case(seed)
            *_, kept = run(name, c.inputs())
            clipped = c.mask & ~kept.numpy()
            sides |= {np.sign(c.advantages[i]) for i in np.flatnonzero(clipped.any(1))}
            lost, tokens = lost + clipped.sum(), tokens + c.mask.sum()
        assert 0 < lost < 0.8 * tokens, name
        assert {-1.0, 1.0} <= sides, name


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_has_no_policy_gradient_exactly_where_it_was_not_kept(name):
    c = case(1)
    _, grad, kept = run(name, c.inputs())
    counted = torch.tensor(c.mask & (c.advantages != 0)[:, None])
    if name == "cispo":
        assert (grad[counted] != 0).all(), "it cuts weights, never gradients"
    else:
        assert torch.equal(grad != 0, kept & counted)
    assert not kept[~torch.tensor(c.mask)].any()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    c = case(0, apart=0.0)
    c.behaviour[...] = c.logp
    _, grad, kept = run(name, c.inputs())
    per_sequence = name in ("grpo", "gspo")
    lengths = c.mask.sum(1, keepdims=True)
    tokens, sequences = c.counts
    divided = sequences * lengths if per_sequence else tokens
    divided = sequences * c.max_tokens if name == "dr-grpo" else divided
    assert np.allclose(grad.numpy(), c.mask * -c.advantages[:, None] / divided, atol=1e-15)
    assert torch.equal(kept, torch.tensor(c.mask))


@pytest.mark.parametrize("importance", ["off", "token", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_add_up_to_the_batch(name, importance):
    c, s = case(2), LossSettings(importance=importance, kl=0.1)
    whole, grad, _ = run(name, c.inputs(), s)
    parts, grads = [], []
    for rows in (slice(0, 2), slice(2, 6)):
        full = c.inputs()
        part = c.inputs(
            logp_BT=full.logp_BT[rows].detach().requires_grad_(),
            **{key: getattr(full, key)[rows] for key in ("behaviour_BT", "mask_BT", "advantages_B")},
            reference_BT=full.reference_BT[rows],
        )
        loss, g, _ = run(name, part, s)
        parts.append(loss)
        grads.append(g)
    assert sum(parts) == pytest.approx(whole, rel=1e-12)
    assert torch.allclose(torch.cat(grads), grad, rtol=1e-12)


@pytest.mark.parametrize("importance", ["off", "token", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_outside_of_the_mask_has_an_influence_not_even_nan(name, importance):
    c, s = case(3), LossSettings(importance=importance, kl=0.1)
    loss, grad, kept = run(name, c.inputs(), s)
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        for field in ("logp", "behaviour", "reference"):
            values = getattr(c, field)
            dirty = np.where(c.mask, values, junk)
            inputs = c.inputs(
                **{f"{field}_BT": torch.tensor(dirty, dtype=torch.float64, requires_grad=field == "logp")}
            )
            out = find_loss(name)(inputs, s)
            out.loss.backward()
            assert out.loss.item() == loss
            assert torch.equal(inputs.logp_BT.grad, grad)
            assert torch.equal(out.kept_BT, kept)
            assert all(np.isfinite(value) for value in loss_metrics(inputs, out).values())


@pytest.mark.parametrize("far", [30.0, 300.0, 1e5])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_large_log_ratio_stays_finite_in_fp32_and_is_still_pulled_back(name, setting, far):
    """One token is e^far times likelier under one policy, in each direction and with each sign of A."""
    for direction in (-1, 1):
        for A in (-1.0, 1.0):
            c = case(4)
            c.logp[:, 3], c.behaviour[:, 3] = -0.5, -0.7
            (c.behaviour if direction > 0 else c.logp)[:, 3] -= far
            c.advantages[:] = A
            inputs = c.inputs(torch.float32)
            loss, grad, kept = run(name, inputs, SETTINGS[setting])
            assert np.isfinite(loss)
            assert torch.isfinite(grad).all()
            if direction > 0 and A < 0 and setting == "plain" and name in ("grpo", "dapo", "dr-grpo"):
                assert (grad[kept & (torch.arange(8) == 3)] > 0).all(), "the step lowers its probability"
            out = find_loss(name)(inputs, SETTINGS[setting])
            means = mean_metrics(loss_metrics(inputs, out))
            assert all(np.isfinite(value) for value in means.values())


def test_half_precision_log_probabilities_are_compared_in_fp32():
    c = case(5)
    inputs = c.inputs(torch.bfloat16)
    exact = c.inputs(
        torch.float32,
        **{
            key: getattr(inputs, key).detach().float()
            for key in ("behaviour_BT", "advantages_B", "reference_BT")
        },
        logp_BT=inputs.logp_BT.detach().float().requires_grad_(),
    )
    for name in LOSSES:
        half, full = (find_loss(name)(i, LossSettings(kl=0.1)).loss for i in (inputs, exact))
        assert half.dtype == torch.float32
        assert half.item() == pytest.approx(full.item(), rel=1e-6), name


def test_the_kl_term_has_the_gradient_of_the_exact_divergence():
    """Over a whole vocabulary, drawn from mu: the mean of r * k3 has value and gradient of KL(p || ref)."""
    torch.manual_seed(0)
    V = 7
    logits = torch.randn(V, dtype=torch.float64, requires_grad=True)
    mu, ref = (torch.randn(V, dtype=torch.float64).log_softmax(0) for _ in range(2))
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    total = 0.0
    for token in range(V):  # advantage 0: only the KL term is left
        inputs = case(0, sequences=3, tokens=4).inputs(
            logp_BT=logp[token].reshape(1, 1),
            behaviour_BT=mu[token].reshape(1, 1),
            mask_BT=torch.ones(1, 1, dtype=torch.bool),
            advantages_B=torch.zeros(1, dtype=torch.float64),
            reference_BT=ref[token].reshape(1, 1),
            num_tokens=1,
        )
        total = total + mu[token].exp() * find_loss("dapo")(inputs, LossSettings(kl=1.0)).loss
    (found,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(exact.item(), rel=1e-12)
    assert torch.allclose(found, wanted, rtol=1e-10)


def test_metrics_are_those_of_the_definition_and_add_up():
    c, s = case(6), LossSettings()
    inputs = c.inputs()
    out = find_loss("grpo")(inputs, s)
    found = mean_metrics(loss_metrics(inputs, out))
    log_r = (c.logp - c.behaviour)[c.mask]
    mismatch, kept = np.exp(log_r) - log_r - 1, out.kept_BT.numpy()[c.mask]
    d = (c.reference - c.logp)[c.mask]
    assert found == pytest.approx(
        {
            "mismatch_kl": mismatch.mean(),
            "mismatch_kl_masked": mismatch[~kept].mean(),
            "mismatch_kl_unmasked": mismatch[kept].mean(),
            "clip_share": (~kept).mean(),
            "entropy": -c.behaviour[c.mask].mean(),
            "reference_kl": (np.exp(d) - d - 1).mean(),
        }
    )
    entropy = torch.rand(c.mask.shape)
    given = mean_metrics(loss_metrics(inputs, out, entropy))["entropy"]
    assert given == pytest.approx(entropy.numpy()[c.mask].mean())
    twice = {name: 2 * value for name, value in loss_metrics(inputs, out).items()}
    assert mean_metrics(twice) == pytest.approx(found)


def test_divergences_near_the_policy_are_those_of_float64_and_never_negative():
    rng = np.random.default_rng(0)
    behaviour = np.log(rng.uniform(0.05, 1.0, (16, 32))).astype(np.float32)
    for scale in (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3, 0.1):
        logp = (behaviour + rng.normal(0, 1, behaviour.shape) * scale).astype(np.float32)
        inputs = LossInputs(
            logp_BT=torch.tensor(logp),
            behaviour_BT=torch.tensor(behaviour),
            mask_BT=torch.ones(16, 32, dtype=torch.bool),
            advantages_B=torch.ones(16),
            reference_BT=torch.tensor(behaviour),
            num_tokens=512,
            num_sequences=16,
            max_tokens=32,
        )
        found = mean_metrics(loss_metrics(inputs, find_loss("grpo")(inputs, LossSettings())))
        d = (logp - behaviour).astype(np.float64)  # as fp32 has it
        exact = {
            name: (d**2 / 2 + sign * d**3 / 6 + d**4 / 24 + sign * d**5 / 120 + d**6 / 720).mean()
            for name, sign in (("mismatch_kl", 1), ("reference_kl", -1))
        }
        for name, value in exact.items():
            assert found[name] >= 0
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-20)


def test_a_metric_of_no_tokens_is_left_out():
    c = case(7)
    c.behaviour[...] = c.logp
    inputs = c.inputs(reference_BT=None)
    found = mean_metrics(loss_metrics(inputs, find_loss("grpo")(inputs, LossSettings())))
    assert found["mismatch_kl"] == 0
    assert found["clip_share"] == 0
    assert not {"mismatch_kl_masked", "reference_kl"} & set(found)


def nothing(inputs, settings):
    return inputs.logp_BT.sum()


def flat(inputs, settings):
    return LossOutput(inputs.logp_BT.sum(1), inputs.mask_BT)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ppo", "rl.loss must be one of dppo-tv, grpo, .*, or module:Name, got ppo"),
        ("test_policy_losses:missing", "rl.loss: test_policy_losses:missing cannot be imported"),
        ("test_policy_losses:nothing", "returned Tensor, expected a LossOutput"),
        ("test_policy_losses:flat", r"shapes \(6,\) and \(6, 8\), expected \(\) and \(6, 8\)"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_by_name(name, words, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "test_policy_losses", sys.modules[__name__])
    with pytest.raises(ValueError, match=words):
        find_loss(name)(case(0).inputs(), LossSettings())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"advantages_B": torch.zeros(5)}, r"advantages_B must have the shape \(6,\), got \(5,\)"),
        ({"behaviour_BT": torch.zeros(6, 7)}, r"behaviour_BT must have the shape of logp_BT, \(6, 8\), got"),
        ({"mask_BT": torch.ones(6, 8)}, "mask_BT must be bool, got torch.float32"),
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        case(0).inputs(**changed)


def test_a_weight_of_the_kl_term_needs_a_reference():
    with pytest.raises(ValueError, match="reference_BT is needed"):
        find_loss("dapo")(case(0).inputs(reference_BT=None), LossSettings(kl=0.1))
