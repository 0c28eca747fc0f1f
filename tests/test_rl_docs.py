"""Tests that the page on reinforcement learning describes the program: keys, defaults, metrics, examples."""

import importlib
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from aedit.async_sgd.service import metrics_page as prometheus
from aedit.launch.config import literal, load, rl
from aedit.launch.config.rl import AuditConfig
from aedit.launch.data import ByteTokenizer, load_problems
from aedit.launch.records import EvalEvent, RLMetric
from aedit.launch.records.records import DRAFTER
from aedit.spec_rollout.rl.rewards.worker import find, scores

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "rl.md").read_text()
GROUPS = (
    ("prompts", rl.PromptConfig),
    ("reward", rl.RewardConfig),
    ("rl", rl.RLConfig),
    ("rl.sampling", rl.RLSamplingConfig),
    ("rollout.vllm", rl.VllmConfig),
    ("drafter", rl.DrafterConfig),
    ("audit", AuditConfig),
)


def beginnings(group, cls):
    """Return how the page begins the line of each key of this group."""
    usual = cls()
    return [
        f"- `{group}.{field.name}` = `{literal(getattr(usual, field.name))}`: "
        for field in fields(cls)
        if not is_dataclass(getattr(usual, field.name))
    ]


def section(title):
    """Return the text below a heading."""
    return re.split(r"^##+ ", PAGE.split(f"## {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(("group", "cls"), GROUPS, ids=[name for name, _ in GROUPS])
def test_the_page_has_each_key_with_its_default_and_meaning(group, cls):
    for begin in beginnings(group, cls):
        found = [line for line in PAGE.splitlines() if line.startswith(begin)]
        assert len(found) == 1, f"write a line that begins so: {begin}"
        assert len(found[0]) > len(begin) + 10, f"say what it means: {begin}"


def test_the_page_names_no_key_that_is_not_there():
    keys = {f"{group}.{field.name}" for group, cls in GROUPS for field in fields(cls)}
    named = set(re.findall(r"`((?:prompts|reward|rl|drafter|audit)\.[a-z_.]+)`", PAGE))
    assert named - keys <= {"rl.sampling"}


def test_the_page_explains_every_metric():
    text = section("Metrics")
    named = set(re.findall(r"^- ((?:`[a-z_]+`(?:, )?)+): ", text, re.M))
    explained = {name for cell in named for name in re.findall(r"`([a-z_]+)`", cell)}
    known = {*DRAFTER, *(field.name for cls in (RLMetric, EvalEvent) for field in fields(cls))}
    assert known - explained <= {"drafter", "t", "step", "round", "loss"}


def test_the_page_names_the_numbers_of_prometheus():
    named = set(re.findall(r"`(aedit_node_[a-z_]+)`", PAGE))
    known = {
        f"aedit_node_{name}{'_total' * (kind is prometheus.CounterMetricFamily)}"
        for kind, _, name, _ in prometheus._RL
    }
    known |= {f"aedit_node_{name}_total" for _, _, name, _ in prometheus._RL_BY}
    assert named == known


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.S))
def test_every_configuration_of_the_page_can_be_read(tmp_path, monkeypatch, block):
    monkeypatch.syspath_prepend(tmp_path)
    for code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.S):
        (tmp_path / f"{code[0]}.py").write_text(code[1])
    tomllib.loads(block)
    (tmp_path / "own.toml").write_text(block)
    load([tmp_path / "own.toml"], [])


def test_the_pages_own_problems_and_reward_do_what_it_says(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.S):
        (tmp_path / f"{name}.py").write_text(code)
    problems = importlib.import_module("my_problems").rows(size=50, seed=1, options={})
    assert problems == importlib.import_module("my_problems").rows(size=50, seed=1, options={})
    found = load_problems(rl.PromptConfig(source="my_problems:rows", size=50), ByteTokenizer())
    assert len(found.train) + len(found.held_out) == 50
    columns = {"a": [3] * 4, "b": [4] * 4}
    texts = ["It is 12", "12 or 11", "eleven", "100"]
    score = find("my_rewards:close", {})
    asked = {"prompt": "What is 3 times 4?", "columns": {"a": 3, "b": 4, "answer": "12"}}
    given = asked | {"completions": texts, "completion_ids": [[0]] * 4}
    assert (
        scores(score, given) == score(["x"] * 4, texts, **columns) == [1.0, 0.5, 0.0, pytest.approx(1 / 89)]
    )


def test_the_row_of_the_page_is_a_problem(tmp_path):
    (line,) = re.findall(r'^(\{"prompt".*\})$', PAGE, re.M)
    for number in range(3):
        with (tmp_path / "problems.jsonl").open("a") as file:
            file.write(line.replace("17", str(17 + number)) + "\n")
    found = load_problems(rl.PromptConfig(source=str(tmp_path / "problems.jsonl")), ByteTokenizer())
    assert {problem.columns["answer"] for problem in (*found.train, *found.held_out)} == {"42"}
