"""Compare the output of speculative decoding with that of decoding without it."""

from collections.abc import Sequence

import torch

from aedit.spec_rollout.model.target import Target
from aedit.spec_rollout.sampling.distribution import RowSampling, warp_logits
from aedit.spec_rollout.sampling.noise import gumbel
from aedit.spec_rollout.sampling.samples import Rollout

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25}
"""By how much the logits of one text differ between passes of different shapes, at most."""


def said_the_same(target: Target, ours: Sequence[Rollout], plain: Sequence[Rollout]) -> tuple[bool, str]:
    """Return whether all samples are equal up to rounding, and that as text.

    A sample may differ from the first token on whose choice depends on rounding.
    """
    ties = []
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True), 1):
        at = _first_difference(mine.tokens, theirs.tokens)
        if at is not None:
            where = f"number {number} differs from its token {at + 1} on"
            if gap(target, mine, theirs, at) > ROUNDING[target.dtype]:
                return False, f"no, {where}"
            ties.append(where)
    if not ties:
        return True, "yes"
    dtype = str(target.dtype).removeprefix("torch.")
    more = f" (and {len(ties) - 1} more)" if len(ties) > 1 else ""
    return True, f"yes, up to ties that rounding to {dtype} decides: {ties[0]}{more}"


@torch.inference_mode()
def gap(target: Target, mine: Rollout, theirs: Rollout, at: int) -> float:
    """Return the difference of the policy's scores of two next tokens, with the noise of the draw.

    0 is a tie.

    Infinity if the sampling parameters exclude one of them. Overwrites the target's first row.
    """
    if at >= min(len(mine.tokens), len(theirs.tokens)):
        return float("inf")
    prompt = mine.prompt
    text_T = torch.tensor([*prompt.tokens, *mine.tokens[:at]], device=target.device)
    logits_11V = target.logits(target.prefill(text_T, 0)[-1:])[None]
    scores_V = warp_logits(logits_11V, RowSampling.of([prompt.sampling], target.vocabulary, target.device))[
        0, 0
    ]
    if prompt.sampling.temperature > 0:
        place = torch.tensor([[len(text_T)]], device=target.device)
        scores_V = scores_V + gumbel(prompt.rollout, prompt.sample, place, target.vocabulary)[0, 0]
    apart = (scores_V[mine.tokens[at]] - scores_V[theirs.tokens[at]]).abs()
    return float(apart.nan_to_num(float("inf")))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if same is None and len(a) != len(b):
        return min(len(a), len(b))
    return same
