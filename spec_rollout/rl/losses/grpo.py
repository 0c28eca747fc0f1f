"""GRPO, arXiv:2402.03300."""

from aedit.spec_rollout.rl.importance import ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import clipped_surrogate, per_token, sum_of_means


def grpo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return 1/B sum_i 1/T_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A).

    The mean over the tokens of each sequence, then over sequences. The paper's advantage is `std`.
    """
    found = ratios(inputs, settings)
    terms_BT, kept_BT = clipped_surrogate(found.r_BT, inputs.advantages_B[:, None], settings)
    terms_BT = per_token(terms_BT, found, inputs, settings)
    loss = sum_of_means(terms_BT, inputs.mask_BT) / inputs.num_sequences
    return LossOutput(loss, kept_BT & inputs.mask_BT)
