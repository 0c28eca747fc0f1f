"""Tests that a configuration key without effect is an error that names the key and the remedy."""

import re
from pathlib import Path

import pytest

from aedit.launch.config import RunConfig, hints, load, to_toml
from aedit.launch.config.checks import RULES, without_effect
from aedit.types import UserError

HUB = '[hub]\naddress = "h:1"\n'
SERVED = '[prompts]\nsource = "a.jsonl"\n[rl]\nservers = "h:1"\n'
AVERAGES = '[edit]\nschedule = "seconds"\n[swarm]\ndiscovery = "hivemind"\nexchange = "hivemind"\n'
USELESS = {
    "edit.prefetch": '[edit]\nlanding = "arrival"\nprefetch = 2\n',
    "edit.fragments": '[edit]\nwarmup_steps = "all"\nfragments = 4\n',
    "outer.lr": '[edit]\nwarmup_steps = "all"\n[outer]\nlr = 0.8\n',
    "hub.merge": HUB + 'grace = 0.0\nmerge = "trimmed"\n',
    "hub.merge_cut": HUB + 'quorum = "all"\nmerge_cut = 0.2\n',
    "hub.grace": HUB + 'quorum = "all"\ngrace = 0.25\n',
    "hub.grace_cap_s": HUB + 'quorum = "all"\ngrace_cap_s = 1.0\n',
    "edit.penalty.step_weight": HUB + 'weights = "steps"\n[edit.penalty]\nstep_weight = 0.5\n',
    "edit.penalty.weights": HUB + 'weights = "uniform"\n[edit.penalty]\nweights = "paper"\n',
    "edit.penalty.temperature": '[edit.penalty]\nweights = "uniform"\ntemperature = 2.0\n',
    "edit.penalty.patience": '[edit.penalty]\ndetector = "off"\npatience = 2\n',
    "edit.penalty.ema": "[edit.penalty]\nema = 0.1\n",
    "edit.penalty.window": '[edit.penalty]\ndetector = "ema"\nwindow = 8\n',
    "outer.momentum": '[outer]\nkind = "average"\nmomentum = 0.5\n',
    "outer.delay": "[outer]\ndelay = 8\n",
    "outer.correction": "[outer]\ncorrection = 0.5\n",
    "hub.staleness.power": HUB + '[hub.staleness]\nrule = "constant"\npower = 1.0\n',
    "hub.staleness.rate": HUB + "[hub.staleness]\nrate = 1.0\n",
    "checkpoint.time_share": "[checkpoint]\nevery = 2\ntime_share = 0.1\n",
    "serve.rows": "[serve]\nrows = 3\n",
    "swarm.parts": "[swarm]\nparts = 2\n",
    "swarm.averaging_s": '[swarm]\ndiscovery = "file"\naveraging_s = 20.0\n',
    "swarm.copies": AVERAGES + "copies = 2\n",
    "edit.penalty.threshold": AVERAGES + "[edit.penalty]\nthreshold = 4.0\n",
    "hub.parent_mix": HUB + "parent_mix = 0.5\n",
    "model.sizes.hidden_size": '[model]\npretrained = "x"\nsizes = { hidden_size = 3 }\n',
    "rl.groups": "[rl]\ngroups = 3\n",
    "reward.solved": "[reward]\nsolved = 0.5\n",
    "drafter.lr": "[drafter]\nlr = 0.5\n",
    "drafter.vocabulary": '[prompts]\nsource = "a.jsonl"\n[drafter]\nvocabulary = 5\n',
    "prompts.size": "[prompts]\nsize = 5\n",
    "data.held_out": '[prompts]\nsource = "a.jsonl"\n[data]\nheld_out = 0.1\n',
    "data.special_tokens": '[data]\nspecial_tokens = "none"\n',
    "data.split": '[data]\nsource = "a.txt"\nsplit = "test"\n',
    "train.eval_in_waits": "[train]\neval_every = 0\neval_in_waits = true\n",
    "train.accumulate": '[prompts]\nsource = "a.jsonl"\n[train]\naccumulate = 2\n',
    "prompts.split": '[prompts]\nsource = "a.jsonl"\nsplit = "test"\n',
    "rl.clip_low": '[prompts]\nsource = "a.jsonl"\n[rl]\nloss = "cispo"\nclip_low = 0.1\n',
    "rl.importance_cap": '[prompts]\nsource = "a.jsonl"\n[rl]\nimportance_cap = 4.0\n',
    "rl.old_logprobs": '[prompts]\nsource = "a.jsonl"\n[rl]\nimportance = "token"\n'
    'old_logprobs = "trainer"\n',
    "rl.supervised_lr": '[prompts]\nsource = "a.jsonl"\n[rl]\nsupervised_lr = 1e-2\n',
    "rl.server_silent_s": '[prompts]\nsource = "a.jsonl"\n[rl]\nserver_silent_s = 2.0\n',
    "rl.server_stalled_s": '[prompts]\nsource = "a.jsonl"\n[rl]\nserver_stalled_s = 9.0\n',
    "rl.on_new_version": SERVED + 'on_new_version = "finish"\n',
    "rollout.vllm.python": '[prompts]\nsource = "a.jsonl"\n[rollout.vllm]\npython = "p"\n',
    "rollout.vllm.choose": '[prompts]\nsource = "a.jsonl"\n[rl]\nengine = "vllm"\n[rollout.vllm]\n'
    'python = "p"\nchoose = false\n',
    "rollout.vllm.weights": '[prompts]\nsource = "a.jsonl"\n[rl]\nengine = "vllm"\n[rollout.vllm]\n'
    'python = "p"\nweights = "/w"\n',
    "drafter.kind": '[prompts]\nsource = "a.jsonl"\n[rl]\nengine = "vllm"\n[rollout.vllm]\npython = "p"\n'
    '[drafter]\nkind = "suffix"\n',
    "drafter.train": '[prompts]\nsource = "a.jsonl"\n[drafter]\ntrain = true\n',
    "audit.floor": '[prompts]\nsource = "a.jsonl"\n[audit]\nfloor = 0.01\n',
    "audit.rate": SERVED + "[audit]\non = false\nrate = 0.5\n",
    "audit.record_bytes": SERVED + "[audit]\nrecord_bytes = 4_000_000\n",
    "drafter.share": '[prompts]\nsource = "a.jsonl"\n[drafter]\nkind = "suffix"\nshare = false\n',
    "traces.ratio": "[traces]\nratio = 0.5\n",
}


def written(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", USELESS)
def test_a_key_without_effect_is_named_with_its_line_its_cause_and_the_remedy(tmp_path, name):
    path = written(tmp_path, USELESS[name])
    key = "sizes" if name.startswith("model.sizes") else name.rpartition(".")[2]
    lines = path.read_text().splitlines()
    line = max(n for n, text in enumerate(lines, 1) if text.startswith(f"{key} ="))
    with pytest.raises(UserError) as said:
        load(path, [], strict=True)
    cause = re.search(r"with ([\w.]+) = .*: remove .*, or set ([\w.]+) to ", str(said.value))
    place = path if name.startswith("model.sizes") else f"{path}:{line}"
    assert str(said.value).startswith(f"{place}: {name} has no effect with {cause[1]} = ")
    assert cause[1] == cause[2] in hints()
    assert load(path, []).config is not None, "what the program itself has written is not judged"


def test_without_the_useless_key_the_same_file_loads(tmp_path):
    for name, text in USELESS.items():
        key = "sizes" if name.startswith("model.sizes") else name.rpartition(".")[2]
        load(written(tmp_path, re.sub(rf"^{key} = .*\n", "", text, flags=re.M)), [], strict=True)


def test_every_rule_is_tried_and_names_keys_that_exist():
    known = set(hints())
    tried = set(USELESS)
    for disabled, cause, _, _ in RULES:
        assert cause in known
        keys = disabled.split()
        names = known | {"model.sizes.x", "prompts.options.x"}
        assert all(any(name.startswith(key) for name in names) for key in keys)
        assert any(name.startswith(key) for key in keys for name in tried), disabled


def test_a_flag_without_effect_is_an_error_and_a_flag_that_makes_a_key_useless_is_none(tmp_path):
    """A flag that overrides a value of a file may leave keys of the file without effect."""
    path = written(tmp_path, "[edit]\nprefetch = 3\n")
    assert load(path, ["--edit.landing", "arrival"], strict=True).config.edit.prefetch == 3
    above = written(tmp_path, '[edit]\nlanding = "arrival"\n', "above.toml")
    assert load([path, above], [], strict=True).config.edit.prefetch == 3
    with pytest.raises(UserError, match=r"flag: edit\.prefetch has no effect"):
        load(above, ["--edit.prefetch", "1"], strict=True)
    with pytest.raises(UserError, match=r"edit\.prefetch has no effect"):
        load([above, path], [], strict=True)


def test_what_the_program_writes_can_be_loaded_as_a_persons_file(tmp_path):
    for preset in sorted(Path("configs").glob("*.toml")):
        config = load(preset, [], strict=True).config
        path = written(tmp_path, to_toml(config))
        assert load(path, [], strict=True).config == config, preset


def test_all_keys_have_an_effect_in_some_configuration():
    """No rule rejects a key in every configuration: with its remedies applied, each key is accepted."""
    assert {cause for cause, _ in without_effect(RunConfig(), "edit.prefetch")} == set()
    assert {cause for cause, _ in without_effect(RunConfig(), "outer.delay")} == {"outer.kind"}
