"""Tests advantages, overlong shaping and admission against their equations and by simulation."""

import numpy as np
import pytest

from aedit.spec_rollout import advantages, capacity, has_signal, overlong_penalty

GROUPS = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.9, 0.1], [2.0, -1.0]]


@pytest.mark.parametrize("group", GROUPS)
def test_advantages_are_those_of_numpy(group):
    R = np.array(group)
    others = [np.delete(R, i).mean() for i in range(len(R))]
    wanted = {"mean": R - R.mean(), "std": (R - R.mean()) / R.std(ddof=1), "leave-one-out": R - others}
    for kind, values in wanted.items():
        assert advantages([group], kind) == [pytest.approx(values)]


@pytest.mark.parametrize("kind", ["mean", "std", "leave-one-out"])
def test_a_rollout_without_a_reward_has_no_advantage_and_no_part_in_those_of_others(kind):
    with_none = advantages([[1.0, None, 0.0, 0.5]], kind)[0]
    without = advantages([[1.0, 0.0, 0.5]], kind)[0]
    assert with_none == [without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("kind", ["mean", "std", "leave-one-out"])
@pytest.mark.parametrize(
    "group", [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [1e9, 1e9 + 1e-6], [None, None], [1.0], [None, 1.0], []]
)
def test_a_group_without_signal_has_advantages_of_exactly_zero(group, kind):
    """0.1 + 0.2 is not 0.3: over its standard deviation, a rounding error would be an advantage of 1."""
    assert not has_signal(group)
    assert advantages([group], kind) == [[0.0] * len(group)]


def test_rewards_that_differ_are_a_signal():
    assert has_signal([0.0, 1.0])
    assert has_signal([None, 0.0, 0.001])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(value):
    with pytest.raises(ValueError, match="group 1 must be finite or None"):
        advantages([[0.0, 1.0], [value, 1.0]], "mean")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="must be std, mean or leave-one-out, got median"):
        advantages([[0.0, 1.0]], "median")


def test_the_overlong_penalty_falls_linearly_over_its_window():
    assert [overlong_penalty(n, 100, 20) for n in (0, 80, 85, 90, 99, 100, 120)] == pytest.approx(
        [0, 0, -0.25, -0.5, -0.95, -1, -1]
    )
    assert overlong_penalty(100, 100, 0) == 0
    with pytest.raises(ValueError, match="overlong must be 0 to 100"):
        overlong_penalty(5, 100, 101)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_with_admission_no_sample_is_too_old_when_it_is_trained_in_the_order_of_starting(seed, staleness):
    """Samples of long-tailed durations on a random number of places; the trainer is slow at random."""
    rng = np.random.default_rng(seed)
    batch, places = int(rng.integers(2, 9)), int(rng.integers(1, 40))
    born, left, version, waited, ages = [], [], 0, 0, []
    for _ in range(3000):
        running = sum(duration > 0 for duration in left)
        counts = {"running": running, "accepted": len(left) - running}
        room = capacity(max_running=places, version=version, staleness=staleness, batch=batch, **counts)
        assert room <= places - running
        born += [version] * room
        left += [int(rng.geometric(0.05)) if rng.uniform() < 0.2 else 1 for _ in range(room)]
        left = [max(0, duration - 1) for duration in left]
        due = slice(version * batch, (version + 1) * batch)
        if len(left) >= due.stop and not any(left[due]) and rng.uniform() < 0.5:
            ages += [version - since for since in born[due]]
            version += 1
        waited += room == 0
    assert version > 50
    assert max(ages) <= staleness
    assert waited
    assert len(ages) == version * batch, "each sample once, none was dropped"


def test_capacity_is_aReals_equation_and_never_negative():
    assert capacity(max_running=10, running=4, accepted=30, version=3, staleness=1, batch=8) == 6
    assert capacity(max_running=100, running=4, accepted=30, version=3, staleness=1, batch=8) == 6
    assert capacity(max_running=100, running=9, accepted=32, version=3, staleness=1, batch=8) == 0
    assert capacity(max_running=3, running=4, accepted=0, version=0, staleness=0, batch=8) == 0
