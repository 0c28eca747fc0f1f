"""Sequential tests of a server, as values: they may be looked at after every sample.

`ShareTest` (Wald 1945): H0, a token has a property with probability p0, as with honest servers; H1, with p1.
The test adds up the logarithm of the likelihood ratio over tokens and ends as soon as it leaves an interval:
with H1 for a false server, whom it misses with probability beta at most, with H0 for an honest one, whom it
convicts with probability alpha at most. After H0 the next test begins. `size_ratio` gives the same test
errors of whole samples that are larger than they may be.

`Choices`: H0, a token is not the verifier's with probability p_t or less, given all that was before. An
alternative is a server that exchanges the two best tokens with probability q where their gap is below a
limit: p_t + q (1 - 2 p_t). A likelihood ratio has a mean of 1 at most under H0, as it grows with each other
token, and so has a weighted mean of ratios over alternatives and over the samples at which a server may have
begun. By Ville's inequality it reaches 1 / alpha with probability alpha at most, over all times.

`Drift`: H0, numbers x_1, x_2, ... have conditional means of 0 or less and mean squares of s_i^2 or less. As
exp(x - x^2 / 6) <= 1 + x + x^2 / 3, exp(l S_n - l^2 V_n / 2) with V_n = sum (x_i^2 + 2 s_i^2) / 3 is a
supermartingale for each l >= 0, whatever the tails of x are (Delyon, Exponential inequalities for sums of
weakly dependent variables, EJP 2009). Averaged over a half-normal distribution of l, its maximal inequality
is the limit of `drifts` (Robbins, Statistical methods related to the law of the iterated logarithm, 1970).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Probabilities of errors of a test, and the limits that follow."""

    alpha: float = 1e-6
    """Highest probability with which an honest server is convicted, per test."""
    beta: float = 1e-3
    """Highest probability with which a test takes a server of H1 for an honest one."""

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTest:
    """Hypotheses of a test of the share of tokens with a property."""

    p0: float
    p1: float
    errors: Errors = Errors()

    def __post_init__(self) -> None:
        check(0 < self.p0 < self.p1 < 1, "p0, p1", "must be 0 < p0 < p1 < 1", (self.p0, self.p1))

    @property
    def of_hit(self) -> float:
        """Return what a token with the property adds."""
        return math.log(self.p1 / self.p0)

    @property
    def of_miss(self) -> float:
        """Return what one without it adds, which is negative."""
        return math.log1p(-self.p1) - math.log1p(-self.p0)

    @property
    def clean_tokens(self) -> int:
        """Return the number of tokens without the property that end a test with H0."""
        return math.ceil(self.errors.honest_to / self.of_miss)


@dataclass(frozen=True, slots=True)
class TestState:
    """State of a server's test."""

    __test__ = False

    log_ratio: float = 0.0
    is_guilty: bool = False
    """Accepted H1. It stays so."""
    num_honest: int = 0
    """Tests that have ended with H0."""

    def after(self, test: ShareTest, hits: Sequence[bool]) -> "TestState":
        """Return the state after further tokens, in order: true for each with the property."""
        state, after_last = self, 0
        for place in [i for i, is_hit in enumerate(hits) if is_hit]:
            state = state._after_misses(test, place - after_last).plus(test.errors, test.of_hit)
            after_last = place + 1
        return state._after_misses(test, len(hits) - after_last)

    def _after_misses(self, test: ShareTest, count: int) -> "TestState":
        """Return the state after so many tokens without the property."""
        if self.is_guilty or not count:
            return self
        to_end = math.ceil((self.log_ratio - test.errors.honest_to) / -test.of_miss)
        if count < to_end:
            return replace(self, log_ratio=self.log_ratio + count * test.of_miss)
        tests, rest = divmod(count - to_end, test.clean_tokens)
        return replace(self, log_ratio=rest * test.of_miss, num_honest=self.num_honest + 1 + tests)

    def plus(self, errors: Errors, log_ratio: float) -> "TestState":
        """Return the state after evidence with this logarithm of the likelihood ratio."""
        if self.is_guilty:
            return self
        ratio = self.log_ratio + log_ratio
        if ratio <= errors.honest_to:
            return replace(self, log_ratio=0.0, num_honest=self.num_honest + 1)
        return replace(self, log_ratio=ratio, is_guilty=ratio >= errors.guilty_from)


LARGEST_SQUARE = 25.0
"""Upper limit of x^2 / variance in `size_ratio`: no sample decides by itself."""


def size_ratio(x: float, variance: float) -> float:
    """Return the logarithm of a likelihood ratio: N(0, 2 variance) against N(0, variance).

    Its exponential has a mean of 1 at most for every x that is at most as wide as N(0, variance).
    """
    square = min(x * x / variance, LARGEST_SQUARE) if variance > 0 else LARGEST_SQUARE * (x != 0)
    return 0.25 * square - 0.5 * math.log(2)


ALTERNATIVES = (
    *(
        (float(limit), min(0.5, times / limit))
        for limit in (1, 2, 4, 8, 32, 128)
        for times in (0.1, 0.3, 1, 4)
    ),
    *((math.inf, share) for share in (5e-4, 2e-3, 8e-3)),
)
"""Servers that choose: the gap, over eps, below which they do, and the probability of an exchange there."""
_LIMITS_A, _SHARES_A = torch.tensor(ALTERNATIVES, dtype=torch.float64).T


@dataclass(frozen=True, slots=True)
class Choices:
    """Ratios of the likelihoods of A servers that choose, to that of an honest one."""

    num_samples: int = 0
    log_ratios: tuple[float, ...] = (-math.inf,) * len(ALTERNATIVES)
    """Weighted means over the first samples at which the choosing may have begun: 1/2, 1/6, 1/12, .."""

    def after(self, is_other_T: Tensor, chances_T: Tensor, gaps_T: Tensor) -> "Choices":
        """Return the ratios after a sample.

        Args:
            is_other_T: Tokens that are not the verifier's, bool.
            chances_T: Highest probability of that with an honest server, in (0, 0.5].
            gaps_T: Gap between the two best tokens, over eps.
        """
        shares_AT = _SHARES_A[:, None] * (gaps_T <= _LIMITS_A[:, None])
        chosen_AT = chances_T + shares_AT * (1 - 2 * chances_T)
        of_other_AT = chosen_AT.log() - chances_T.log()
        of_right_AT = (-chosen_AT).log1p() - (-chances_T).log1p()
        ratios_A = torch.where(is_other_T, of_other_AT, of_right_AT).sum(1)
        number = self.num_samples + 1
        before_A = torch.tensor(self.log_ratios, dtype=torch.float64)
        begun_A = torch.full_like(before_A, -math.log(number * (number + 1)))
        return Choices(number, tuple((torch.logaddexp(before_A, begun_A) + ratios_A).tolist()))

    @property
    def log_ratio(self) -> float:
        """Return the logarithm of the mean ratio over the alternatives."""
        ratios_A = torch.tensor(self.log_ratios, dtype=torch.float64)
        return float(ratios_A.logsumexp(0)) - math.log(len(ratios_A))


@dataclass(frozen=True, slots=True)
class Drift:
    """Sum of increments whose mean is 0 or less with an honest server, and V."""

    total: float = 0.0
    v: float = 0.0

    def plus(self, x: float, variance: float) -> "Drift":
        """Return the sum after an increment of this conditional variance."""
        return Drift(self.total + x, self.v + (x * x + 2 * variance) / 3)

    def drifts(self, unit: float, alpha: float) -> bool:
        """Return whether the mean is above 0, by an error of probability alpha over all times.

        Args:
            unit: Size of V at which the test is sharpest.
            alpha: Probability with which an honest server is convicted.
        """
        if not self.total > 0 or unit <= 0:
            return False
        v = self.v + unit
        return self.total >= math.sqrt(v * (math.log(v / unit) + 2 * math.log(1 / alpha)))
