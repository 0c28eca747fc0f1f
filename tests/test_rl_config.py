"""Tests that values of reinforcement learning that cannot work are refused before anything starts."""

import pytest

from aedit.launch.config import Placement, PromptConfig, load
from aedit.launch.data import ByteTokenizer, load_problems
from aedit.launch.processes import preflight
from aedit.types import UserError

SUMS = "aedit.spec_rollout.rl.tasks.arithmetic:rows"
HEAD = f'[prompts]\nsource = "{SUMS}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rl]\ngroup_size = 1", "rl.group_size must be at least 2: advantages compare the rollouts"),
        (
            '[rl]\nold_logprobs = "trainer"\nmax_staleness = 1',
            'rl.old_logprobs must be "engine" with rl.max_staleness above 0, or rl.importance "token" or '
            '"sequence", got trainer',
        ),
        ("[rl]\noverlong = 129", "rl.overlong must be at most rl.sampling.max_new_tokens = 128, got 129"),
        ('[rl.sampling]\nstop = ["a", ""]', "rl.sampling.stop must not have an empty text, got ['a', '']"),
        ('[reward]\nfunctions = ["exact", "exact"]', "reward.functions must name each function once"),
        ("[data]\nseq_len = 128", "data.seq_len must be above rl.sampling.max_new_tokens = 128"),
        ("[rl]\nsupervised_steps = 1001", "rl.supervised_steps must be at most train.steps = 1000"),
    ],
)
def test_a_value_that_cannot_work_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(f"{HEAD}{text}\n")
    with pytest.raises(UserError) as caught:
        load(path, [], strict=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["a.jsonl", "hf:a", "hf:a:b"])
@pytest.mark.parametrize("key", ["size = 9", "options = { digits = 3 }"])
def test_settings_of_a_generator_are_refused_where_rows_are_read(tmp_path, source, key):
    path = tmp_path / "run.toml"
    path.write_text(f'[prompts]\nsource = "{source}"\n{key}\n')
    with pytest.raises(
        UserError, match=rf"prompts\.{key.split()[0]}.* has no effect with prompts\.source = "
    ):
        load(path, [], strict=True)
    path.write_text(f'[prompts]\nsource = "gym:leg_counting"\n{key}\n')
    assert load(path, [], strict=True).config.prompts.source == "gym:leg_counting"


def test_lengths_of_answers_do_not_matter_to_a_run_on_text():
    assert load(None, ["--data.seq_len", "32"], strict=True).config.data.seq_len == 32


def test_a_loss_of_ones_own_may_do_without_a_comparison(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'{HEAD}[rl]\ngroup_size = 1\nloss = "kit.rl_losses:spy"\n')
    assert load(path, [], strict=True).config.rl.group_size == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts.source", "missing.jsonl"], "prompts.source = 'missing.jsonl': no such file"),
        (["--prompts.source", SUMS, "--reward.functions", "exactt"], "reward.functions must be of exact"),
    ],
)
def test_a_run_is_refused_before_torch_is_loaded(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        preflight(load(None, flags, strict=True).config, Placement())


def test_a_flag_of_options_reaches_the_generator():
    config = load(
        None, ["--prompts.source", SUMS, "--prompts.size", "9", "--prompts.options", "work", "false"]
    )
    problems = load_problems(config.config.prompts, ByteTokenizer())
    assert all(problem.columns["answer"].isdigit() for problem in problems.train)
    worked = load_problems(PromptConfig(source=SUMS, size=9), ByteTokenizer())
    assert not all(problem.columns["answer"].isdigit() for problem in worked.train)
