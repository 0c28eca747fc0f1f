"""Tests the curriculum: levels follow the solved share, and the same history gives the same problems."""

import random
from dataclasses import replace

import pytest
from kit.rewards import group
from kit.rl_nodes import config_of, run

from aedit.launch.config import PromptConfig
from aedit.launch.data import ByteTokenizer, Curriculum, load_problems, solved_of
from aedit.launch.data.curriculum import LOWER, RAISE, WINDOW, next_level
from aedit.spec_rollout import Problem
from aedit.spec_rollout.rl.rewards.worker import find, scores
from aedit.types import UserError


def problems_of(*levels):
    return [
        Problem(index=i, prompt=f"p{i}", tokens=(1,), columns={"level": level} if level is not None else {})
        for i, level in enumerate(levels)
    ]


def drawn(curriculum, positions=range(400)):
    return [curriculum.problem(position, position * 7).columns["level"] for position in positions]


@pytest.mark.parametrize(
    ("level", "solved", "after"),
    [(0, 1.0, 1), (0, RAISE, 1), (0, 0.5, 0), (0, 0.0, 0), (1, LOWER, 0), (1, 0.21, 1), (2, 1.0, 2)],
)  # fmt: skip
def test_the_level_follows_the_solved_share(level, solved, after):
    assert next_level(level, solved, 3) == after


def test_the_easiest_level_comes_first_and_only():
    assert set(drawn(Curriculum.of(problems_of(5, 9, 7, 5)))) == {5}


def test_a_solved_window_raises_the_level_and_reviews_the_easier_ones():
    curriculum = Curriculum.of(problems_of(*[1, 2, 3] * 20))
    for level in (1, 2):
        curriculum.add([(level, 1.0)] * (WINDOW - 1))
        assert curriculum.level == level - 1
        curriculum.add([(level, 1.0)])
        assert curriculum.level == level
    found = drawn(curriculum)
    assert {level: 0.1 < found.count(level) / 400 < 0.17 for level in (1, 2)} == {1: True, 2: True}
    assert 0.7 < found.count(3) / 400 < 0.8


def test_groups_of_another_level_do_not_count():
    curriculum = Curriculum.of(problems_of(1, 2))
    curriculum.add([(2, 1.0)] * 10 * WINDOW)
    assert curriculum.level == 0


def test_the_same_history_gives_the_same_problems_also_after_a_checkpoint():
    history = [(1 + (i > 40), random.Random(i).random() ** 0.2) for i in range(5 * WINDOW)]
    whole, parts = (Curriculum.of(problems_of(*[1, 2, 3] * 20)) for _ in range(2))
    whole.add(history)
    for start in range(0, len(history), 7):
        parts.add(history[start : start + 7])
        restored = Curriculum.of(problems_of(*[1, 2, 3] * 20))
        restored.restore(parts.state())
        parts = restored
    assert whole.level > 0
    assert drawn(parts) == drawn(whole)
    assert parts.state() == whole.state()


def test_each_problem_of_a_level_is_drawn_in_an_epoch():
    problems = problems_of(*[1] * 7, *[2] * 3)
    curriculum = Curriculum.of(problems)
    found = {curriculum.problem(position, index).index for position, index in enumerate(range(10))}
    assert found == set(range(7))


def test_rollouts_without_a_reward_do_not_count_as_wrong():
    made, _ = group(0, ["a", "b", "c", "d"], level=3)
    assert solved_of(replace(made, rewards=(1.0, None, None, 0.5)), 1.0) == (3, 0.5)
    assert solved_of(replace(made, rewards=(1.0, None, None, None)), 1.0) == (3, 1.0)
    curriculum = Curriculum.of(problems_of(3, 4))
    curriculum.add([(3, 1.0)] * (WINDOW - 1))
    before = curriculum.state()
    curriculum.add([solved_of(replace(made, rewards=(None,) * 4), 1.0)] * WINDOW)
    assert curriculum.state() == before


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((1, None), r"problem 1 has None in the column 'level', expected a whole number"),
        ((1, "2"), r"has '2' in the column 'level'"),
        ((4, 4), r"all have the level 4, expected at least two levels"),
    ],
)
def test_a_source_without_levels_is_refused(levels, message):
    with pytest.raises(UserError, match=message):
        Curriculum.of(problems_of(*levels))


def test_the_sums_have_levels():
    config = PromptConfig(
        source="aedit.spec_rollout.rl.tasks.arithmetic:rows", size=60, options={"digits": 3, "levels": 3}
    )
    curriculum = Curriculum.of(load_problems(config, ByteTokenizer()).train)
    assert [level[0].columns["level"] for level in curriculum.levels] == [1, 2, 3]


def test_the_level_of_a_node_rises_with_trained_groups_and_is_kept(tmp_path):
    options = {"digits": 2, "levels": 2, "work": False}
    keys = {"prompts__curriculum": True, "prompts__options": options, "drafter__kind": "off"}
    keys |= {"rl__groups": 16, "rl__group_size": 2, "reward__functions": ("kit.rewards:one",)}
    node = run(config_of(tmp_path, **keys, train__steps=3))
    assert WINDOW < 3 * 16
    curriculum = node.objective.curriculum
    assert curriculum.level == 1
    assert node.objective.state()["curriculum"] == curriculum.state()
    node.objective.restore(node.objective.state() | {"curriculum": {"level": 0, "solved": 0.5, "groups": 3}})
    assert curriculum.state() == {"level": 0, "solved": 0.5, "groups": 3}


# --- reasoning-gym


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def gym_problems(source, **options):
    found = load_problems(PromptConfig(source=source, **options), ByteTokenizer(), seed=3)
    return sorted((*found.train, *found.held_out), key=lambda problem: problem.index)


def test_generators_are_mixed_by_their_weights_and_score_their_own_answers(gym):
    made = gym_problems("gym:leg_counting*2+chain_sum", size=30)
    names = [problem.columns["gym"]["name"] for problem in made]
    assert names[:6] == ["leg_counting", "leg_counting", "chain_sum"] * 2
    source = gym.create_dataset("chain_sum", seed=3, size=30)
    assert [p.prompt for p in made if p.columns["gym"]["name"] == "chain_sum"] == [
        source[i]["question"] for i in range(10)
    ]
    for problem in made[:6]:
        answer = problem.columns["answer"]
        request = {
            "prompt": problem.prompt,
            "completions": [answer, f"well <answer>{answer}</answer>", "nothing"],
            "completion_ids": [[], [], []],
            "columns": dict(problem.columns),
        }
        values = scores(find("gym", {}), request)
        assert values[:2] == [1.0, 1.0]
        assert values[2] < 1


def test_levels_of_generators_are_those_of_their_curricula(gym):
    made = gym_problems("gym:chain_sum", size=25, curriculum=True)
    assert sorted({problem.columns["level"] for problem in made}) == [1, 2, 3, 4, 5]
    terms = {
        level: max(p.prompt.count(" + ") + p.prompt.count(" - ") for p in made if p.columns["level"] == level)
        for level in range(1, 6)
    }
    assert terms[1] < terms[5]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("gym:no_such_thing", {}, "generator 'no_such_thing' of reasoning-gym"),
        (
            "gym:chain_sum",
            {"options": {"min_trems": 2}},
            "generator 'chain_sum' of reasoning-gym: .*min_trems",
        ),
        ("gym:composite", {"curriculum": True}, "generator 'composite' of reasoning-gym has no levels"),
    ],
)
def test_a_generator_that_cannot_be_used_is_named(gym, source, options, message):
    with pytest.raises(UserError, match=message):
        gym_problems(source, size=10, **options)
