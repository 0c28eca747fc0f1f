"""Policy losses: inputs, importance weights, one pure function per loss, metrics, and the search by name.

Letters of the papers: p probability of a token under the trained policy, mu under the policy that generated
it (behaviour), r = p / mu, A advantage, B sequences, T tokens per sequence.

A log-ratio is bounded to +-20 before it is exponentiated, so a ratio is at most 4.9e8 (as in verl's rollout
correction) and finite in fp32. The bound is on the value alone: the gradient of a bounded ratio is its value
times the gradient of the log-ratio, so that a token beyond the bound is still pulled back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import wraps
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from aedit.types import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check,
    checked,
    imported,
    is_import_path,
    suggest,
)

Importance = Literal["off", "token", "sequence"]
OldLogprobs = Literal["engine", "trainer"]
MAX_LOG_RATIO = 20.0
MEANS = {
    "mismatch_kl": "tokens",
    "mismatch_kl_masked": "clipped",
    "mismatch_kl_unmasked": "kept",
    "clip_share": "tokens",
    "entropy": "tokens",
    "reference_kl": "reference_tokens",
}
"""Each metric, a sum, with the count that it is to be divided by."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Log-probabilities and advantages of some sequences of a batch.

    The values of a loss over the parts of a batch (micro-batches, ranks) add up to that of the batch, because
    the numbers by which it divides are those of the whole batch.
    """

    logp_BT: Tensor
    """log p of each token under the trained policy, with gradient. Finite where the mask is true."""
    behaviour_BT: Tensor
    """log mu of each token under the policy version that drew it: `Rollout.logprobs`."""
    mask_BT: Tensor
    """bool: tokens that are trained. False for prompts, padding and rollouts without a reward."""
    advantages_B: Tensor
    reference_BT: Tensor | None = None
    """Log-probabilities under a fixed policy, for `LossSettings.kl`."""
    proximal_BT: Tensor | None = None
    """Log-probabilities under the trained policy before the first inner step on this batch, where
    `LossSettings.needs_proximal`. None: those of now, which is right at the first step on a batch."""
    num_tokens: PositiveInt
    """True mask elements of the whole batch, over ranks and micro-batches."""
    num_sequences: PositiveInt
    """Sequences of the whole batch that have a true mask element, over ranks and micro-batches."""
    max_tokens: PositiveInt
    """Largest number of new tokens of a rollout, whatever the lengths of this batch are."""

    def __post_init__(self) -> None:
        shape = tuple(self.logp_BT.shape)
        check(len(shape) == 2, "logp_BT", "must have two dimensions, sequences and tokens", shape)
        for name in ("behaviour_BT", "mask_BT", "reference_BT", "proximal_BT"):
            value = getattr(self, name)
            fits = value is None or tuple(value.shape) == shape
            check(fits, name, f"must have the shape of logp_BT, {shape}", value is None or tuple(value.shape))
        found = tuple(self.advantages_B.shape)
        check(found == shape[:1], "advantages_B", f"must have the shape {shape[:1]}", found)
        check(self.mask_BT.dtype == torch.bool, "mask_BT", "must be bool", self.mask_BT.dtype)


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of a policy loss: those of `[rl]` with the same names."""

    clip_low: PositiveFloat = 0.2
    """Clip range below: of the ratio below 1, of the difference of probabilities with `dppo-tv`."""
    clip_high: PositiveFloat = 0.2
    """Clip range above."""
    importance: Importance = "off"
    """Truncated importance weights per token or per sequence; see `weights`."""
    importance_cap: PositiveFloat = 2.0
    old_logprobs: OldLogprobs = "engine"
    """Without importance weights: whose log-probabilities of a token ratios are relative to."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence to the reference policy."""

    @classmethod
    def of(cls, rl: object) -> "LossSettings":
        """Return the settings of `[rl]`, which has fields of the same names."""
        return cls(**{field.name: getattr(rl, field.name) for field in fields(cls)})

    @property
    def needs_proximal(self) -> bool:
        """Return whether ratios are relative to the trained policy before the first step on the batch."""
        return self.importance != "off" or self.old_logprobs == "trainer"


@checked()
@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A loss, and the tokens that its trust region has left alone."""

    loss: Tensor
    """Scalar, to be minimised: the sum over these sequences, divided by a number of the whole batch."""
    kept_BT: Tensor
    """bool: tokens of the mask whose term was neither clipped nor masked out."""


class PolicyLoss(Protocol):
    """A policy loss: a pure function of log-probabilities, advantages and settings."""

    def __call__(self, inputs: LossInputs, settings: LossSettings, /) -> LossOutput:
        """Return the loss of these sequences."""


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) with x bounded to +-20; the gradient is the value times that of x."""
    return x.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (x - x.detach()).exp()


def k3_of(d: Tensor) -> Tensor:
    """Return exp(d) - d - 1, with d bounded to +-20 in the exponential as in `bounded_exp`.

    expm1 keeps what exp(d) - 1 rounds away: near the policy d is 1e-6, and the result 5e-13.
    """
    bounded = d.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expm1() + bounded.exp() * (d - d.detach()) - d


def masked_difference(a_BT: Tensor, b_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return a - b, at least in fp32; 0 outside of the mask, whatever is there, also in the gradient."""
    dtype = torch.promote_types(torch.promote_types(a_BT.dtype, b_BT.dtype), torch.float32)
    return (a_BT.to(dtype) - b_BT.to(dtype)).where(mask_BT, 0.0)


def proximal_of(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the log-probabilities that ratios are relative to, without gradient.

    Those of the behaviour policy without importance weights. With them, the ratio is relative to the policy
    before the first inner step on the batch, and the weight accounts for the rest (decoupled PPO,
    arXiv:2110.00641, as AReaL uses it, arXiv:2505.24298). With `old_logprobs = "trainer"` nothing does: right
    where the same weights have generated, as then the rest is rounding.
    """
    if not settings.needs_proximal:
        return inputs.behaviour_BT.detach()
    return (inputs.logp_BT if inputs.proximal_BT is None else inputs.proximal_BT).detach()


def weights(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return truncated importance weights w (B, T), without gradient.

    token: min(p_prox / mu, C); sequence: min(product over the tokens of p_prox / mu, C); C importance_cap.
    Truncated importance sampling, arXiv:1802.01561 and verl's rollout correction. A weight with gradient
    would change what is estimated.
    """
    prox_BT = proximal_of(inputs, settings)
    log_BT = masked_difference(prox_BT, inputs.behaviour_BT.detach(), inputs.mask_BT)
    if settings.importance == "sequence":
        log_BT = log_BT.sum(1, keepdim=True).expand_as(log_BT)
    return bounded_exp(log_BT).clamp(max=settings.importance_cap)


def ratios(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return for each token the ratio of the trained to the proximal policy, and its importance weight.

    The ratio has a gradient, and is 1 outside of the mask. The weight, of the proximal over the behaviour
    policy, has none, and is 1 where `LossSettings.importance` is off.
    """
    log_BT = masked_difference(inputs.logp_BT, proximal_of(inputs, settings), inputs.mask_BT)
    r_BT = bounded_exp(log_BT)
    w_BT = torch.ones_like(r_BT).detach() if settings.importance == "off" else weights(inputs, settings)
    return r_BT, w_BT


def k3(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return exp(d) - d - 1 per token, d = log ref - log p; 0 outside of the mask.

    Its mean over tokens drawn from p is KL(p || ref), and it is never negative (Schulman, "Approximating KL
    divergence", 2020). d is bounded to +-20 in the exponential.
    """
    return k3_of(masked_difference(reference_BT.detach(), logp_BT, mask_BT))


def kl_term(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, r_BT: Tensor) -> Tensor:
    """Return r * k3 per token.

    r = p / mu, with gradient, makes value and gradient those of the KL divergence of the trained policy,
    although the tokens are drawn from mu (DeepSeek-V3.2, arXiv:2512.02556).
    """
    return r_BT * k3(logp_BT, reference_BT, mask_BT)


def clipped_surrogate(r: Tensor, A: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - e_low, 1 + e_high) A), and where the clip has not removed the gradient.

    PPO, arXiv:1707.06347. r and A broadcast against each other.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    terms = -torch.min(r * A, r.clamp(low, high) * A)
    clipped = (A > 0) & (r > high) | (A < 0) & (r < low)
    return terms, ~clipped


def per_token(
    policy_BT: Tensor, r_BT: Tensor, w_BT: Tensor, inputs: LossInputs, settings: LossSettings
) -> Tensor:
    """Return w * policy term + kl * KL term of each token, 0 outside of the mask; r and w as of `ratios`."""
    terms_BT = w_BT * policy_BT
    if settings.kl > 0:
        if inputs.reference_BT is None:
            raise ValueError("kl is above 0, so reference_BT is needed: log-probabilities of the reference")
        kl_BT = kl_term(inputs.logp_BT, inputs.reference_BT, inputs.mask_BT, w_BT * r_BT)
        terms_BT = terms_BT + settings.kl * kl_BT
    return terms_BT.where(inputs.mask_BT, 0.0)


def clipped_terms(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate of each token as `per_token` completes it, and which were not clipped."""
    r_BT, w_BT = ratios(inputs, settings)
    terms_BT, kept_BT = clipped_surrogate(r_BT, inputs.advantages_B[:, None], settings)
    return per_token(terms_BT, r_BT, w_BT, inputs, settings), kept_BT & inputs.mask_BT


def sum_of_means(terms_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum over sequences of the mean over the tokens of each; 0 for one without tokens."""
    return (terms_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).sum()


def grpo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return 1/B sum_i 1/T_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A).

    GRPO, arXiv:2402.03300. The mean over the tokens of each sequence, then over sequences. The paper's
    advantage is `std`.
    """
    terms_BT, kept_BT = clipped_terms(inputs, settings)
    return LossOutput(sum_of_means(terms_BT, inputs.mask_BT) / inputs.num_sequences, kept_BT)


def dapo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A) / tokens of the batch.

    DAPO, arXiv:2503.14476. Each token counts alike, so long sequences count more than with `grpo`. The
    paper's other parts are settings: e_low 0.2, e_high 0.28, advantage `std`, dynamic sampling, overlong
    shaping.
    """
    terms_BT, kept_BT = clipped_terms(inputs, settings)
    return LossOutput(terms_BT.sum() / inputs.num_tokens, kept_BT)


def dr_grpo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A) / (B * max_tokens).

    Dr. GRPO, arXiv:2503.20783. Divided by a constant, so that the length of a sequence has no influence on
    the weight of its tokens. The paper's advantage is `mean`.
    """
    terms_BT, kept_BT = clipped_terms(inputs, settings)
    return LossOutput(terms_BT.sum() / (inputs.num_sequences * inputs.max_tokens), kept_BT)


def gspo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return 1/B sum_i -min(s A, clip(s, 1 - e_low, 1 + e_high) A), s_i = exp(1/T_i sum_t log r).

    GSPO, arXiv:2507.18071. A sequence is clipped as a whole. s is much closer to 1 than the ratio of a token:
    the paper clips at 3e-4 below and 4e-4 above. The paper's advantage is `std`.
    """
    r_BT, w_BT = ratios(inputs, settings)
    log_BT = masked_difference(inputs.logp_BT, proximal_of(inputs, settings), inputs.mask_BT)
    s_B = bounded_exp(log_BT.sum(1) / inputs.mask_BT.sum(1).clamp(min=1))
    terms_B, kept_B = clipped_surrogate(s_B, inputs.advantages_B, settings)
    terms_BT = per_token(terms_B[:, None].expand_as(log_BT), r_BT, w_BT, inputs, settings)
    loss = sum_of_means(terms_BT, inputs.mask_BT) / inputs.num_sequences
    return LossOutput(loss, kept_B[:, None] & inputs.mask_BT)


def cispo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -sg[min(r, 1 + e_high)] A log p / tokens of the batch; sg stops the gradient.

    CISPO, arXiv:2506.13585 (MiniMax-M1). The weight of a token is cut, never its gradient, so clip_low has no
    effect (nor has it in the paper). A cap of 5 (ScaleRL, arXiv:2510.13786) is clip_high = 4.
    """
    (r_BT, w_BT), cap = ratios(inputs, settings), 1 + settings.clip_high
    weight_BT = r_BT.detach().clamp(max=cap)
    logp_BT = inputs.logp_BT.to(weight_BT.dtype).where(inputs.mask_BT, 0.0)
    terms_BT = -weight_BT * inputs.advantages_B[:, None] * logp_BT
    loss = per_token(terms_BT, r_BT, w_BT, inputs, settings).sum() / inputs.num_tokens
    return LossOutput(loss, (r_BT <= cap) & inputs.mask_BT)


def dppo_tv(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -keep r A / tokens of the batch.

    DPPO with the total-variation mask, arXiv:2602.04879. keep is false where A > 0 and p - mu > clip_high, or
    A < 0 and p - mu < -clip_low: a token whose probability has already moved that far from the behaviour
    policy's, in the direction of the advantage, has no gradient. A ratio would clip rare tokens at once and
    likely ones hardly ever; a difference of probabilities bounds the total variation. r is never clipped.
    """
    (r_BT, w_BT), mask_BT = ratios(inputs, settings), inputs.mask_BT
    A_B1 = inputs.advantages_B[:, None]
    old_BT = proximal_of(inputs, settings) if settings.importance == "off" else inputs.behaviour_BT
    p_BT, mu_BT = (x.detach().to(r_BT.dtype).exp() for x in (inputs.logp_BT, old_BT))
    moved_BT = p_BT - mu_BT
    masked_BT = (A_B1 > 0) & (moved_BT > settings.clip_high) | (A_B1 < 0) & (moved_BT < -settings.clip_low)
    terms_BT = (-r_BT * A_B1).where(~masked_BT, 0.0)
    loss = per_token(terms_BT, r_BT, w_BT, inputs, settings).sum() / inputs.num_tokens
    return LossOutput(loss, ~masked_BT & mask_BT)


LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {"dppo-tv": dppo_tv, "grpo": grpo, "dapo": dapo, "dr-grpo": dr_grpo, "gspo": gspo, "cispo": cispo}
)


def find_loss(name: str) -> PolicyLoss:
    """Return the policy loss of that name, or the function at the import path `package.module:name`.

    Raises ValueError if there is none, or, when it is called, if a function of one's own returns something
    else than a LossOutput with a scalar loss and a bool tensor of the shape of the log-probabilities.
    """
    rule = f"must be one of {', '.join(LOSSES)}, or module:Name"
    check(name in LOSSES or is_import_path(name), "rl.loss", rule, f"{name}{suggest(name, LOSSES)}")
    return LOSSES[name] if name in LOSSES else _checked(imported(name, "rl.loss"), name)


def try_loss(name: str, settings: LossSettings) -> None:
    """Compute value and gradient of the loss `name` for two short sequences, before a run relies on it.

    Raises ValueError if they are of another type or shape, or not finite. Errors of its own pass.
    """
    logp_BT = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]], requires_grad=True)
    inputs = LossInputs(
        logp_BT=logp_BT,
        behaviour_BT=logp_BT.detach() - 0.25,
        mask_BT=torch.tensor([[True, True, True], [True, True, False]]),
        advantages_B=torch.tensor([1.0, -1.0]),
        reference_BT=logp_BT.detach() + 0.125 if settings.kl else None,
        num_tokens=5,
        num_sequences=2,
        max_tokens=3,
    )
    found = find_loss(name)(inputs, settings)
    if found.kept_BT.dtype != torch.bool:
        raise ValueError(f"kept_BT is of {found.kept_BT.dtype}, expected bool")
    (gradient_BT,) = torch.autograd.grad(found.loss, logp_BT, allow_unused=True)
    if gradient_BT is None or not (found.loss.isfinite() and gradient_BT.isfinite().all()):
        raise ValueError("expected a finite loss with a finite gradient with respect to logp_BT")


def _checked(loss: PolicyLoss, path: str) -> PolicyLoss:
    @wraps(loss)
    def checked(inputs: LossInputs, settings: LossSettings) -> LossOutput:
        found = loss(inputs, settings)
        if not isinstance(found, LossOutput):
            raise ValueError(f"rl.loss: {path} returned {type(found).__name__}, expected a LossOutput")
        shapes = tuple(found.loss.shape), tuple(found.kept_BT.shape)
        if shapes != ((), tuple(inputs.logp_BT.shape)):
            raise ValueError(
                f"rl.loss: {path} returned loss and kept_BT of shapes {shapes[0]} and {shapes[1]}, "
                f"expected () and {tuple(inputs.logp_BT.shape)}"
            )
        return found

    return checked


@torch.no_grad()
def loss_metrics(
    inputs: LossInputs, output: LossOutput, entropy_BT: Tensor | None = None
) -> dict[str, float]:
    """Return sums and counts; add those of all micro-batches and ranks, then call `mean_metrics`.

    Mismatch is r - log r - 1 with r = p / mu: an estimate of KL(mu || p), 0 on policy. It is
    summed over all tokens, over those that the trust region has removed (masked), and over the others.

    Args:
        inputs: Inputs of the loss.
        output: Output of the loss.
        entropy_BT: Entropy of the trained policy at each token. Without it, -log mu stands for it, whose mean
            is the entropy of the behaviour policy.
    """
    mask_BT = inputs.mask_BT
    log_BT = masked_difference(inputs.logp_BT, inputs.behaviour_BT, mask_BT)
    mismatch_BT = _divergence(log_BT)
    kept_BT, clipped_BT = output.kept_BT & mask_BT, ~output.kept_BT & mask_BT
    entropy_BT = -inputs.behaviour_BT if entropy_BT is None else entropy_BT
    found = {
        "tokens": mask_BT,
        "kept": kept_BT,
        "clipped": clipped_BT,
        "clip_share": clipped_BT,
        "mismatch_kl": mismatch_BT,
        "mismatch_kl_masked": mismatch_BT.where(clipped_BT, 0.0),
        "mismatch_kl_unmasked": mismatch_BT.where(kept_BT, 0.0),
        "entropy": entropy_BT.where(mask_BT, 0.0),
    }
    if inputs.reference_BT is not None:
        found["reference_tokens"] = mask_BT
        found["reference_kl"] = _divergence(masked_difference(inputs.reference_BT, inputs.logp_BT, mask_BT))
    return {name: float(value_BT.sum(dtype=torch.float64)) for name, value_BT in found.items()}


def _divergence(d_BT: Tensor) -> Tensor:
    """Return `k3_of` in float64, never below 0: the rounding of fp32 is larger than the value on policy."""
    return k3_of(d_BT.double()).clamp_min(0.0)


def mean_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the means of added-up `loss_metrics`; a metric that nothing was counted for is left out."""
    return {
        name: totals[name] / totals[count]
        for name, count in MEANS.items()
        if name in totals and totals.get(count, 0) > 0
    }
