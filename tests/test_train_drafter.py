"""Tests `aedit train-drafter`: a drafter of a run's policy, trained once before the run."""

from itertools import count

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from aedit.launch.cli.main import main
from aedit.launch.cli.train_drafter import collect_rollouts
from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.drafters import DraftForm, DraftLayer, load_drafter
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    held_out_match,
    pack_samples,
    policy_ends,
    train_drafter,
)

CONFIG = """
name = "once"
[model]
pretrained = {model}
[data]
tokenizer = "byte"
seq_len = 128
[prompts]
source = "aedit.spec_rollout.rl.tasks.scratchpad:problems"
size = 40
options = {{ longest = 64 }}
[reward]
functions = ["aedit.spec_rollout.rl.tasks.scratchpad:solved"]
[rl.sampling]
max_new_tokens = 24
stop = ["#"]
[drafter]
form = "{form}"
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a small policy whose next tokens are not all equally likely."""
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=ByteTokenizer().vocab_size, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def write_config(tmp_path, model, form="own"):
    path = tmp_path / "once.toml"
    path.write_text(CONFIG.format(model=f'"{model}"', form=form))
    return str(path)


def rollouts(model, num_tokens, first, taps=()):
    sampling = Sampling(max_new_tokens=24)
    tokens = ((65 + n % 26, 65 + n // 26 % 26, 67) for n in count(first))
    asked = (Prompt(tokens=t, rollout=7, sample=first + n, sampling=sampling) for n, t in enumerate(tokens))
    return collect_rollouts(model, asked, num_tokens, taps=taps, max_tokens=64)


@pytest.mark.parametrize("form", ["own", "eagle3"])
def test_a_trained_layer_matches_the_policy_better_than_a_new_one(model_dir, form):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    form = DraftForm(form)
    taps = form.taps(model.config)
    steps = count()
    layer, match = train_drafter(
        model,
        rollouts(model, 4096, 0, taps),
        DraftTrainingConfig(lr=3e-3),
        minutes=2.0,
        form=form,
        clock=lambda: float(next(steps)),
    )
    assert next(steps) == 121, "a second of the clock is a step"
    apart = pack_samples(rollouts(model, 1500, 2000, taps), 256)
    new = form.new(model, generator=torch.Generator().manual_seed(1))
    trained, fresh = (held_out_match(each, apart, policy_ends(model), 2).rate for each in (layer, new))
    assert trained > 1.3 * fresh
    assert match.rate > 0.0


@pytest.mark.parametrize("form", ["own", "eagle3"])
def test_the_command_writes_what_a_run_reads(model_dir, tmp_path, capsys, form):
    out = tmp_path / "drafter"
    config = write_config(tmp_path, model_dir, form)
    assert main(["train-drafter", config, "--out", str(out), "--minutes=0.01", "--tokens=2048"]) == 0
    assert f'drafter.pretrained = "{out}"' in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert isinstance(load_drafter(out, model), DraftLayer)
    assert {path.stat().st_mode & 0o044 for path in out.iterdir()} == {0o044}
    assert main(["train-drafter", config, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--minutes=0"], "--minutes: must be above 0, got 0.0"),
        (["--minutes=nan"], "--minutes: must be above 0, got nan"),
        (["--tokens=10"], "--tokens: must be at least 1024, got 10"),
        (["--model.pretrained="], "model.pretrained: must name the policy"),
        (["--model.pretrained=/nowhere"], "model.pretrained = '/nowhere': no usable model there"),
    ],
)
def test_what_does_not_fit_is_one_line(model_dir, tmp_path, capsys, arguments, reason):
    config = write_config(tmp_path, model_dir)
    assert main(["train-drafter", config, "--out", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_run_on_text_has_no_prompts_to_learn_from(tmp_path, capsys):
    assert main(["train-drafter", "preset:tiny", "--out", str(tmp_path / "out")]) == 2
    assert "prompts.source" in capsys.readouterr().err
