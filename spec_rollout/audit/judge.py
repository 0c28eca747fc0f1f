"""Judgement of a server's samples: hard rules per sample, sequential tests over all of them.

A server that knows the tolerances stays below each of them and uses what is left: it draws the better one of
two tokens that are nearly equal, or reports all log-probabilities slightly too high, which shifts the
importance ratio of a long sample by much. So, besides the share of mismatches, four things are tested that no
limit of a single token sees: how many tokens are not the verifier's, beside the number that the gaps let
expect; the size of the summed difference of log-probabilities of a sample, and its mean; and whether either
goes with the reward. `form_error` has the rules that need no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from aedit.spec_rollout.audit.calibration import (
    HARD_MARGIN,
    Calibration,
    exchanges,
    mismatches,
    variances,
)
from aedit.spec_rollout.audit.sequential import Choices, Drift, Errors, TestState, size_ratio
from aedit.spec_rollout.audit.statement import HeldRollout
from aedit.spec_rollout.audit.token_margins import Margins
from aedit.spec_rollout.sampling import Sampling, StopStrings, TokenDecoder

MEDIAN_TOKENS = 8
"""Least tokens of a sample for the rule about its median."""
UNIT_TOKENS = 1000
"""Tokens after which the tests of means are sharpest."""
UNIT_OTHERS = 100.0
"""Tokens that are not the verifier's after which the test of their advantages is sharpest."""
ERRORS = Errors()


@dataclass(frozen=True, slots=True)
class Scored:
    """Judged tokens of one sample: margins, and what the server has claimed about the same tokens."""

    margins: Margins
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    places: tuple[int, ...]
    """Place of each in the answer."""
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Judgement of one sample."""

    reason: str
    """Empty: nothing is wrong."""
    evidence: Mapping[str, Any]
    num_tokens: int
    num_mismatches: int


@dataclass(frozen=True, slots=True)
class Tests:
    """States of the tests of one server."""

    __test__ = False

    mismatches: TestState = field(default_factory=TestState)
    choices: Choices = field(default_factory=Choices)
    sizes: TestState = field(default_factory=TestState)
    too_high: Drift = field(default_factory=Drift)
    too_low: Drift = field(default_factory=Drift)

    def after(self, found: "SampleSums", calibration: Calibration) -> "Tests":
        """Return the states after a sample."""
        allowed = calibration.largest_bias * found.num_tokens
        ratio = size_ratio(max(0.0, abs(found.difference) - allowed), found.variance)
        return Tests(
            self.mismatches.after(calibration.mismatch_test(), found.is_mismatch),
            self.choices.after(found.is_other_T, found.chances_T, found.gaps_T / calibration.eps),
            self.sizes.plus(ERRORS, ratio),
            self.too_high.plus(found.difference - allowed, found.variance),
            self.too_low.plus(-found.difference - allowed, found.variance),
        )

    def finding(self, record: "ServerRecord", calibration: Calibration) -> str:
        """Return what the tests have shown about a server with this record; empty if nothing."""
        tokens = max(1, record.num_tokens)
        if self.mismatches.is_guilty:
            return f"{record.num_mismatches / tokens:.3%} of its audited tokens are not those of the policy"
        if self.choices.log_ratio >= math.log(1 / ERRORS.alpha):
            return (
                f"{record.num_others / tokens:.3%} of its audited tokens are not the verifier's, where "
                f"rounding by eps = {calibration.eps:.2g} exchanges {record.expected_others / tokens:.3%} "
                "at most"
            )
        if self.sizes.is_guilty:
            return "the log-probabilities of whole samples differ by more than rounding"
        unit = _unit(calibration)
        if self.too_high.drifts(unit, ERRORS.alpha) or self.too_low.drifts(unit, ERRORS.alpha):
            mean = record.sum_of_differences / tokens
            return (
                f"its log-probabilities differ by {mean:+.2g} in the mean of {tokens} tokens, where at most "
                f"{calibration.largest_bias:.2g} is expected"
            )
        return ""


@dataclass(frozen=True, slots=True)
class SampleSums:
    """Parts of one sample that the tests add up."""

    is_mismatch: list[bool]
    is_other_T: torch.Tensor
    """Tokens that are not the verifier's."""
    chances_T: torch.Tensor
    """Highest probability of that with an honest server."""
    gaps_T: torch.Tensor
    exchanged: float
    """Number of other tokens that rounding by eps lets expect."""
    difference: float
    """Sum of the differences of log-probabilities, each limited to tau."""
    variance: float
    """Of `difference`, with an honest server."""

    @classmethod
    def of(cls, scored: Scored, calibration: Calibration) -> "SampleSums":
        """Return the sums of a sample in which everything is finite."""
        found = scored.margins
        differences_T = _differences(scored)
        return cls(
            mismatches(found, differences_T, calibration.tau).tolist(),
            ~(found.margins_T <= 0),
            calibration.chances(found.gaps_T),
            found.gaps_T,
            float(exchanges(found.gaps_T, calibration.eps).sum()),
            float(differences_T.clamp(-calibration.tau, calibration.tau).sum()),
            calibration.clustering * float(variances(found, calibration.eps).sum()),
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of judged tokens."""
        return len(self.is_mismatch)

    @property
    def num_others(self) -> int:
        """Return the number of tokens that are not the verifier's."""
        return int(self.is_other_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """Results of a server so far, as a value."""

    tests: Tests = field(default_factory=Tests)
    num_samples: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0
    num_others: int = 0
    """Tokens that were not the verifier's."""
    expected_others: float = 0.0
    """Highest mean of their number with an honest server."""
    sum_of_differences: float = 0.0
    """Of log-probabilities: those of the server minus those of the verifier."""
    num_failures: int = 0
    largest_margin: float = 0.0

    def judge(self, scored: Scored, calibration: Calibration) -> tuple["ServerRecord", Judgement]:
        """Return the record after a sample, and the judgement of the sample. A failure begins new tests."""
        differences_T = _differences(scored)
        is_mismatch = mismatches(scored.margins, differences_T, calibration.tau).tolist()
        after = replace(
            self,
            num_samples=self.num_samples + 1,
            num_tokens=self.num_tokens + len(is_mismatch),
            num_mismatches=self.num_mismatches + sum(is_mismatch),
            num_others=self.num_others + int((~(scored.margins.margins_T <= 0)).sum()),
            expected_others=self.expected_others + float(calibration.chances(scored.margins.gaps_T).nansum()),
            sum_of_differences=self.sum_of_differences + float(differences_T.nansum()),
            largest_margin=max([self.largest_margin, *scored.margins.margins_T.tolist()]),
        )
        finding = _hard(scored, differences_T, calibration)
        tests = Tests()
        if finding is None and is_mismatch:
            tests = self.tests.after(SampleSums.of(scored, calibration), calibration)
            shown = tests.finding(after, calibration)
            if shown:
                finding = shown, int(torch.maximum(scored.margins.margins_T, differences_T.abs()).argmax())
        if finding is None:
            passed = replace(after, tests=tests if is_mismatch else self.tests)
            return passed, Judgement("", {}, len(is_mismatch), sum(is_mismatch))
        after = replace(after, tests=Tests(), num_failures=self.num_failures + 1)
        evidence = _evidence(scored, finding[1], calibration)
        return after, Judgement(finding[0], evidence, len(is_mismatch), sum(is_mismatch))


@dataclass(frozen=True, slots=True)
class RewardRecord:
    """Tests whether the errors of a server go with the reward, as a value.

    An honest server's rounding knows no reward: given the sums of logits and noise, which token wins a near
    tie does not depend on which one pays. So advantage times (other tokens - their expected number) and
    advantage times the summed difference of log-probabilities have a mean of 0. The expected number is
    scaled by what was seen before, so that a wrong eps does no harm.
    """

    num_others: float = 0.0
    expected_others: float = 0.0
    better: Drift = field(default_factory=Drift)
    worse: Drift = field(default_factory=Drift)
    higher: Drift = field(default_factory=Drift)
    lower: Drift = field(default_factory=Drift)

    def judge(self, scored: Scored, advantage: float, calibration: Calibration) -> tuple["RewardRecord", str]:
        """Return the record after a sample that passes all other rules, and what it shows; empty: nothing."""
        if not scored.tokens:
            return self, ""
        found = SampleSums.of(scored, calibration)
        scale = (self.num_others + 1) / (self.expected_others + 1)
        expected = scale * found.exchanged
        tokens, logprobs = advantage * (found.num_others - expected), advantage * found.difference
        allowed = abs(advantage) * calibration.largest_bias * found.num_tokens
        of_tokens, of_logprobs = advantage**2 * expected, advantage**2 * found.variance
        after = RewardRecord(
            self.num_others + found.num_others,
            self.expected_others + found.exchanged,
            self.better.plus(tokens, of_tokens),
            self.worse.plus(-tokens, of_tokens),
            self.higher.plus(logprobs - allowed, of_logprobs),
            self.lower.plus(-logprobs - allowed, of_logprobs),
        )
        alpha, unit = ERRORS.alpha, _unit(calibration)
        if any(each.drifts(UNIT_OTHERS, alpha) for each in (after.better, after.worse)):
            return RewardRecord(), "its tokens that are not the verifier's go with the reward"
        if any(each.drifts(unit, alpha) for each in (after.higher, after.lower)):
            return RewardRecord(), "the errors of its log-probabilities go with the reward"
        return after, ""


def _unit(calibration: Calibration) -> float:
    """Return V of a mean of log-probabilities after `UNIT_TOKENS` tokens."""
    return UNIT_TOKENS * calibration.clustering * calibration.eps**2


def _differences(scored: Scored) -> torch.Tensor:
    """Return claimed minus verified log-probabilities, (T,)."""
    return torch.tensor(scored.logprobs, dtype=torch.float64) - scored.margins.logprobs_T


def _hard(scored: Scored, differences_T: torch.Tensor, calibration: Calibration) -> tuple[str, int] | None:
    """Return what one sample alone shows, and the first place that shows it; None if nothing."""
    margins_T = scored.margins.margins_T
    if not len(margins_T):
        return None
    wrong = (~(margins_T <= HARD_MARGIN)).nonzero()
    if len(wrong):
        return "a token is not the one that the policy draws with this key", int(wrong[0])
    false = (~(differences_T.abs() <= HARD_MARGIN)).nonzero()
    if len(false):
        return "a log-probability is not that of the policy", int(false[0])
    furthest = int(differences_T.abs().argmax())
    if len(margins_T) < MEDIAN_TOKENS:
        return None
    median = float(differences_T.abs().median())
    if median > calibration.logprob_median:
        return f"its log-probabilities differ by {median:.3g} in the median", furthest
    return None


def _evidence(scored: Scored, i: int, calibration: Calibration) -> dict[str, Any]:
    """Return the worst token in words that JSON can hold; numbers that are not finite as text."""
    margin, verified = float(scored.margins.margins_T[i]), float(scored.margins.logprobs_T[i])
    return {
        "place": scored.places[i],
        "token": scored.tokens[i],
        "right_token": int(scored.margins.right_T[i]),
        "margin": margin if math.isfinite(margin) else str(margin),
        "logprob": scored.logprobs[i],
        "verified_logprob": verified if math.isfinite(verified) else str(verified),
        "version": scored.versions[i],
        "tau": calibration.tau,
    }


LOGPROB_SLACK = 1e-3
"""Rounding may give a log-probability slightly above 0."""


def form_error(
    held: HeldRollout, sampling: Sampling, vocabulary: int, tokenizer: TokenDecoder | None = None
) -> str:
    """Return which rule a sample breaks; empty if none.

    Args:
        held: The sample.
        sampling: Its settings.
        vocabulary: V.
        tokenizer: Without it, ends by stop strings are not checked.
    """
    return _lists_error(held, vocabulary) or _versions_error(held) or _end_error(held, sampling, tokenizer)


def _lists_error(held: HeldRollout, vocabulary: int) -> str:
    num_tokens = len(held.tokens)
    if not num_tokens == len(held.logprobs) == len(held.versions):
        return f"{num_tokens} tokens with {len(held.logprobs)} logprobs and {len(held.versions)} versions"
    if not 0 <= held.start <= num_tokens or not held.prompt:
        return f"it starts at {held.start} of {num_tokens} tokens, after a prompt of {len(held.prompt)}"
    bad = next((each for each in (*held.prompt, *held.tokens) if not 0 <= each < vocabulary), None)
    if bad is not None:
        return f"token {bad} is outside the vocabulary of {vocabulary}"
    wrong = next((each for each in held.logprobs if not -math.inf < each <= LOGPROB_SLACK), None)
    return "" if wrong is None else f"a log-probability is {wrong}"


def _versions_error(held: HeldRollout) -> str:
    own = held.versions[held.start :]
    falls = any(after < before for before, after in pairwise(own))
    return f"its versions fall: {own}" if falls else ""


def _end_error(held: HeldRollout, sampling: Sampling, tokenizer: TokenDecoder | None) -> str:
    """Return the fault of the end: too early, too late, or with another reason than the tokens show."""
    num_tokens, most = len(held.tokens), sampling.max_new_tokens
    if num_tokens > most:
        return f"{num_tokens} tokens, more than max_new_tokens = {most}"
    end = _first_end(held, sampling, tokenizer)
    if end is not None and end < num_tokens - 1:
        return f"it goes on after its end at place {end}"
    expected = "stop" if end is not None else "length" if num_tokens == most else ""
    is_unknown = bool(sampling.stop_strings and num_tokens) and tokenizer is None
    if held.finish_reason == expected or (is_unknown and held.finish_reason == "stop"):
        return ""
    return f"finish reason {held.finish_reason or 'none'!r} after {num_tokens} tokens, expected {expected!r}"


def _first_end(held: HeldRollout, sampling: Sampling, tokenizer: TokenDecoder | None) -> int | None:
    """Return the place of the first token that ends the answer, except by its length."""
    stops = None
    if sampling.stop_strings and tokenizer is not None:
        stops = StopStrings(sampling.stop_strings, tokenizer, held.prompt)
    for place, token in enumerate(held.tokens):
        is_completed = stops is not None and stops.completes(token)
        if token in sampling.stop_tokens or (is_completed and place + 1 >= sampling.min_new_tokens):
            return place
    return None
