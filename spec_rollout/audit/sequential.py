"""Sequential test of a server's share of mismatches (Wald 1945), as a value.

H0: a token is a mismatch with probability p0, as with honest servers. H1: with p1. The test adds up the
logarithm of the likelihood ratio over tokens and ends as soon as it leaves an interval: with H1 for a liar,
whom it misses with probability beta at most, with H0 for an honest server, whom it convicts with probability
alpha at most. After H0 the next test begins.
"""

import math
from dataclasses import dataclass, replace

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchTest:
    """Hypotheses of the test."""

    p0: float
    p1: float
    alpha: float = 1e-6
    """Highest probability with which an honest server is convicted, per test."""
    beta: float = 1e-3
    """Highest probability with which a test takes a server of share p1 for an honest one."""

    def __post_init__(self) -> None:
        check(0 < self.p0 < self.p1 < 1, "p0, p1", "must be 0 < p0 < p1 < 1", (self.p0, self.p1))
        for name in ("alpha", "beta"):
            check(0 < getattr(self, name) < 0.5, name, "must be in (0, 0.5)", getattr(self, name))

    @property
    def guilty_from(self) -> float:
        """Return the logarithm of the likelihood ratio from which H1 is accepted."""
        return math.log((1 - self.beta) / self.alpha)

    @property
    def honest_to(self) -> float:
        """Return the logarithm of the likelihood ratio down to which the test goes on."""
        return math.log(self.beta / (1 - self.alpha))

    @property
    def of_mismatch(self) -> float:
        """Return what one mismatch adds."""
        return math.log(self.p1 / self.p0)

    @property
    def of_match(self) -> float:
        """Return what one other token adds, which is negative."""
        return math.log1p(-self.p1) - math.log1p(-self.p0)

    @property
    def clean_tokens(self) -> int:
        """Return the number of tokens without a mismatch that end a test with H0."""
        return math.ceil(self.honest_to / self.of_match)


@dataclass(frozen=True, slots=True)
class TestState:
    """State of a server's test."""

    __test__ = False

    log_ratio: float = 0.0
    is_guilty: bool = False
    """Accepted H1. It stays so."""
    num_honest: int = 0
    """Tests that have ended with H0."""

    def after(self, test: MismatchTest, mismatches: "list[bool]") -> "TestState":
        """Return the state after further tokens, in order: true for each mismatch."""
        state = self
        for is_mismatch in mismatches:
            if state.is_guilty:
                break
            ratio = state.log_ratio + (test.of_mismatch if is_mismatch else test.of_match)
            if ratio <= test.honest_to:
                state = replace(state, log_ratio=0.0, num_honest=state.num_honest + 1)
            else:
                state = replace(state, log_ratio=ratio, is_guilty=ratio >= test.guilty_from)
        return state
