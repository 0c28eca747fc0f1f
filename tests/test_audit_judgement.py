"""Tests of the sequential test, the calibration, and the judgement of samples."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from scipy.stats import t as student

from aedit.spec_rollout.audit import (
    Calibration,
    Margins,
    OwnNoise,
    RewardRecord,
    Scored,
    ServerRecord,
    calibrate,
    calibration_of,
    read_calibrations,
    write_calibrations,
)
from aedit.spec_rollout.audit.auditor import AuditRate, RateRule
from aedit.spec_rollout.audit.calibration import MEASURED_TOKENS, MIN_RATE, NOISE_FACTOR, SIGMAS, exchanges
from aedit.spec_rollout.audit.sequential import (
    ALTERNATIVES,
    Choices,
    Drift,
    Errors,
    ShareTest,
    TestState,
    size_ratio,
)

TEST = ShareTest(p0=0.001, p1=0.05)
FP32 = Calibration(dtype="float32", eps=1e-3, rate=0.0005)


def scored(margins, differences=None, spread=1.0, gaps=None):
    count = len(margins)
    far = differences or [0.0] * count
    if gaps is None:
        gaps = [margin or 9.0 for margin in margins]
    column = torch.full((count,), spread, dtype=torch.float64)
    found = Margins(
        torch.tensor(margins, dtype=torch.float64),
        torch.arange(count),
        torch.tensor(gaps, dtype=torch.float64),
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
    assert TEST.errors.guilty_from == pytest.approx(math.log(0.999 / 1e-6))
    assert TEST.errors.honest_to == pytest.approx(math.log(1e-3 / (1 - 1e-6)))
    clean = TestState().after(TEST, [False] * (TEST.clean_tokens - 1))
    assert (clean.num_honest, clean.log_ratio < 0) == (0, True)
    assert clean.after(TEST, [False]) == TestState(0.0, False, 1)
    needed = math.ceil(TEST.errors.guilty_from / TEST.of_hit)
    assert not TestState().after(TEST, [True] * (needed - 1)).is_guilty
    assert TestState().after(TEST, [True] * needed).is_guilty
    assert TestState().after(TEST, [True] * needed + [False] * 10**4).is_guilty


@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40_000))
def test_runs_of_tokens_without_the_property_count_one_by_one(hits, many):
    seen = [*hits, *[False] * many, *hits]
    state = TestState()
    for each in seen:
        state = state.plus(TEST.errors, TEST.of_hit if each else TEST.of_miss)
    found = TestState().after(TEST, seen)
    assert (found.is_guilty, found.num_honest) == (state.is_guilty, state.num_honest)
    assert found.log_ratio == pytest.approx(state.log_ratio, abs=1e-6)


def test_honest_servers_are_convicted_as_rarely_and_liars_as_surely_as_stated():
    """With alpha and beta that a simulation can see. The limits are Wald's upper ones."""
    rng = np.random.default_rng(5)
    test = ShareTest(p0=0.01, p1=0.06, errors=Errors(alpha=0.02, beta=0.02))
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
        (scored([0.0] * 9, [0.0061, -0.0061] * 4 + [0.007]), "differ by 0.0061 in the median", 8),
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
    limits = replace(FP32, ties=1e9)  # other tokens have tests of their own
    record, found = ServerRecord().judge(scored([tau, 0.9 * tau, 0.0] * 10, [5e-4, -5e-4, 0.0] * 10), limits)
    assert (found.reason, found.num_mismatches, found.num_tokens) == ("", 0, 30)
    rare, test = scored([0.0] * 40 + [2 * tau]), limits.mismatch_test()
    each, begun = 40 * test.of_miss + test.of_hit, record.tests.mismatches.log_ratio
    needed = next(n for n in range(1, 99) if begun + n * each >= test.errors.guilty_from)
    assert needed > 4
    for number in range(1, needed + 1):
        record, found = record.judge(rare, limits)
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
        found = Margins(zero_T, zero_T.long(), zero_T, torch.tensor(logp_T), torch.tensor(spread_T))
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
    test = made.mismatch_test()
    assert test.p0 == 2 * made.rate < test.p1 / 4
    assert made.tau <= 1.0


# --- what stays below the limits of single tokens

BF16 = Calibration(dtype="bfloat16", eps=8e-3, rate=1e-3, bias=6e-4, clustering=2.5)


def errors_of(rng, num_tokens, eps, shared=0.5):
    """Return honest differences of a sample, which have some of their error in common."""
    own = rng.normal(0, eps, num_tokens) * math.sqrt(1 - shared**2 / num_tokens)
    return own + rng.normal(0, eps) * shared / math.sqrt(num_tokens)


def verdicts(samples, calibration):
    """Return the reason that convicts a server, and the samples until then; ("", number) if none does."""
    record = ServerRecord()
    for number, sample in enumerate(samples, 1):
        record, found = record.judge(sample, calibration)
        if found.reason:
            return found.reason, number
    return "", number


def test_evidence_of_size_is_the_ratio_of_two_normal_densities_and_one_in_the_mean_at_most():
    for x in (0.0, 0.3, -2.0, 4.0):
        wanted = norm.logpdf(x, scale=math.sqrt(2 * 1.7)) - norm.logpdf(x, scale=math.sqrt(1.7))
        assert size_ratio(x, 1.7) == pytest.approx(wanted)
    assert size_ratio(1e6, 1.0) == size_ratio(5.0, 1.0)
    means = [
        quad(lambda x, s=s: math.exp(size_ratio(x, 1.0)) * norm.pdf(x, scale=s), -60, 60)[0]
        for s in (0.2, 1.0)
    ]
    assert means[0] < means[1] <= 1.0


def test_means_of_zero_are_convicted_as_rarely_as_stated_whatever_their_tails():
    """Over all times: 400 servers of 600 samples each, with an alpha that a simulation can see."""
    rng = np.random.default_rng(2)
    draws = {
        "normal": lambda n: rng.normal(size=n),
        "heavy": lambda n: rng.standard_t(3, n) / math.sqrt(3),
        "skewed": lambda n: (rng.random(n) < 0.05) / 0.05 - 1.0,
    }
    variances = {"normal": 1.0, "heavy": 1.0, "skewed": 0.95 / 0.05}
    for name, draw in draws.items():
        convicted = 0
        for _ in range(400):
            drift, unit = Drift(), 50 * variances[name]
            for x in draw(600):
                drift = drift.plus(float(x), variances[name])
                if drift.drifts(unit, 0.1):
                    convicted += 1
                    break
        assert convicted <= 400 * 0.1, name
    drift, number = Drift(), 0
    while not drift.drifts(50.0, 1e-6):
        drift, number = drift.plus(float(rng.normal(0.5)), 1.0), number + 1
    assert 60 < number < 250


@pytest.mark.parametrize("calibration", [FP32, BF16], ids=lambda each: each.dtype)
def test_honest_errors_up_to_the_calibration_pass(calibration):
    rng = np.random.default_rng(7)
    samples = []
    for _ in range(1000):
        gaps = rng.uniform(0, 2, 100)
        margins_T = np.where(rounded(rng, calibration.eps)(gaps), gaps, 0.0)
        errors = errors_of(rng, 100, calibration.eps).tolist()
        samples.append(scored(margins_T.tolist(), errors, gaps=gaps.tolist()))
    assert verdicts(samples, calibration) == ("", 1000)


def test_log_probabilities_that_are_shifted_by_little_are_seen_in_their_mean():
    rng = np.random.default_rng(3)
    for calibration, shift, most in (
        (FP32, -0.008, 3),
        (FP32, 3e-4, 40),
        (BF16, -0.008, 20),
        (BF16, 0.002, 150),
    ):
        samples = [
            scored([0.0] * 100, (errors_of(rng, 100, calibration.eps) + shift).tolist()) for _ in range(most)
        ]
        reason, _ = verdicts(samples, calibration)
        assert "log-probabilities" in reason, (calibration.dtype, shift)


def test_shifts_of_both_signs_are_seen_in_the_size_of_whole_samples():
    rng = np.random.default_rng(4)
    samples = [
        scored([0.0] * 100, (errors_of(rng, 100, 8e-3) + rng.choice([-3e-3, 3e-3])).tolist())
        for _ in range(200)
    ]
    reason, number = verdicts(samples, BF16)
    assert reason == "the log-probabilities of whole samples differ by more than rounding"
    assert number < 150


def ties(rng, num_samples, flips, eps=BF16.eps):
    """Return samples of 256 tokens with gaps of 0 to 2; flips(gaps): which tokens are not the verifier's."""
    for _ in range(num_samples):
        gaps = rng.uniform(0, 2, 256)
        margins_T = np.where(flips(gaps), gaps, 0.0)
        yield scored(margins_T.tolist(), errors_of(rng, 256, eps).tolist(), gaps=gaps.tolist())


def rounded(rng, eps=BF16.eps):
    return lambda gaps: rng.normal(0, math.sqrt(2) * eps, len(gaps)) > gaps


def choosing(rng, limit, at_most):
    """Return what an honest server rounds, with exchanges at the first near ties that it likes."""

    def flips(gaps):
        honest = rounded(rng)(gaps)
        liked = (gaps < limit) & (rng.random(len(gaps)) < 0.5)
        return honest ^ (liked & (np.cumsum(liked) <= at_most))

    return flips


def test_rounding_exchanges_near_ties_as_normal_errors_do_or_those_with_heavier_tails():
    gaps = np.array([0.0, 1e-3, 8e-3, 0.02, 0.05, 0.3, math.inf])
    x = gaps / (math.sqrt(2) * 8e-3)
    wanted = np.maximum(norm.sf(x), student.sf(x * math.sqrt(3), 3))
    found = exchanges(torch.tensor(gaps), 8e-3)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-12)
    limits = replace(BF16, ties=0.5)
    assert limits.chances(torch.tensor(gaps)).tolist() == pytest.approx(np.maximum(0.5 * wanted, 1e-3))
    assert float(replace(BF16, ties=3.0).chances(torch.zeros(1))) == 0.5


def test_evidence_of_choosing_is_the_mean_of_all_likelihood_ratios():
    """Enumerated: each alternative, each sample at which it may have begun."""
    rng, samples, state = np.random.default_rng(11), [], Choices()
    for _ in range(5):
        gaps = rng.uniform(0, 20, 30)
        chances = np.minimum(0.5, rng.uniform(1e-3, 0.5, 30))
        samples.append((rng.random(30) < 0.2, chances, gaps))
        state = state.after(*map(torch.tensor, samples[-1]))
    total = 0.0
    for limit, q in ALTERNATIVES:
        of_samples = []
        for is_other, p, gaps in samples:
            chosen = np.where(gaps <= limit, p * (1 - q) + (1 - p) * q, p)
            of_samples.append(np.prod(np.where(is_other, chosen / p, (1 - chosen) / (1 - p))))
        begun = [np.prod(of_samples[k:]) / ((k + 1) * (k + 2)) for k in range(5)]
        total += sum(begun) / len(ALTERNATIVES)
    assert state.log_ratio == pytest.approx(math.log(total))


def test_honest_servers_seem_to_choose_as_rarely_as_stated():
    """Over all times, with an alpha that a simulation can see, and errors as large as they may be."""
    rng, convicted = np.random.default_rng(12), 0
    for _ in range(200):
        state, highest = Choices(), -math.inf
        for _ in range(40):
            gaps = torch.tensor(rng.uniform(0, 0.5, 64))
            chances = BF16.chances(gaps)
            is_other = torch.tensor(rng.random(64)) < chances
            state = state.after(is_other, chances, gaps / BF16.eps)
            highest = max(highest, state.log_ratio)
        convicted += highest >= math.log(10)
    assert convicted <= 200 * 0.1
    assert verdicts(ties(rng, 1000, rounded(rng)), BF16) == ("", 1000)


@pytest.mark.parametrize(
    ("limit", "at_most", "most"), [(0.3 * BF16.tau, 4, 40), (30 * BF16.eps, 1, 40), (2 * BF16.eps, 4, 200)]
)
def test_a_server_that_chooses_among_near_ties_is_seen_however_near_they_are(limit, at_most, most):
    rng = np.random.default_rng(5)
    reason, number = verdicts(ties(rng, most, choosing(rng, limit, at_most)), BF16)
    assert "of its audited tokens are not the verifier's, where rounding by eps = 0.008 exchanges" in reason
    assert number < most


@pytest.mark.parametrize("eps", [1e-3, 5e-7])
def test_in_fp32_a_server_that_chooses_within_the_default_tau_is_seen_whatever_eps_was_measured(eps):
    """Also where the margins are thousands of times eps."""
    rng = np.random.default_rng(5)
    limits = Calibration(dtype="float32", eps=eps, rate=MIN_RATE)

    def flips(gaps):
        return (gaps < 0.0085) & (rng.random(256) < 0.4)

    reason, number = verdicts(ties(rng, 50, flips, eps=eps / 2), limits)
    assert "are not the verifier's" in reason
    assert number < 50


def test_a_server_that_begins_to_choose_late_is_seen_almost_as_soon():
    rng = np.random.default_rng(6)
    honest = [*ties(rng, 600, rounded(rng))]
    false = [*ties(rng, 60, choosing(rng, 0.3 * BF16.tau, 4))]
    reason, number = verdicts([*honest, *false], BF16)
    assert "are not the verifier's" in reason
    assert 600 < number < 660


def drawn(rng, eps, choose=lambda others, reward: others, bias=lambda reward: 0.0):
    """Return samples with near ties of random gaps; those of one kind have more ties and lower rewards."""
    for _ in range(20_000):
        is_long = rng.random() < 0.5
        reward = float(rng.random() < (0.2 if is_long else 0.7))
        gaps_T = rng.exponential(1.0, 150 if is_long else 50)
        flips_T = rng.normal(0, math.sqrt(2) * eps, len(gaps_T)) > gaps_T
        advantage, flips_T = reward - 0.45, choose(flips_T, reward)
        margins_T = np.where(flips_T, gaps_T, 0.0)
        differences_T = errors_of(rng, len(gaps_T), eps) + bias(reward)
        yield scored(margins_T.tolist(), differences_T.tolist(), gaps=gaps_T.tolist()), advantage


def first_reason(samples, calibration):
    record = RewardRecord()
    for number, (sample, advantage) in enumerate(samples, 1):
        record, reason = record.judge(sample, advantage, calibration)
        if reason:
            return reason, number
        if number == 4000:
            break
    return "", number


@pytest.mark.parametrize("eps", [8e-3, 3e-3])
def test_rounding_that_knows_no_reward_passes_though_rewards_go_with_near_ties(eps):
    """Also where eps is less than half of the calibrated one."""
    assert first_reason(drawn(np.random.default_rng(6), eps), BF16) == ("", 4000)


def test_errors_that_go_with_the_reward_are_seen_though_their_share_and_mean_are_honest():
    rng = np.random.default_rng(8)

    def only_where_it_pays(flips_T, reward):
        return flips_T | (rng.random(len(flips_T)) < 0.005) if reward else np.zeros_like(flips_T)

    reason, number = first_reason(drawn(rng, 8e-3, choose=only_where_it_pays), BF16)
    assert (reason, number < 2500) == ("its tokens that are not the verifier's go with the reward", True)
    reason, number = first_reason(drawn(rng, 8e-3, bias=lambda reward: 2e-3 if reward else -2e-3), BF16)
    assert (reason, number < 300) == ("the errors of its log-probabilities go with the reward", True)


def test_bias_and_clustering_are_recovered_from_errors_of_known_size():
    rng, parts = np.random.default_rng(9), []
    for _ in range(400):
        own = rng.normal(0, 4e-3, 50) + rng.normal(0, 1e-3) + 5e-4
        sample = scored([0.0] * 50, own.tolist())
        parts.append((sample.margins, torch.tensor(sample.logprobs, dtype=torch.float64)))
    made = calibrate(parts, torch.bfloat16)
    assert made.eps == pytest.approx(math.sqrt(4e-3**2 + 1e-3**2 + 5e-4**2), rel=0.03)
    error = math.sqrt((50 * 4e-3**2 + 50**2 * 1e-3**2) / 400) / 50
    assert 5e-4 - 3 * error < made.largest_bias < 5e-4 + 8 * error
    summed = 50 * 4e-3**2 + 50**2 * (1e-3**2 + 5e-4**2)
    assert made.clustering == pytest.approx(summed / (50 * made.eps**2), rel=0.6)
    assert made.clustering > summed / (50 * made.eps**2)


@pytest.mark.parametrize("ratio", [0.6, 1.0, 3.0])
def test_other_tokens_are_limited_by_the_measured_ratio_to_those_expected(ratio):
    rng, eps = np.random.default_rng(13), 8e-3

    def flips(gaps):
        return rng.random(len(gaps)) < np.minimum(0.5, ratio * exchanges(torch.tensor(gaps), eps).numpy())

    samples = [*ties(rng, 1000, flips)]
    outlier = scored([0.2] + [0.0] * 99, errors_of(rng, 100, eps).tolist())
    parts = [(x.margins, torch.tensor(x.logprobs, dtype=torch.float64)) for x in (outlier, *samples)]
    made = calibrate(parts, torch.bfloat16)
    assert made.eps == pytest.approx(eps, rel=0.02)  # which one far token does not widen
    assert made.rate < 1e-4
    true = sum((found.margins_T > 0).sum() for found, _ in parts) / sum(
        exchanges(found.gaps_T, made.eps).sum() for found, _ in parts
    )
    assert made.ties == 1.0 if ratio == 1 else float(true) < made.ties < 1.25 * float(true)
    few = calibrate(parts[:20], torch.bfloat16)
    assert few.ties == 1.0 or ratio == 3


def test_noise_is_measured_in_16_bits_only_and_holds_for_servers_without_an_entry():
    rng = np.random.default_rng(10)
    noise, exact = OwnNoise(torch.bfloat16), OwnNoise(torch.float32)
    assert (noise.wants(), exact.wants()) == (True, False)

    def add(count, eps):
        for _ in range(count):
            sample = scored([0.0] * 100, rng.normal(0, eps, 100).tolist())
            noise.add(sample.margins, torch.tensor(sample.logprobs, dtype=torch.float64))

    add(MEASURED_TOKENS // 100 - 1, 5e-3)
    assert calibration_of("a", {}, torch.bfloat16, noise) == Calibration.default(torch.bfloat16)
    add(1, 5e-3)
    assert calibration_of("a", {}, torch.bfloat16, noise).eps == pytest.approx(NOISE_FACTOR * 5e-3, rel=0.1)
    assert calibration_of("a", {"a": BF16}, torch.bfloat16, noise) == BF16
    assert [noise.wants() for _ in range(32)].count(True) == 2
    add(MEASURED_TOKENS // 100, 1e-2)  # the weights have grown: the oldest samples are dropped
    assert noise.limits.eps == pytest.approx(NOISE_FACTOR * 1e-2, rel=0.1)
    add(MEASURED_TOKENS // 100, 5e-2)
    assert calibration_of("a", {}, torch.bfloat16, noise) == Calibration.default(torch.bfloat16)
