"""Comparison of samples generated with and without speculation."""

from collections.abc import Sequence

import torch

from aedit.spec_rollout.model import Segment, TargetModel
from aedit.spec_rollout.sampling import LogitAdjustments, Rollout, RowSampling, gumbel, warp_logits

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Upper limit of differences between logits of the same text from passes of different shapes."""


def compare_tokens(
    target: TargetModel, rollouts: Sequence[Rollout], plain_rollouts: Sequence[Rollout]
) -> tuple[bool, str]:
    """Compare the tokens of all samples, up to the first difference of each that rounding explains.

    Returns:
    True if they are equal up to such ties, and a description.
    """
    ties = []
    for number, (first, second) in enumerate(zip(rollouts, plain_rollouts, strict=True), 1):
        index = _first_difference(first.tokens, second.tokens)
        if index is not None:
            where = f"number {number} differs from its token {index + 1} on"
            if score_gap(target, first, second, index) > ROUNDING[target.dtype]:
                return False, f"no, {where}"
            ties.append(where)
    if not ties:
        return True, "yes"
    dtype = str(target.dtype).removeprefix("torch.")
    more = f" (and {len(ties) - 1} more)" if len(ties) > 1 else ""
    return True, f"yes, up to ties that rounding to {dtype} decides: {ties[0]}{more}"


@torch.inference_mode()
def score_gap(target: TargetModel, first: Rollout, second: Rollout, index: int) -> float:
    """Return the difference of the policy's scores of two next tokens, with sampling noise.

    0 is a tie; infinity means that the sampling settings exclude a token. Overwrites the target's first row.
    """
    if index >= min(len(first.tokens), len(second.tokens)):
        return float("inf")
    prompt = first.prompt
    text = [*prompt.tokens, *first.tokens[:index]]
    before, last = text[:-1], torch.tensor([text[-1:]], device=target.device)
    if before:
        target.prefill([Segment(0, 0, before)])
    logits_11V = target.step(last, [len(before)])[0]
    so_far = Rollout(prompt, first.tokens[:index])
    adjustments = LogitAdjustments.of([so_far], target.vocabulary, target.device)
    if adjustments is not None:
        logits_11V = adjustments.apply(logits_11V, None)
    rows = RowSampling.of([prompt.sampling], target.vocabulary, target.device)
    drawn_11 = torch.full((1, 1), index, device=target.device)
    scores_V = warp_logits(logits_11V, rows, drawn_11)[0, 0]
    if prompt.sampling.temperature > 0:
        place = torch.tensor([[len(text)]], device=target.device)
        scores_V = scores_V + gumbel(prompt.rollout, prompt.sample, place, target.vocabulary)[0, 0]
    difference = (scores_V[first.tokens[index]] - scores_V[second.tokens[index]]).abs()
    return float(difference.nan_to_num(float("inf")))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if same is None and len(a) != len(b):
        return min(len(a), len(b))
    return same
