"""Verdicts of the audit on claims: margins once, then many servers made of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from aedit.spec_rollout.audit import (
    Calibration,
    HeldRollout,
    OwnNoise,
    PolicyVersions,
    RewardRecord,
    Scored,
    ServerRecord,
    calibrate,
    form_error,
    score,
)
from aedit.spec_rollout.sampling import decode_sampling
from benchmarks.kit.statistics import quantile


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with its margins; `form` names a broken rule, and then there are none."""

    form: str
    scored: Scored | None
    num_tokens: int


@dataclass(slots=True)
class Tally:
    """Sums over judged tokens."""

    tokens: int = 0
    other: int = 0
    """Tokens that are not the verifier's."""
    largest: float = 0.0
    above: dict[float, int] = field(default_factory=dict)
    """Tokens whose margin is above a limit."""
    parts: list[Scored] = field(default_factory=list)


LIMITS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def judge(policy: PolicyVersions, claim: HeldRollout, noise: OwnNoise | None = None) -> Judged:
    """Return a claim with its margins under the verifier's policy; measure `noise` on it."""
    sampling = decode_sampling(claim.sampling)
    wrong = form_error(claim, sampling, policy.vocabulary)
    scored = None if wrong else score(policy, claim, sampling, noise)
    return Judged(wrong, scored, len(claim.tokens))


def tally(judged: Sequence[Judged]) -> Tally:
    """Return sums over claims."""
    found = Tally(above=dict.fromkeys(LIMITS, 0))
    for each in judged:
        if each.scored is None or not each.scored.tokens:
            continue
        margins_T = each.scored.margins.margins_T
        found.tokens += len(margins_T)
        found.other += int((each.scored.margins.right_T != torch.tensor(each.scored.tokens)).sum())
        found.largest = max(found.largest, float(margins_T.max()))
        for limit in LIMITS:
            found.above[limit] += int((~(margins_T <= limit)).sum())
        found.parts.append(each.scored)
    return found


def calibration(judged: Sequence[Judged], dtype: torch.dtype) -> Calibration:
    """Return the calibration on honest claims."""
    parts = [each.scored for each in judged if each.scored is not None]
    return calibrate([(x.margins, torch.tensor(x.logprobs, dtype=torch.float64)) for x in parts], dtype)


def alarms(judged: Sequence[Judged], limits: Calibration, per_server: int) -> tuple[int, int]:
    """Return (servers, convicted ones) if each server has sent `per_server` of these claims in turn."""
    servers = convicted = 0
    for first in range(0, len(judged), per_server):
        record = ServerRecord()
        for each in judged[first : first + per_server]:
            assert each.scored is not None, each.form
            record, _ = record.judge(each.scored, limits)
        servers += 1
        convicted += record.num_failures > 0
    return servers, convicted


@dataclass(frozen=True, slots=True)
class Detection:
    """Convictions of servers that draw their samples from the same claims."""

    share: float
    """Of the servers that are convicted before their claims end."""
    tokens: float | None
    """Median of the tokens until then."""
    tokens_95: float | None


def detection(
    judged: Sequence[Judged],
    limits: Calibration,
    servers: int,
    seed: int = 0,
    advantages: Sequence[float] | None = None,
) -> Detection:
    """Return how soon servers are convicted, each with these claims in an order of its own.

    Args:
        judged: The claims.
        limits: Limits of the audit.
        servers: Number of servers.
        seed: Seed of the orders.
        advantages: Of each claim, for the tests that know rewards; None: they are not made.
    """
    needed: list[float] = []
    known: Sequence[float | None] = advantages or [None] * len(judged)
    order = list(zip(judged, known, strict=True))
    for number in range(servers):
        shuffled = random.Random(f"{seed} {number}").sample(order, len(order))
        found = _tokens_needed(shuffled, limits)
        if found is not None:
            needed.append(found)
    share = len(needed) / servers
    if not needed:
        return Detection(0.0, None, None)
    return Detection(share, quantile(needed, 0.5), quantile(needed, 0.95))


def _tokens_needed(order: Sequence[tuple[Judged, float | None]], limits: Calibration) -> int | None:
    record, rewards, tokens = ServerRecord(), RewardRecord(), 0
    for each, advantage in order:
        tokens += each.num_tokens
        if each.form:
            return tokens
        assert each.scored is not None
        record, judgement = record.judge(each.scored, limits)
        reason = judgement.reason
        if not reason and advantage is not None:
            rewards, reason = rewards.judge(each.scored, advantage, limits)
        if reason:
            return tokens
    return None
