"""Tests reward functions: what they are called with, what their values become, and the built-in ones."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rewards import group, rewarded

from aedit.launch.config import PromptConfig, RewardConfig
from aedit.launch.data import need_answer
from aedit.launch.data.rewards import reward_specs
from aedit.spec_rollout import RewardPool, RewardSpec
from aedit.spec_rollout.rl.rewards.built_in import (
    exact_reward,
    final_number,
    format_reward,
    numeric_reward,
    regex_reward,
)
from aedit.spec_rollout.rl.rewards.worker import find, scores
from aedit.types import UserError


def pool_of(*names, weights=(), **options):
    weights = weights or (1.0,) * len(names)
    return RewardPool(
        [
            RewardSpec(function=f"kit.rewards:{name}", weight=weight)
            for name, weight in zip(names, weights, strict=True)
        ],
        **options,
    )


def test_a_function_gets_what_trl_gives_it(tmp_path):
    told = tmp_path / "told"
    with pool_of("echo") as pool:
        pool.submit(*group(5, ["a", "bc"], prompt="why?", told=str(told), answer=["x"], n=3))
        rewarded(pool)
    assert json.loads(told.read_text()) == {
        "prompts": ["why?", "why?"],
        "completions": ["a", "bc"],
        "completion_ids": [[97], [98, 99]],
        "told": [str(told)] * 2,
        "answer": [["x"], ["x"]],
        "n": [3, 3],
    }


def test_dialogues_are_messages_on_both_sides(tmp_path):
    told, messages = tmp_path / "told", ({"role": "user", "content": "why?"},)
    with pool_of("echo") as pool:
        pool.submit(*group(5, ["a"], prompt=messages, told=str(told)))
        rewarded(pool)
    said = json.loads(told.read_text())
    assert said["prompts"] == [list(messages)]
    assert said["completions"] == [[{"role": "assistant", "content": "a"}]]


def test_rewards_are_weighted_sums_and_none_says_nothing():
    with pool_of("length", "in_time", "only_digits", weights=(0.5, 2.0, 1.0)) as pool:
        pool.submit(*group(0, ["three", "3"], answer="3"))
        rewards, report = rewarded(pool)[0]
    assert rewards == (0.5 * 5, 0.5 * 1 + 2 * 1 + 3)
    assert report.values["kit.rewards:only_digits"] == (None, 3.0)
    assert report.events == ()
    assert report.seconds > 0


def test_a_completion_about_which_no_function_says_anything_is_left_out():
    with pool_of("only_digits") as pool:
        pool.submit(*group(0, ["three", "3"]))
        assert rewarded(pool)[0][0] == (None, 3.0)


def test_an_object_with_numpy_values_is_a_reward_function():
    with pool_of("scorer") as pool:
        pool.submit(*group(0, ["a", "b"], prompt="four"))
        assert rewarded(pool)[0][0] == (4.0, 4.0)


def test_a_group_is_ready_while_another_is_computed(tmp_path):
    gate = tmp_path / "gate"
    with pool_of("after_file", workers=2, time_limit_s=60) as pool:
        pool.submit(*group(0, ["a"], gate=str(gate)))
        pool.submit(*group(1, ["a"], gate=""))
        ((first, _),) = pool.wait(60)
        assert (first.position, pool.pending) == (1, 1)
        gate.touch()
        ((second, _),) = pool.wait(60)
        assert (second.position, pool.pending) == (0, 0)
        assert pool.wait(60) == []


def test_groups_and_texts_that_do_not_fit_are_refused():
    with pool_of("length") as pool:
        pool.submit(*group(0, ["a"]))
        with pytest.raises(ValueError, match="group was submitted before, got 0"):
            pool.submit(*group(0, ["a"]))
        with pytest.raises(ValueError, match="text must have 1 completions, got 2"):
            pool.submit(group(1, ["a"])[0], ["a", "b"])
    with pytest.raises(ValueError, match="must name each function once"):
        pool_of("length", "length")


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("42", "42", 1),
        ("it is 41, no, 42.", "42", 1),
        ("1,234.50", "1234.5", 1),
        ("1e3", "1000", 1),
        ("$ 5 or $1,000", "1000", 1),
        ("1/2", "0.5", 1),
        (r"so \boxed{\frac{1}{2}} in 3 steps", "0.5", 1),
        (r"\boxed{1} then \boxed{ {7} } is 9", "7", 1),
        ("7 #### 12\n", "#### 12", 1),
        ("12 #### 7", "12", 0),
        ("3-5", "5", 1),
        ("-5", "5", 0),
        ("x = -5", "-5", 1),
        ("0.30000000000000000001", "0.3", 0),
        ("none", "1", 0),
        ("", "1", 0),
        ("1/0", "1", 0),
        ("9" * 5000, "9", 0),
        ("1e999999999999", "1", 0),
        (".5", "1/2", 1),
        ("7+5=12:102", "102", 1),
    ],
)
def test_the_final_number_is_compared_as_a_number(text, answer, value):
    assert numeric_reward([text], answer=[answer]) == [value]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_any_way_to_write_a_number_is_the_same_number(whole, places):
    decimal = f"{whole / 10**places:.{places}f}" if abs(whole) < 10**9 else str(whole)
    assert final_number(f"first 17, then {decimal}.") == final_number(decimal)
    assert final_number(f"{whole:,}") == whole == final_number(f"{whole}.0")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,/-+eE$ \\boxed{}frac#", max_size=40))
def test_no_text_makes_the_final_number_fail(text):
    assert numeric_reward([text], answer=["1"]) in ([0.0], [1.0])


def test_a_tolerance_is_relative_to_the_answer():
    near = ["102", "98", "103"]
    assert numeric_reward(near, answer=["100"] * 3, tolerance=0.02) == [1, 1, 0]


def test_an_answer_without_a_number_is_the_users_fault():
    with pytest.raises(ValueError, match="the answer 'seven' has no number"):
        numeric_reward(["7"], answer=["seven"])


def test_exact_compares_texts():
    assert exact_reward(["a", " a\n", "A", "ab"], answer=["a"] * 4) == [1, 1, 0, 0]
    assert exact_reward(["A"], answer=["a"], ignore_case=True) == [1]
    assert exact_reward(["7"], solution=[7], answer_key="solution") == [1]
    with pytest.raises(ValueError, match=r"prompts.answer_key = 'answer' is no column .* they have: level"):
        exact_reward(["a"], level=[1])


def test_a_regular_expression_is_found_and_may_hold_the_answer():
    assert regex_reward(["x = 5", "5"], pattern=r"x = \d") == [1, 0]
    tagged = [r"<a>5</a>", r"<a>6</a>", "5", "<a>6</a><a> 5 </a>"]
    assert regex_reward(tagged, pattern=r"<a>(?P<answer>.*?)</a>", answer=["5"] * 4) == [1, 0, 0, 1]
    with pytest.raises(ValueError, match=r"regex\.pattern"):
        regex_reward(["a"])


def test_the_format_is_all_tags_once_in_order():
    texts = [
        "<think>a\nb</think> <answer>1</answer>\n",
        "<think></think><answer></answer>",
        "<answer>1</answer><think>a</think>",
        "<think>a</think><answer>1</answer> more",
        "<think>a</think><answer>1</answer><answer>2</answer>",
        "<think>a<think>b</think></think><answer>1</answer>",
        "1",
    ]
    assert format_reward(texts) == [1, 1, 0, 0, 0, 0, 0]
    assert format_reward(["<a>x</a>"], tags="a") == [1]


def test_the_configuration_names_functions_weights_and_options():
    config = RewardConfig(
        functions=("numeric", "format", "kit.rewards:length"),
        weights=(1.0, 0.25, 0.01),
        options={"numeric.tolerance": 0.5, "format.tags": "a"},
    )
    specs = reward_specs(config, PromptConfig(answer_key="solution"))
    assert [spec.weight for spec in specs] == [1.0, 0.25, 0.01]
    assert [dict(spec.options) for spec in specs] == [
        {"tolerance": 0.5, "answer_key": "solution"},
        {"tags": "a"},
        {},
    ]
    with RewardPool(specs) as pool:
        pool.submit(*group(0, ["<a>13</a>"], solution="10"))
        assert rewarded(pool)[0][0] == (1.0 + 0.25 + 0.09,)


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        (
            ("exakt",),
            {},
            "reward.functions must be of exact, numeric, .*, or package.module:name, got 'exakt'",
        ),
        (("exact",), {"regex.pattern": "a"}, "'regex.pattern'.*which are: exact"),
        (("exact",), {"pattern": "a"}, "'pattern', expected FUNCTION.OPTION"),
        (("kit.rewards:length",), {"kit.rewards:length.x": 1}, "which are: none"),
    ],
)
def test_a_wrong_configuration_of_rewards_is_refused(functions, options, message):
    with pytest.raises(UserError, match=message):
        reward_specs(RewardConfig(functions=functions, options=options), PromptConfig())


def test_an_unknown_option_of_a_function_names_those_there_are():
    (spec,) = reward_specs(RewardConfig(functions=("numeric",), options={"numeric.tol": 1}), PromptConfig())
    with (
        RewardPool([spec]) as pool,
        pytest.raises(ValueError, match=r"numeric\.tol; numeric has: numeric\.tol"),
    ):
        pool.check()


@pytest.mark.parametrize(
    ("name", "options", "column"),
    [
        ("format", {"tags": "a"}, {"tags": ["b"]}),
        ("exact", {"ignore_case": True, "answer_key": "answer"}, {"ignore_case": False}),
        ("numeric", {"tolerance": 0.5, "answer_key": "answer"}, {"tolerance": 0.0}),
        ("regex", {"pattern": "3", "answer_key": "answer"}, {"pattern": "4"}),
    ],
)
def test_a_column_with_the_name_of_an_option_does_not_replace_it(name, options, column):
    """With the value of the column each of these would score 0, or raise."""
    text = {"format": "<a>x</a>", "exact": "A", "numeric": "13", "regex": "3"}[name]
    answer = {"exact": "a", "numeric": "10"}.get(name, "")
    request = {"prompt": "p", "completions": [text], "completion_ids": [[1]]}
    assert scores(find(name, options), {**request, "columns": {"answer": answer, **column}}) == [1.0]


def test_which_rewards_need_the_column_of_the_answer():
    assert need_answer(RewardConfig())
    assert not need_answer(RewardConfig(functions=("format", "kit.rewards:length")))


def test_math_expressions_are_compared_by_math_verify():
    pytest.importorskip("math_verify")
    request = {
        "prompt": "",
        "completions": [r"so $\frac{2}{4}$", r"\boxed{0.5}", "$0.6$", "no"],
        "completion_ids": [[]] * 4,
        "columns": {"answer": r"\frac{1}{2}"},
    }
    assert scores(find("math", {}), request) == [1, 1, 0, 0]


def test_a_forgotten_group_is_not_returned_and_its_place_is_free(tmp_path):
    gate = tmp_path / "gate"
    with pool_of("after_file", "length", workers=2, time_limit_s=60) as pool:
        pool.submit(*group(0, ["a"], gate=str(gate)))
        pool.check()
        pool.drop()
        assert (pool.pending, pool.wait(60)) == (0, [])
        pool.submit(*group(0, ["abc", "d"], gate=""))
        gate.touch()
        assert rewarded(pool)[0][0] == (4.0, 2.0)
