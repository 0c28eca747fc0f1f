"""Judgement of a server's samples: hard rules per sample, a sequential test over all of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from aedit.spec_rollout.audit.calibration import HARD_MARGIN, Calibration, mismatches
from aedit.spec_rollout.audit.margins import Margins
from aedit.spec_rollout.audit.sequential import TestState

MEDIAN_TOKENS = 8
"""Least tokens of a sample for the rule about its median."""


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
    is_hard: bool = False
    """One token, or one sample, is enough to see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """Results of a server so far, as a value."""

    state: TestState = field(default_factory=TestState)
    num_samples: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0
    num_failures: int = 0
    num_unjudged: int = 0
    """Tokens of versions that were not here any more."""
    largest_margin: float = 0.0

    def judge(self, scored: Scored, calibration: Calibration) -> tuple["ServerRecord", Judgement]:
        """Return the record after a sample, and the judgement of the sample. A failure begins a new test."""
        differences_T = torch.tensor(scored.logprobs, dtype=torch.float64) - scored.margins.logprobs_T
        is_mismatch = mismatches(scored.margins, differences_T, calibration.tau).tolist()
        state = self.state.after(calibration.test(), is_mismatch)
        finding = _hard(scored, differences_T, calibration)
        is_hard = finding is not None
        if finding is None and state.is_guilty:
            place = max(range(len(is_mismatch)), key=lambda i: _worst(scored, differences_T, i))
            share = (self.num_mismatches + sum(is_mismatch)) / max(1, self.num_tokens + len(is_mismatch))
            finding = f"{share:.3%} of its audited tokens are not those of the policy", place
        after = replace(
            self,
            state=TestState() if finding else state,
            num_samples=self.num_samples + 1,
            num_tokens=self.num_tokens + len(is_mismatch),
            num_mismatches=self.num_mismatches + sum(is_mismatch),
            num_failures=self.num_failures + (finding is not None),
            largest_margin=max(self.largest_margin, _largest(scored.margins)),
        )
        reason, evidence = "", {}
        if finding is not None:
            reason = finding[0]
            evidence = _evidence(scored, finding[1], calibration)
        return after, Judgement(reason, evidence, len(is_mismatch), sum(is_mismatch), is_hard)


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


def _worst(scored: Scored, differences_T: torch.Tensor, i: int) -> float:
    return max(float(scored.margins.margins_T[i]), float(differences_T[i].abs()))


def _largest(margins: Margins) -> float:
    return float(margins.margins_T.max()) if len(margins.margins_T) else 0.0


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
