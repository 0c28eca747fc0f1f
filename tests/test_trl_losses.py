"""Tests policy losses against those of `trl` on the same inputs, by `GRPOTrainer._compute_loss` itself."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.policy_losses import case

from aedit.spec_rollout import LossSettings, advantages, find_loss, loss_metrics, mean_metrics

TRL = {"grpo": "grpo", "dapo": "dapo", "dr-grpo": "dr_grpo", "gspo": "grpo", "cispo": "cispo"}
"""trl has no loss of the name gspo: it is `grpo` with ratios of sequences. It has no dppo-tv."""
GSPO_KL = ("gspo", 0.2)
"""Left out: trl weights the divergence of a token by the ratio of its sequence, we by the token's own."""


def trl_loss(name, c, s, weights_BT=None):
    """Return trl's loss, its gradient with respect to the log-probabilities, and its metrics."""
    logp = torch.tensor(c.logp, requires_grad=True)
    # Imported here, as it takes long: only by the process that runs these tests.
    GRPOTrainer = pytest.importorskip("trl", reason="trl is not installed").GRPOTrainer
    trainer = object.__new__(GRPOTrainer)
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1),
        loss_type=TRL[name],
        importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=s.clip_low,
        epsilon_high=1 + s.clip_high if name == "cispo" else s.clip_high,  # trl's is the cap itself
        beta=s.kl,
        max_completion_length=c.max_tokens,
        use_vllm=weights_BT is not None,
        vllm_importance_sampling_correction=weights_BT is not None,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **more: (logp, torch.zeros_like(logp), None),
    )
    ids = torch.zeros(c.logp.shape, dtype=torch.long)
    base = c.behaviour if c.proximal is None else c.proximal
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": torch.tensor(c.mask).long(),
        "advantages": torch.tensor(c.advantages),
        "old_per_token_logps": torch.tensor(base),
        "ref_per_token_logps": torch.tensor(c.reference),
        "importance_sampling_ratio": weights_BT,
        "num_items_in_batch": torch.tensor(float(c.mask.sum())),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), logp.grad, {key: values[0] for key, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    ("name", "kl"), [(name, kl) for name in TRL for kl in (0.0, 0.2) if (name, kl) != GSPO_KL]
)
def test_value_and_gradient_are_trls(name, kl):
    for seed in range(4):
        c, s = case(seed), LossSettings(clip_low=0.15, clip_high=0.3, kl=kl)
        inputs = c.inputs()
        out = find_loss(name)(inputs, s)
        out.loss.backward()
        loss, grad, found = trl_loss(name, c, s)
        assert out.loss.item() == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(inputs.logp_BT.grad, grad, rtol=1e-10, atol=1e-14)
        if name in ("grpo", "dapo", "dr-grpo"):
            ours = mean_metrics(loss_metrics(inputs, out))
            assert ours["clip_share"] == pytest.approx(found["clip_ratio/region_mean"])


@pytest.mark.parametrize("name", TRL)
def test_ratios_relative_to_the_trainers_own_policy_are_trls_without_vllm(name):
    """trl computes the probabilities of the policy before the first step on a batch itself, as verl does."""
    for seed in range(4):
        c = case(seed, proximal=True)
        inputs = c.inputs()
        out = find_loss(name)(inputs, LossSettings(old_logprobs="trainer"))
        out.loss.backward()
        loss, grad, _ = trl_loss(name, c, LossSettings())
        assert out.loss.item() == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(inputs.logp_BT.grad, grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("name", TRL)
def test_truncated_importance_weights_are_multiplied_as_trl_does(name, importance):
    """trl is given min(p_prox / mu, C), as `vllm_importance_sampling_mode` token or sequence truncates it."""
    for seed in range(4):
        c = case(seed, proximal=True)
        s = LossSettings(importance=importance, importance_cap=1.4)
        log_w = np.where(c.mask, c.proximal - c.behaviour, 0.0)
        log_w = log_w if importance == "token" else log_w.sum(1, keepdims=True)
        weights = torch.tensor(np.minimum(np.exp(log_w), 1.4))
        inputs = c.inputs()
        out = find_loss(name)(inputs, s)
        out.loss.backward()
        loss, grad, _ = trl_loss(name, c, s, weights)
        assert out.loss.item() == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(inputs.logp_BT.grad, grad, rtol=1e-10, atol=1e-14)


def test_advantages_are_trls_up_to_the_constant_that_it_adds_to_the_deviation():
    from trl.trainer.utils import nanstd

    rewards = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.9, None, 0.1]]
    grouped = torch.tensor([[float("nan") if r is None else r for r in row] for row in rewards])
    centred = grouped - torch.nanmean(grouped, dim=1, keepdim=True)
    wanted = {"mean": centred, "std": centred / nanstd(grouped, dim=1, keepdim=True)}
    for kind, values in wanted.items():
        assert torch.allclose(torch.tensor(advantages(rewards, kind)), values.nan_to_num(nan=0.0))
