"""Tests that the benchmark of policy versions measures what it says. No timing decides."""

import numpy as np
import pytest
from benchmarks import versions
from benchmarks.drift import reward as letters
from benchmarks.kit import tun_link
from benchmarks.policies import Policy, new_model
from benchmarks.programs import version_wire
from benchmarks.rl_speed import Size

POLICY = Policy(size="quick", minutes=0.01)


def test_bytes_are_counted_between_versions_that_far_apart():
    rng = np.random.default_rng(0)
    now = rng.integers(0, 2**16, 4096, np.uint16)
    made = [now]
    for step in range(4):
        now = now.copy()
        now[step::8] += 1
        made.append(now)
    found = versions.measure_bytes(versions.Trained(1e-4, made))
    assert found.changed == {1: (1 / 8,) * 4, 4: (4 / 8,)}
    assert found.sent[1][0] < found.sent[4][0] < found.whole
    assert found.whole == (2 * 4096 + 1) / (2 * 4096)


def test_a_step_sends_few_bytes_and_fewer_at_a_lower_rate(tmp_path):
    size = Size(policy=POLICY, groups=2, samples=3, max_tokens=96)
    low, high = (versions.train(size, lr, 2, tmp_path, letters) for lr in (1e-6, 1e-4))
    found = [versions.measure_bytes(run) for run in (low, high)]
    assert 0 < found[0].sent[1][0] < found[1].sent[1][0] < found[1].whole < 1
    report = versions.bytes_report(found, versions.SHORT)
    assert [row[0] for row in report.rows] == ["1e-06", "0.0001"]
    with pytest.raises(RuntimeError, match="0 of 1 policy versions"):
        versions.train(size, 1e-4, 1, tmp_path, lambda rollout: 1.0)


def test_an_engine_is_measured_while_its_weights_change_in_every_way():
    found = [versions.measure_pauses(new_model(POLICY), way, versions.SHORT.amount) for way in versions.WAYS]
    least = versions.SHORT.amount.versions * versions.SHORT.amount.steps
    assert all(len(one.gaps_s) >= least - 1 for one in found)
    report = versions.pauses_report(found, versions.SHORT)
    assert [row[0] for row in report.rows] == list(versions.WAYS)


@pytest.mark.slow
@pytest.mark.timeout(400)  # importing torch is slow on a busy machine
@pytest.mark.skipif(tun_link.why_not() is not None, reason="needs network namespaces")
def test_a_version_travels_over_a_wire_with_and_without_a_base():
    rng = np.random.default_rng(0)
    first = versions.weights(new_model(POLICY))
    made = [first, *(first + (rng.random(first.size) < 0.01) for _ in range(2))]
    run = versions.Trained(1e-6, [values.astype(np.uint16) for values in made])
    dense, patch = (version_wire.measure(run.versions, POLICY, 100.0, is_dense) for is_dense in (True, False))
    assert len(dense) == len(patch) == 2
    assert all(0 < each.fetched_s <= each.used_s for each in (*dense, *patch))
    assert max(each.num_bytes for each in patch) < 0.3 * min(each.num_bytes for each in dense)
