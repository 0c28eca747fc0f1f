"""Allowed next tokens that depend on the text: the hook that grammar libraries fill.

A drafted token is verified with the constraint of its own text, so constrained decoding gives the tokens that
it would give without drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aedit.spec_rollout.sampling.samples import Rollout


def allowed_after(
    rollout: Rollout, guesses: Sequence[int], parents: Sequence[int], vocabulary: int
) -> dict[int, Tensor]:
    """Ask a sample's constraint along its draft and return the allowed tokens, bool (V,), on the CPU.

    The constraint sees only texts that the rollout can have: it is not asked after a drafted token that it
    forbids, after a stop token, and beyond max_new_tokens.

    Args:
        rollout: Running rollout with a constraint.
        guesses: Drafted tokens. Parents precede their children.
        parents: Index of each one's parent, -1 for the rollout's last token.
        vocabulary: V.

    Returns:
        The tokens allowed after the last token (at 0) and after drafted token n (at n + 1); those that the
        constraint was not asked about are missing.

    Raises:
        ValueError: The constraint returned something else than a mask or token ids.
    """
    sampling = rollout.prompt.sampling
    texts: dict[int, list[int]] = {0: list(rollout.tokens)}
    allowed = {0: _ask(rollout, texts[0], vocabulary)}
    for n, (token, parent) in enumerate(zip(guesses, parents, strict=False)):
        above = parent + 1
        if above not in texts or not allowed[above][token] or token in sampling.stop_tokens:
            continue
        text = [*texts[above], token]
        if len(text) < sampling.max_new_tokens:
            texts[n + 1], allowed[n + 1] = text, _ask(rollout, text, vocabulary)
    return allowed


def _ask(rollout: Rollout, text: list[int], vocabulary: int) -> Tensor:
    constraint = rollout.prompt.sampling.constraint
    assert constraint is not None
    answer, name = constraint.allowed(tuple(text)), f"constraint of rollout {rollout.prompt.name}"
    if answer is None:
        return torch.ones(vocabulary, dtype=torch.bool)
    if isinstance(answer, Tensor) and answer.dtype == torch.bool:
        if answer.shape != (vocabulary,):
            raise ValueError(f"{name}: the mask has shape {tuple(answer.shape)}, expected ({vocabulary},)")
        return answer.cpu()
    ids = torch.as_tensor(answer if isinstance(answer, Tensor) else list(answer))
    if not ids.numel():
        return torch.zeros(vocabulary, dtype=torch.bool)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dim() != 1:
        raise ValueError(
            f"{name}: returned {ids.dtype}, {tuple(ids.shape)}; expected a bool tensor ({vocabulary},), "
            "token ids, or None"
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if not 0 <= lowest <= highest < vocabulary:
        raise ValueError(f"{name}: token ids {lowest} to {highest} exceed the vocabulary of {vocabulary}")
    return torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids.long().cpu(), True)
