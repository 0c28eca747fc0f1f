"""Soft penalty for answers that are almost too long."""

from aedit.types import check


def overlong_penalty(num_tokens: int, max_tokens: int, window: int) -> float:
    """Return what is added to the reward of an answer of `num_tokens` tokens: 0 to -1.

    0 up to max_tokens - window, then falling linearly, -1 from max_tokens on (DAPO,
    arXiv:2503.14476). window 0: no penalty.
    """
    check(0 <= window <= max_tokens, "overlong", f"must be 0 to {max_tokens}, the longest answer", window)
    if window == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - window)) / window))
