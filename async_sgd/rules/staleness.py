"""Weight of a pseudo-gradient that was measured from an older anchor."""

import math

from aedit.async_sgd.rules.config import StalenessConfig


def factor(config: StalenessConfig, versions: int) -> float:
    """Return the share of a pseudo-gradient that counts, in [0, 1]; 0 means that it is refused.

    versions: anchor versions made since it was measured, s >= 0. The share is 1; (1 + s)^-power
    (arXiv:2401.09135); or exp(-rate s) times a gate of half a cosine (arXiv:2605.09126). All are 0 from the
    cutoff on.
    """
    assert versions >= 0, "measured from an anchor that does not exist yet"
    if versions >= config.cutoff:
        return 0.0
    match config.rule:
        case "constant":
            return 1.0
        case "polynomial":
            return float((1 + versions) ** -config.power)
        case "exponential":
            gate = 0.5 * (1 + math.cos(math.pi * versions / config.cutoff))
            return math.exp(-config.rate * versions) * gate
