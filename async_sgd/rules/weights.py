"""Weight of a push among the others of its merge, before staleness and filtering."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from aedit.async_sgd.rules import penalty
from aedit.async_sgd.rules.config import PenaltyConfig
from aedit.async_sgd.rules.records import Push


def merge_weights(
    pushes: Sequence[Push],
    rule: Literal["uniform", "steps", "tokens", "penalty"],
    config: PenaltyConfig | None = None,
) -> tuple[float, ...]:
    """Return one weight per push, at least 0, not normalised. A push without steps weighs 0.

    `tokens` is tokens^2 / steps (arXiv:2604.21428): who saw more per step counts more. `penalty` is EDiT's
    softmax over norms, with a share by steps, as `config` says (default: its defaults).
    """
    match rule:
        case "uniform":
            return tuple(float(push.steps > 0) for push in pushes)
        case "steps":
            return tuple(float(push.steps) for push in pushes)
        case "tokens":
            return tuple(push.tokens * push.tokens / max(push.steps, 1) * (push.steps > 0) for push in pushes)
        case "penalty":
            norms_N1 = np.array([[push_norm(push)] for push in pushes]).reshape(len(pushes), 1)
            steps_N1 = np.array([[float(push.steps)] for push in pushes]).reshape(len(pushes), 1)
            w_N1 = penalty.weights(norms_N1, steps_N1, config or PenaltyConfig())
            return tuple(w_N1[:, 0].tolist())


def push_norm(push: Push) -> float:
    """Return the norm of the whole unit's pseudo-gradient.

    Not finite if that of one of its tensors is not.
    """
    return math.hypot(*push.norms)
