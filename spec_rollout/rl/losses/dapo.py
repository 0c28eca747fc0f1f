"""DAPO, arXiv:2503.14476."""

from aedit.spec_rollout.rl.importance import ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import clipped_surrogate, per_token


def dapo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A) / tokens of the batch.

    Each token counts alike, so long sequences count more than with `grpo`. The paper's other parts are
    settings: e_low 0.2, e_high 0.28, advantage `std`, dynamic sampling, overlong shaping.
    """
    found = ratios(inputs, settings)
    terms_BT, kept_BT = clipped_surrogate(found.r_BT, inputs.advantages_B[:, None], settings)
    loss = per_token(terms_BT, found, inputs, settings).sum() / inputs.num_tokens
    return LossOutput(loss, kept_BT & inputs.mask_BT)
