"""Tests that a run's drafter is exported with the model, and that `aedit generate` drafts with it."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from dist_jobs.export_jobs import train_and_save
from kit.full_disk import small_files
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aedit.launch.cli import main
from aedit.launch.node import Mark
from aedit.launch.node.rl_engine import save_drafter
from aedit.spec_rollout.drafters import DraftLayer, Eagle3Layer, read_speculator

RUN = """
[model]
sizes = { hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
seq_len = 64
"""
WORDS = ("--prompt", "xyz", "--max-new-tokens", "12", "--arm", "layer:3")


def a_run(path, drafter=True):
    """Return a run directory with a checkpoint and, if asked for, a drafter."""
    path.mkdir(parents=True)
    (path / "run.toml").write_text(RUN)
    train_and_save(path, node=0, mark=Mark(1))
    if drafter:
        config = AutoModelForCausalLM.from_config(_config(path)).config
        layer = DraftLayer.of(config, generator=torch.Generator().manual_seed(4))
        layer.save(path / "nodes" / "0" / "drafter.safetensors")
    return path


def _config(path):
    from aedit.launch.cli.export import load_run_model

    return load_run_model(path)[0].config


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a run with a drafter and its exported model."""
    place = tmp_path_factory.mktemp("drafter")
    run = a_run(place / "run")
    assert main(["export", str(run), str(place / "out")]) == 0
    return run, place / "out"


def said(capsys, *words):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_an_exported_model_has_the_newest_drafter_of_its_run(exported):
    run, out = exported
    tensors = load_file(run / "nodes" / "0" / "drafter.safetensors")
    found = load_file(out / "drafter" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(value) for name, value in tensors.items())
    model = AutoModelForCausalLM.from_pretrained(out)
    sizes = json.loads((out / "drafter" / "config.json").read_text())
    assert sizes["hidden_size"] == model.config.hidden_size
    assert sizes["vocabulary"] == model.config.vocab_size
    modes = {path.stat().st_mode for path in out.rglob("*.*")}
    assert len(modes) == 1


@pytest.mark.parametrize("place", ["run", "model"])
def test_generate_drafts_with_the_drafter_of_its_policy_and_says_so(capsys, exported, place):
    run, out = exported
    source = run if place == "run" else out
    code, text, err = said(capsys, "generate", source, *WORDS, "--compare")
    assert code == 0
    assert "tokens equal: yes" in text
    assert re.search(r"arms: layer:3 \d+ %", text)
    file = run / "nodes" / "0" / "drafter.safetensors" if place == "run" else out / "drafter"
    assert f"aedit: {source}: drafts with {file}\n" in err


def test_without_a_layer_arm_or_with_none_the_drafter_is_not_read(capsys, exported, tmp_path):
    copy = shutil.copytree(exported[1], tmp_path / "copy")
    (copy / "drafter" / "model.safetensors").write_bytes(b"damaged")
    for words in (("--arm", "off"), ("--arm", "suffix:4"), ("--drafter", "none")):
        code, _, err = said(capsys, "generate", copy, "--prompt", "x", "--max-new-tokens", "4", *words)
        assert code == 0
        assert "drafts with" not in err


DAMAGES = {
    "weights": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 40),
    "half of the weights": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-100]
    ),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "configuration": lambda folder: (folder / "config.json").write_text("{"),
    "another configuration": lambda folder: (folder / "config.json").write_text('{"taps": 0}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_drafter_is_one_line_and_exit_code_2(capsys, exported, tmp_path, damage):
    copy = shutil.copytree(exported[1], tmp_path / "copy")
    DAMAGES[damage](copy / "drafter")
    for words in ((), ("--drafter", copy / "drafter")):
        code, out, err = said(capsys, "generate", copy, *WORDS, *words)
        assert (code, out) == (2, "")
        assert err.startswith("aedit: ")
        assert err.count("\n") == 1
        assert "drafter" in err


def test_a_run_with_a_damaged_drafter_is_not_exported_silently(capsys, exported, tmp_path):
    run = shutil.copytree(exported[0], tmp_path / "run")
    file = run / "nodes" / "0" / "drafter.safetensors"
    file.write_bytes(b"damaged")
    code, _, err = said(capsys, "export", run, tmp_path / "out")
    assert code == 2
    assert err.count("\n") == 1
    assert f"remove {file} to export the model alone" in err
    assert not (tmp_path / "out").exists()
    file.unlink()
    assert said(capsys, "export", run, tmp_path / "out")[0] == 0
    assert not (tmp_path / "out" / "drafter").exists()


def test_on_a_full_disk_a_run_keeps_its_older_drafter_and_goes_on(capsys, exported, tmp_path):
    """Found: safetensors raises an error of its own, which ended the node."""
    layer = DraftLayer.load(exported[0] / "nodes" / "0" / "drafter.safetensors", _config(exported[0]))
    (tmp_path / "drafter.safetensors").write_text("older")
    with small_files(1 << 14):
        save_drafter(SimpleNamespace(layer=layer), tmp_path)
    found = f"aedit: {tmp_path / 'drafter.safetensors'} was not written: .*File too large.*\n"
    assert re.fullmatch(found, capsys.readouterr().err)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_on_a_full_disk_an_export_is_one_line_and_exit_code_2(capsys, exported, tmp_path):
    with small_files(1 << 14):
        code, _, err = said(capsys, "export", exported[0], tmp_path / "out")
    assert code == 2
    assert re.fullmatch(f"aedit: {tmp_path / 'out'}: cannot be written: .*File too large.*\n", err)
    assert not list(tmp_path.iterdir())


def test_a_drafter_of_a_policy_of_other_sizes_is_refused(capsys, exported, tmp_path):
    copy = shutil.copytree(exported[1], tmp_path / "copy")
    config = AutoModelForCausalLM.from_pretrained(copy).config
    config.intermediate_size = 24
    DraftLayer.of(config).save(copy / "drafter" / "model.safetensors")
    code, _, err = said(capsys, "generate", copy, *WORDS)
    assert code == 2
    assert "saved for a policy of other sizes: intermediate_size 24, not 48" in err


def test_a_drafter_of_eagle_3_is_exported_as_other_engines_load_it(tmp_path, capsys):
    run = a_run(tmp_path / "run", drafter=False)
    text = RUN.replace("num_hidden_layers = 2", "num_hidden_layers = 3")
    shutil.rmtree(run)
    run.mkdir()
    (run / "run.toml").write_text(text)
    train_and_save(run, node=0, mark=Mark(1))
    code, _, err = said(capsys, "export", run, tmp_path / "none", "--drafter")
    assert code == 2
    assert 'has none; train with drafter.form = "eagle3"' in err
    model = AutoModelForCausalLM.from_config(_config(run))
    layer = Eagle3Layer.for_policy(model, draft_tokens=range(40))
    layer.save(run / "nodes" / "0" / "drafter.safetensors")
    code, _, err = said(capsys, "export", run, tmp_path / "out", "--drafter")
    assert (code, err) == (0, "")
    config = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "out")
    found = read_speculator(tmp_path / "out" / "drafter", model.config)
    assert found.shape == layer.shape
    assert all(torch.equal(found.state_dict()[n], value) for n, value in layer.state_dict().items())
    code, text, _ = said(capsys, "generate", tmp_path / "out", *WORDS, "--compare")
    assert code == 0
    assert "tokens equal: yes" in text
    assert re.search(r"arms: layer:3 \d+ %", text)
