"""Tests the bucketed epsilon-greedy chooser: groups, rewards, and equal choices on every rank."""

import random
from collections import Counter
from statistics import median

import pytest

from aedit.spec_rollout.choose import Bandit, EngineView, StepObservation
from aedit.spec_rollout.choose.arms import BUCKETS
from aedit.spec_rollout.choose.goodput import by_bucket
from aedit.spec_rollout.drafters import OFF, parse_arm

ARMS = tuple(map(parse_arm, ("layer:8", "suffix:8", "layer:4", "layer:2")))
READY = {"layer": 0, "suffix": 0}


def view(rows, ready=READY):
    return EngineView(rows, 100 * rows, ready)


def step(rows, arm, emitted, total_s, draft_s=0.0):
    return StepObservation(view(rows), arm, emitted, total_s, draft_s, arm.nodes)


def played(bandit, rows, worth, steps):
    """Return the arms chosen over `steps` steps when each arm yields `worth` tokens per second."""
    found = []
    for _ in range(steps):
        arm = bandit.choose(view(rows))
        bandit.learn(step(rows, arm, worth[str(arm)], 1.0))
        found.append(arm)
    return found


def test_many_tokens_are_verified_where_there_are_few_rows():
    found = by_bucket(ARMS)
    assert found[1] == [ARMS[0], ARMS[1], OFF]
    assert found[2] == [ARMS[2], OFF]
    assert [found[first] for first in BUCKETS[2:]] == [[ARMS[3], OFF]] * 4
    assert set(by_bucket(tuple(parse_arm(f"layer:{n}") for n in range(1, 10)))[33]) == {
        OFF,
        *(parse_arm(f"layer:{n}") for n in (1, 2, 3, 4)),
    }


def test_every_arm_is_played_before_any_is_judged():
    bandit = Bandit(ARMS, epsilon=0)
    assert set(played(bandit, 1, {"layer:8": 1, "suffix:8": 2, "off": 3}, 3)) == {*ARMS[:2], OFF}


def test_the_arm_with_the_best_median_is_played():
    bandit = Bandit(ARMS, epsilon=0)
    played(bandit, 1, {"layer:8": 1, "suffix:8": 5, "off": 3}, 20)
    assert bandit.choose(view(1)) == ARMS[1]
    for emitted in (3, 1000):
        bandit.learn(step(1, OFF, emitted, 1.0))
    assert bandit.choose(view(1)) == ARMS[1], "one lucky step is no median"


def test_off_wins_where_drafts_are_worth_nothing():
    bandit = Bandit(ARMS, seed=3)
    found = Counter(played(bandit, 20, {"layer:2": 1, "off": 3}, 400))
    assert 0.9 <= found[OFF] / 400 <= 0.99


def test_the_reward_counts_all_seconds_of_the_step():
    bandit = Bandit(ARMS)
    bandit.learn(step(3, ARMS[2], 6, 0.5, draft_s=0.2))
    assert bandit.median_reward(2, ARMS[2]) == 12


def test_rows_of_a_bucket_learn_together():
    bandit = Bandit(ARMS, epsilon=0)
    bandit.learn(step(2, ARMS[2], 10, 1.0))
    bandit.learn(step(4, OFF, 5, 1.0))
    assert bandit.choose(view(3)) == ARMS[2]
    assert bandit.median_reward(5, ARMS[2]) == float("inf")


def test_old_rewards_are_forgotten():
    bandit = Bandit(ARMS, window=5)
    for emitted in (100, 100, 100, 1, 2, 3, 4, 5):
        bandit.learn(step(1, OFF, emitted, 1.0))
    assert bandit.median_reward(1, OFF) == 3


def test_an_arm_without_its_drafter_is_not_played():
    bandit = Bandit(ARMS, epsilon=1)
    assert {bandit.choose(view(1, {"suffix": 0})) for _ in range(50)} == {ARMS[1], OFF}
    assert {bandit.choose(view(1, {})) for _ in range(50)} == {OFF}


def test_ranks_that_are_told_the_same_choose_the_same_and_the_log_replays_them():
    def played_by(bandit, log):
        arms = []
        for rows, seconds in log:
            arms.append(bandit.choose(view(rows)))
            bandit.learn(step(rows, arms[-1], 1 + len(str(arms[-1])), seconds))
        return arms

    world = random.Random(0)
    log = [(world.choice([1, 3, 7, 40]), world.uniform(0.5, 2)) for _ in range(500)]
    first, second = (played_by(Bandit(ARMS, seed=7), log) for _ in range(2))
    assert first == second
    assert first != played_by(Bandit(ARMS, seed=8), log)


def test_it_plays_as_algorithm_1_does():
    """The oracle is a second, plain implementation of the paper's algorithm."""

    def algorithm(log):
        chance, rewards = random.Random(5), {}
        for rows, seconds in log:
            mine = by_bucket(ARMS)[max(b for b in BUCKETS if b <= rows)]
            key = {arm: (max(b for b in BUCKETS if b <= rows), arm) for arm in mine}
            if chance.random() < 0.1:
                arm = chance.choice(mine)
            else:
                scores = [median(rewards.get(key[arm], [float("inf")])[-300:]) for arm in mine]
                arm = mine[scores.index(max(scores))]
            accepted = len(str(arm))
            rewards.setdefault(key[arm], []).append((accepted / rows + 1) * rows / seconds)
            yield arm, accepted

    world = random.Random(1)
    log = [(world.choice([1, 4, 9, 33]), world.uniform(0.5, 2)) for _ in range(1500)]
    bandit = Bandit(ARMS, seed=5)
    for (rows, seconds), (arm, accepted) in zip(log, algorithm(log), strict=True):
        assert bandit.choose(view(rows)) == arm
        bandit.learn(step(rows, arm, accepted + rows, seconds))


def test_settings_without_sense_are_refused():
    for wrong, name in (
        ({"arms": [OFF]}, "arms"),
        ({"arms": ARMS, "epsilon": 2}, "epsilon"),
        ({"arms": ARMS, "window": 0}, "window"),
    ):
        with pytest.raises(ValueError, match=name):
            Bandit(**wrong)
