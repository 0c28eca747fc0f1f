"""Tests of the sequential test, the calibration, and the judgement of samples."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from aedit.spec_rollout.audit.calibration import (
    MIN_RATE,
    SIGMAS,
    Calibration,
    calibrate,
    calibration_of,
    read_calibrations,
    write_calibrations,
)
from aedit.spec_rollout.audit.judge import Scored, ServerRecord
from aedit.spec_rollout.audit.margins import Margins
from aedit.spec_rollout.audit.rates import AuditRate, RateRule
from aedit.spec_rollout.audit.sequential import MismatchTest, TestState

TEST = MismatchTest(p0=0.001, p1=0.05)
FP32 = Calibration(dtype="float32", eps=1e-3, rate=0.0005)


def scored(margins, differences=None, spread=1.0):
    count = len(margins)
    far = differences or [0.0] * count
    column = torch.full((count,), spread, dtype=torch.float64)
    found = Margins(
        torch.tensor(margins, dtype=torch.float64),
        torch.arange(count),
        torch.full((count,), -2.0).double(),
        column,
    )
    claimed = tuple(-2.0 + each for each in far)
    return Scored(found, tuple(range(100, 100 + count)), claimed, tuple(range(count)), (4,) * count)


def test_the_ratio_is_that_of_the_likelihoods_in_fractions():
    seen = [False] * 40 + [True] + [False] * 25
    p0, p1 = Fraction(TEST.p0), Fraction(TEST.p1)
    ratio = Fraction(1)
    for is_mismatch in seen:
        ratio *= p1 / p0 if is_mismatch else (1 - p1) / (1 - p0)
    assert TestState().after(TEST, seen).log_ratio == pytest.approx(math.log(ratio))


def test_a_test_ends_at_walds_limits():
    assert TEST.guilty_from == pytest.approx(math.log(0.999 / 1e-6))
    assert TEST.honest_to == pytest.approx(math.log(1e-3 / (1 - 1e-6)))
    clean = TestState().after(TEST, [False] * (TEST.clean_tokens - 1))
    assert (clean.num_honest, clean.log_ratio < 0) == (0, True)
    assert clean.after(TEST, [False]) == TestState(0.0, False, 1)
    needed = math.ceil(TEST.guilty_from / TEST.of_mismatch)
    assert not TestState().after(TEST, [True] * (needed - 1)).is_guilty
    assert TestState().after(TEST, [True] * needed).is_guilty
    assert TestState().after(TEST, [True] * needed + [False] * 10**4).is_guilty


def test_honest_servers_are_convicted_as_rarely_and_liars_as_surely_as_stated():
    """With alpha and beta that a simulation can see. The limits are Wald's upper ones."""
    rng = np.random.default_rng(5)
    test = MismatchTest(p0=0.01, p1=0.06, alpha=0.02, beta=0.02)
    wrong = {0.01: 0, 0.06: 0}
    for share in wrong:
        for _ in range(1500):
            state = TestState()
            while not state.is_guilty and not state.num_honest:
                state = state.after(test, (rng.random(64) < share).tolist())
            wrong[share] += state.is_guilty if share == test.p0 else not state.is_guilty
    assert wrong[0.01] <= 1500 * 0.02 + 4 * math.sqrt(1500 * 0.02)
    assert wrong[0.06] <= 1500 * 0.02 + 4 * math.sqrt(1500 * 0.02)
    assert min(wrong.values()) > 0  # else the simulation would show nothing


def test_the_rate_rises_with_mismatches_and_falls_to_its_floor():
    rule = RateRule(rate=0.2, floor=0.05, halved_by=100)
    rate = AuditRate(rule.rate)
    assert rate.after(rule, 100, 0).q == pytest.approx(0.1)
    assert rate.after(rule, 10**6, 0).q == 0.05
    assert rate.after(rule, 100, 1).q == pytest.approx(0.8)
    assert rate.after(rule, 100, 3).q == 1.0
    assert rate.after_failure().q == 1.0
    for bad in ({"rate": 0}, {"rate": 1.5}, {"floor": 0.3}, {"floor": 0}, {"halved_by": 0}):
        with pytest.raises(ValueError, match=f"audit.{next(iter(bad))}"):
            replace(rule, **bad)


@pytest.mark.parametrize(
    ("sample", "reason", "place"),
    [
        (scored([0.0, 0.0, 1.01]), "a token is not the one", 2),
        (scored([0.0, math.inf]), "a token is not the one", 1),
        (scored([0.0, math.nan, 0.0]), "a token is not the one", 1),
        (scored([0.0] * 3, [0.0, -1.01, 0.0]), "a log-probability is not", 1),
        (scored([0.0] * 3, [0.0, math.nan, 0.0]), "a log-probability is not", 1),
        (scored([0.0] * 9, [0.021] * 8 + [0.022]), "differ by 0.021 in the median", 8),
        (scored([0.5] * 7), "of its audited tokens", 0),
    ],
)
def test_one_sample_can_be_enough(sample, reason, place):
    record, found = ServerRecord().judge(sample, FP32)
    assert reason in found.reason
    assert found.evidence["place"] == place
    assert (found.evidence["token"], found.evidence["right_token"]) == (100 + place, place)
    assert found.evidence["version"] == 4
    assert record.num_failures == 1


def test_rounding_passes_and_rare_mismatches_add_up_over_samples():
    tau = FP32.tau
    assert tau == pytest.approx(SIGMAS * 1e-3)
    record, found = ServerRecord().judge(scored([tau, 0.9 * tau, 0.0] * 50, [0.9 * tau] * 150), FP32)
    assert (found.reason, found.num_mismatches, found.num_tokens) == ("", 0, 150)
    rare, test = scored([0.0] * 40 + [2 * tau]), FP32.test()
    each = 40 * test.of_match + test.of_mismatch
    needed = next(n for n in range(1, 99) if record.state.log_ratio + n * each >= test.guilty_from)
    assert needed > 4
    for number in range(1, needed + 1):
        record, found = record.judge(rare, FP32)
        assert bool(found.reason) == (number == needed)
    assert record.num_mismatches == needed
    far = scored([0.0] * 40 + [0.0], [0.0] * 40 + [2 * tau])
    assert ServerRecord().judge(far, FP32)[1].num_mismatches == 1


def test_eps_is_recovered_from_claims_with_errors_of_known_size():
    """Logits with independent normal errors on both machines; the estimate needs the claims only."""
    rng, eps, parts = np.random.default_rng(1), 2e-3, []
    for _ in range(40):
        z_TV = rng.normal(0, 2, (50, 30))
        other_TV = z_TV + rng.normal(0, eps, z_TV.shape)
        y_T = (z_TV + rng.gumbel(size=z_TV.shape)).argmax(1)
        logp_T, other_T = (
            np.take_along_axis(x - np.log(np.exp(x).sum(1, keepdims=True)), y_T[:, None], 1)[:, 0]
            for x in (z_TV, other_TV)
        )
        p_TV = np.exp(z_TV) / np.exp(z_TV).sum(1, keepdims=True)
        spread_T = 1 - 2 * np.exp(logp_T) + (p_TV**2).sum(1)
        zero_T = torch.zeros(50, dtype=torch.float64)
        found = Margins(zero_T, zero_T.long(), torch.tensor(logp_T), torch.tensor(spread_T))
        parts.append((found, torch.tensor(other_T)))
    made = calibrate(parts, torch.float32)
    assert made.eps == pytest.approx(eps, rel=0.1)
    assert made.num_tokens == 2000
    assert made.rate == pytest.approx(3 / 2000)


def test_rollouts_of_another_policy_calibrate_nothing():
    bad = scored([0.0, 1.2]).margins
    with pytest.raises(ValueError, match=r"margin of 1\.2.*not generated by this policy"):
        calibrate([(bad, torch.full((2,), -2.0))], torch.float32)
    with pytest.raises(ValueError, match="not generated by this policy"):
        calibrate([(scored([0.0]).margins, torch.tensor([-4.0]))], torch.float32)
    with pytest.raises(ValueError, match="at least one token"):
        calibrate([(Margins.empty(), torch.empty(0))], torch.float32)


def test_a_file_of_calibrations_is_read_as_it_was_written_and_picked_by_server(tmp_path):
    path, other = tmp_path / "calibration.json", replace(FP32, eps=1e-4, num_tokens=7)
    write_calibrations(path, {"a": FP32, "*": other})
    table = read_calibrations(path)
    assert table == {"a": FP32, "*": other}
    assert calibration_of("a", table, torch.float32) == FP32
    assert calibration_of("b", table, torch.float32) == other
    assert calibration_of("a", table, torch.bfloat16) == Calibration.default(torch.bfloat16)
    assert calibration_of("b", {}, torch.float32) == Calibration.default(torch.float32)
    assert Calibration.default(torch.float32).rate == MIN_RATE
    for text in ("", "[]", "{}", '{"servers": {"a": {"eps": 1}}}', '{"servers": {"a": {"x": 1}}}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"calibration\.json|unknown keys|eps|dtype"):
            read_calibrations(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_defaults_leave_room_between_honest_rates_and_liars(dtype):
    made = Calibration.default(dtype)
    test = made.test()
    assert test.p0 == 2 * made.rate < test.p1 / 4
    assert made.tau <= 1.0
