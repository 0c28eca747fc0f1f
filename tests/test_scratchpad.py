"""Tests scratchpad arithmetic: correct answers, long-tailed lengths, and a strict checker."""

import random

import numpy as np
import pytest

from aedit.spec_rollout.rl.tasks.scratchpad import (
    MAX_CHARS,
    MEDIAN_SIZE,
    Task,
    draw_task,
    draw_tasks,
    problems,
    reward,
    solved,
    worked,
)


def result(prompt):
    """Compute the result in Python, without a scratchpad."""
    kind, _, rest = prompt.strip().partition(" ")
    if kind == "sort":
        return " ".join(sorted(rest.split(), key=int))
    value = eval(rest)
    return str(value % 10 if kind == "eval" else value)


def test_every_worked_answer_ends_with_what_python_says():
    for task in draw_tasks(2000, seed=1):
        assert task.answer.splitlines()[-1] == f"={result(task.prompt)}", task.prompt
        assert task.answer.endswith("\n")
        assert reward(task.prompt, task.answer) == 1.0


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("add 95+7\n", "9+ 5+7+0=12 2\n+ 9+0+1=10 02\n=102\n"),
        ("mul 12*34\n", "2*4+0=08 1*4+0=04 48\n2*3+0=06 1*3+0=03 360\n48+360\n"
                        "4+36 8+0+0=08 8\n+3 4+6+0=10 08\n+ 0+3+1=04 408\n=408\n"),
        ("mul 0*7\n", "0*7+0=00 0\n=0\n"),
        ("sort 9 10 9\n", "9|10 9\n9|10\n10|\n=9 9 10\n"),
        ("eval ((3-4)*2)\n", "3-4=9 (9*2)\n9*2=8 8\n=8\n"),
    ],
)  # fmt: skip
def test_the_work_is_done_line_by_line(prompt, answer):
    assert worked(prompt) == answer


def test_answers_have_a_long_tail_and_fit():
    tasks = draw_tasks(20_000, seed=0)
    lengths = np.array([len(task.answer) for task in tasks])
    p50, p99 = np.percentile(lengths, (50, 99))
    assert p99 / p50 >= 6
    assert max(len(task.prompt) + len(task.answer) for task in tasks) <= MAX_CHARS
    shares = [sum(task.kind == kind for task in tasks) / len(tasks) for kind in MEDIAN_SIZE]
    assert min(shares) > 0.2


def test_the_same_seed_gives_the_same_tasks_and_another_one_others():
    assert draw_tasks(50, seed=3) == draw_tasks(50, seed=3)
    assert draw_tasks(50, seed=3) != draw_tasks(50, seed=4)


@pytest.mark.parametrize("spoil", [
    lambda text: text[:-2] + ("1" if text[-2] != "1" else "2") + "\n",
    lambda text: "",
    lambda text: text.rpartition("=")[0],
    lambda text: text + "and so on",
    lambda text: text.replace("=", "-"),
])  # fmt: skip
def test_a_wrong_result_earns_nothing(spoil):
    rng = random.Random(5)
    for _ in range(50):
        task = draw_task(rng)
        assert reward(task.prompt, spoil(task.answer)) == 0.0


def test_only_the_result_is_looked_at():
    assert reward("add 1+1\n", "I know that\n=2") == 1.0


@pytest.mark.parametrize("prompt", ["", "add 5", "div 4/2", "add 1+2+3", "sort", "eval __import__('os')"])
def test_what_is_no_task_is_refused(prompt):
    with pytest.raises(ValueError, match="is no task"):
        worked(prompt)


def test_the_problems_are_those_of_a_run_and_their_answers_are_solved():
    made = problems(40, seed=7, options={"longest": 200})
    assert (
        made
        == problems(40, seed=7, options={"longest": 200})
        != problems(40, seed=8, options={"longest": 200})
    )
    assert max(len(row["prompt"]) + len(row["answer"]) for row in made) <= 200
    prompts, answers = [row["prompt"] for row in made], [row["answer"] for row in made]
    assert solved(prompts, answers, answer=answers) == [1.0] * 40
    assert solved(prompts, [answer[:-2] for answer in answers]) == [0.0] * 40


@pytest.mark.parametrize("options", [{"longest": 63}, {"longest": 1001}, {"longest": "9"}, {"digits": 3}])
def test_options_of_problems_are_refused_by_name(options):
    with pytest.raises(ValueError, match=r"prompts\.options"):
        problems(1, 0, options)


def test_a_task_knows_its_kind():
    assert Task("mul 2*3\n", "").kind == "mul"
