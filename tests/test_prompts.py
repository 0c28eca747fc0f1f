"""Tests the problems of a run: sources, chat templates, held-out part, and messages about bad ones."""

import json
from decimal import Decimal

import pytest
import torch

from aedit.launch.config import DataConfig, PromptConfig
from aedit.launch.data import AnswerTokens, ByteTokenizer, load_problems
from aedit.spec_rollout import Problem
from aedit.spec_rollout.rl.rewards.built_in import numeric_reward
from aedit.spec_rollout.rl.tasks import arithmetic
from aedit.types import UserError

SUMS = "aedit.spec_rollout.rl.tasks.arithmetic:rows"


def numbered(size, seed, options):
    return [{"prompt": f"{seed}:{i}", "answer": i, **options} for i in range(size)]


def fails(size, seed, options):
    raise RuntimeError("out of numbers")


def strange(size, seed, options):
    return [{"prompt": "a", "answer": object()}]


def typed(size, seed, options):
    import datetime

    import numpy as np

    return [
        {
            "prompt": str(i),
            "answer": np.float32(i),
            "day": datetime.date(2026, 1, 1),
            "pair": (1, np.arange(2)),
        }
        for i in range(size)
    ]


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


class ChatTokenizer(ByteTokenizer):
    """A tokenizer with a chat template."""

    def encode_chat(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def problems(source, tokenizer=None, seed=0, longest=0, needs_answer=True, **options):
    config = PromptConfig(source=source, **options)
    tokenizer = tokenizer or ByteTokenizer()
    return load_problems(config, tokenizer, seed=seed, longest=longest, needs_answer=needs_answer)


def test_rows_of_a_file_become_problems_with_their_columns(jsonl):
    rows = [{"question": f"{i}+1=", "solution": i + 1, "note": [i]} for i in range(20)]
    found = problems(jsonl(*rows), prompt_key="question", answer_key="solution", held_out=0.3)
    both = sorted((*found.train, *found.held_out), key=lambda problem: problem.index)
    assert [problem.prompt for problem in both] == [row["question"] for row in rows]
    assert [bytes(problem.tokens).decode() for problem in both] == [row["question"] for row in rows]
    assert [dict(problem.columns) for problem in both] == [
        {"solution": row["solution"], "note": row["note"]} for row in rows
    ]


def test_the_held_out_part_depends_on_prompts_only(jsonl):
    rows = [{"prompt": f"p{i % 300}", "answer": i} for i in range(600)]
    forward = problems(jsonl(*rows), held_out=0.2)
    backward = problems(jsonl(*reversed(rows), name="backward.jsonl"), held_out=0.2)
    held = {problem.prompt for problem in forward.held_out}
    assert held == {problem.prompt for problem in backward.held_out}
    assert held.isdisjoint(problem.prompt for problem in forward.train)
    assert 0.1 < len(held) / 300 < 0.3
    assert len(forward.train) + len(forward.held_out) == 600
    larger = {problem.prompt for problem in problems(jsonl(*rows), held_out=0.4).held_out}
    assert held < larger


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_either_part_has_a_problem_however_few_there_are(jsonl, share):
    found = problems(jsonl(*({"prompt": p, "answer": 0} for p in "aab")), held_out=share)
    assert found.train
    assert found.held_out


def test_nodes_with_the_same_source_have_the_same_fingerprint():
    prints = [
        problems(SUMS, size=50, seed=seed, options={"digits": digits}, held_out=held).fingerprint
        for seed, digits, held in [(0, 2, 0.05), (0, 2, 0.05), (1, 2, 0.05), (0, 3, 0.05), (0, 2, 0.1)]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_a_chat_template_is_used_where_there_is_one(jsonl):
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl({"prompt": "a", "answer": 0}, {"prompt": dialogue, "answer": 0})
    found = problems(path, ChatTokenizer())
    texts = {bytes(problem.tokens).decode() for problem in (*found.train, *found.held_out)}
    assert texts == {"<user>a<assistant>", "<system>s<user>u<assistant>"}
    assert {type(problem.prompt) for problem in (*found.train, *found.held_out)} == {str, tuple}
    plain = problems(jsonl({"prompt": "a"}, {"prompt": "b"}), ChatTokenizer(), chat_template=False,
                     needs_answer=False)  # fmt: skip
    assert {problem.tokens for problem in (*plain.train, *plain.held_out)} == {(97,), (98,)}


def test_a_template_that_refuses_a_prompt_is_named_with_the_row(jsonl):
    class Refusing(ByteTokenizer):
        def encode_chat(self, messages):
            raise RuntimeError("no system messages\nsecond line")

    with pytest.raises(UserError, match=r"does not accept the prompt of .*jsonl:1: no system messages$"):
        problems(jsonl({"prompt": "a", "answer": 0}), Refusing())


def test_a_template_of_a_hugging_face_tokenizer_is_found(tmp_path):
    from transformers import AutoTokenizer

    from aedit.launch.data import load_tokenizer

    ByteTokenizer().save(tmp_path)
    config = DataConfig(tokenizer=str(tmp_path))
    assert load_tokenizer(config).encode_chat([{"role": "user", "content": "a"}]) is None
    saved = AutoTokenizer.from_pretrained(tmp_path)
    saved.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    saved.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(config)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert tokenizer.decode(ids) == "[user]a[assistant]"


def test_a_function_makes_rows_of_plain_values():
    found = problems("test_prompts_functions:typed", size=5)
    columns = dict((*found.train, *found.held_out)[0].columns)
    assert columns["day"] == "2026-01-01"
    assert columns["pair"] == [1, [0, 1]]
    assert isinstance(columns["answer"], float)


def test_options_and_seed_reach_the_function():
    found = problems("test_prompts_functions:numbered", size=3, seed=4, options={"x": 1.5})
    both = (*found.train, *found.held_out)
    assert sorted(problem.prompt for problem in both) == ["4:0", "4:1", "4:2"]
    assert {problem.columns["x"] for problem in both} == {1.5}


@pytest.fixture(autouse=True)
def functions(monkeypatch):
    """Give this module a name under which a configuration can name its functions."""
    import sys

    monkeypatch.setitem(sys.modules, "test_prompts_functions", sys.modules[__name__])


def test_a_data_set_of_hugging_face_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(6)]
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d" / "train.parquet")
    found = problems(f"hf:{tmp_path / 'd'}")
    assert sorted(problem.columns["answer"] for problem in (*found.train, *found.held_out)) == list("012345")


ROW = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"prompts.source = '.*' has no rows, expected at least 2 different prompts"),
        ([ROW, ROW], {}, r"has one prompt only, expected at least 2 different ones"),
        ([ROW, "{"], {}, r"rows.jsonl:2 is not JSON"),
        ([ROW, "3"], {}, r"rows.jsonl:2 is int, expected an object with columns"),
        ([{"promt": "a"}], {}, r"prompts.prompt_key = 'prompt' is missing in .*:1; did you mean 'promt'"),
        ([{"prompt": "a"}], {}, r"prompts.answer_key = 'answer' is missing in .*jsonl:1"),
        ([{"prompt": "a", "x": 0}], {}, r"'answer' is missing in .*jsonl:1; its columns are prompt, x$"),
        ([{"prompt": "a\ud800", "answer": 0}], {}, r"does not accept the prompt of .*:1: .*surrogates"),
        ([{"prompt": 3, "answer": 0}], {}, r"of .*jsonl:1 holds 3, expected text or a list of mes"),
        ([{"prompt": [{"role": "user"}], "answer": 0}], {}, r"expected text or a list of messages with role"),
        ([{"prompt": "", "answer": 0}], {}, r"jsonl:1 has an empty prompt"),
        ([{"prompt": "abcd", "answer": 0}], {"longest": 3}, r"has 4 tokens, and data.seq_len - .* leaves 3"),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "answer": 0}],
            {},
            r"is a list of messages, but the tokenizer has no chat template; write the prompts as text",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(jsonl, rows, options, message):
    with pytest.raises(UserError, match=message) as error:
        problems(jsonl(*rows), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "prompts.source = 'missing.jsonl': no such file"),
        ("no.such:rows", "prompts.source: no.such:rows cannot be imported.*PYTHONPATH"),
        ("test_prompts_functions:fails", "'test_prompts_functions:fails': RuntimeError: out of numbers"),
        ("test_prompts_functions:strange", "row 0 of .* has a value of type object, .*leave that column out"),
        ("hf:/no/such/data", "prompts.source = 'hf:/no/such/data': "),
        ("gym:leg_counting*x", "'leg_counting\\*x' has no number as weight"),
        ("gym:a+a", "different names"),
        ("gym:a*0", "weights > 0"),
    ],
)
def test_a_bad_source_is_refused_in_one_line(source, message):
    with pytest.raises(UserError, match=message) as error:
        problems(source)
    assert "\n" not in str(error.value)


def test_a_text_file_is_no_source_of_problems(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a.txt has the suffix '.txt', expected .jsonl"):
        problems(str(tmp_path / "a.txt"))


# --- arithmetic


def test_the_working_of_a_sum_is_right_line_by_line():
    for row in arithmetic.rows(300, 3, {"digits": 5, "levels": 5}):
        first, second = map(int, row["prompt"].rstrip("=").split("+"))
        assert max(first, second) < 10 ** row["level"]
        work, _, total = row["answer"].partition(":")
        assert int(total) == first + second
        carry = digits = 0
        for place, step in enumerate(work.split(",")):
            summands, column = step.split("=")
            one, other, carried = map(int, summands.split("+"))
            assert (one, other) == (first // 10**place % 10, second // 10**place % 10)
            assert (carried, int(column)) == (carry, one + other + carry)
            carry, digits = int(column) // 10, digits + int(column) % 10 * 10**place
        assert digits + carry * 10 ** (place + 1) == int(total)
        assert numeric_reward([total, row["answer"]], answer=[row["answer"]] * 2) == [1, 1]


def test_sums_are_spread_over_the_levels_and_repeat():
    rows = arithmetic.rows(90, 0, {"digits": 4, "levels": 3, "work": False})
    assert [row["level"] for row in rows] == [2, 3, 4] * 30
    assert rows == arithmetic.rows(90, 0, {"digits": 4, "levels": 3, "work": False})
    assert rows != arithmetic.rows(90, 1, {"digits": 4, "levels": 3, "work": False})
    assert all(Decimal(row["answer"]) == sum(map(int, row["prompt"][:-1].split("+"))) for row in rows)


@pytest.mark.parametrize(
    "options", [{"level": 2}, {"digits": 0}, {"digits": 13}, {"levels": 3}, {"digits": "2"}]
)
def test_an_unknown_option_of_the_sums_is_refused(options):
    with pytest.raises(UserError, match=r"prompts\.options"):
        problems(SUMS, options=options)


# --- samples of the warm-up


def test_rows_of_the_warm_up_are_prompt_answer_and_end():
    made = [
        Problem(index=i, prompt=text, tokens=tuple(text.encode()), columns={"answer": answer})
        for i, (text, answer) in enumerate([("1+2=", 3), ("10+20=", "30")])
    ]
    tokens_BT, mask_BT = AnswerTokens(ByteTokenizer(), "answer", 9).batch(made)
    assert tokens_BT.tolist() == [[*b"1+2=3", *[256] * 4], [*b"10+20=30", 256]]
    assert mask_BT.tolist() == [
        [False] * 4 + [True] * 2 + [False] * 3,
        [False] * 6 + [True] * 3,
    ]
    assert tokens_BT.dtype == torch.int64


def test_a_row_of_the_warm_up_that_does_not_fit_is_refused():
    problem = Problem(index=7, prompt="1+2=", tokens=(1, 2, 3, 4), columns={"answer": "3"})
    with pytest.raises(UserError, match=r"data.seq_len = 5: prompt and answer of problem 7 have 6 tokens"):
        AnswerTokens(ByteTokenizer(), "answer", 5).batch([problem])
    with pytest.raises(UserError, match=r"prompts.answer_key = 'right': problem 7 has no answer there"):
        AnswerTokens(ByteTokenizer(), "right", 50).batch([problem])
