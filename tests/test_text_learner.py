"""Tests the drafter of a run on text: the run is that without it; it learns, is saved and exported."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.rl_nodes import records, weights
from kit.text_nodes import config_of, run, train_in_windows, wait_after_steps
from kit.tiny_policies import policy
from transformers import AutoModelForCausalLM

from aedit.edit import Shards
from aedit.launch.cli.export import drafter_of_run, export
from aedit.launch.config import Placement, to_toml
from aedit.launch.node import text_learner
from aedit.launch.node.text_learner import MAX_SHARE, SAMPLES, TextLearner
from aedit.launch.processes import measure
from aedit.launch.records import read_run
from aedit.launch.views.run_report import report
from aedit.spec_rollout.drafters import DraftLayer, load_drafter, trained_steps
from aedit.types import UserError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return configuration and node of a run with a drafter, and the node of the same run without one."""
    with pytest.MonkeyPatch.context() as patch:
        train_in_windows(patch)
        patch.setattr(text_learner, "MAX_SHARE", 1.0)
        patch.setattr(text_learner, "SAMPLES", 32)
        config = config_of(tmp_path_factory.mktemp("with"), drafter__train=True)
        node = run(config, wait_after_steps)
    (directory(config) / "run.toml").write_text(to_toml(config))
    return config, node, run(config_of(tmp_path_factory.mktemp("without")))


def directory(config):
    return Path(config.dir) / config.name


def file_of(config):
    return directory(config) / "nodes" / "0" / "drafter.safetensors"


def test_the_weights_and_losses_are_bit_for_bit_those_of_the_run_without_a_drafter(runs):
    config, node, plain = runs
    ours, theirs = weights(node), weights(plain)
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    assert any(value.abs().sum() for value in ours.values())
    lines = [
        [(each["step"], each["loss"]) for each in records(c, "events") if each["event"] == "eval"]
        for c in (config, plain.config)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 3
    assert node.sync.idle is None
    assert plain.objective.learner is None


def test_the_drafter_learns_in_the_waits_and_is_saved_with_its_steps(runs):
    config, node, _ = runs
    trainer = node.objective.learner.online._trainer
    assert trainer.published
    saved = DraftLayer.load(file_of(config), node.sync.model)
    assert all(value.equal(trainer.published[-1][name]) for name, value in saved.state_dict().items())
    assert trained_steps(file_of(config)) == trainer.steps > 0
    last = records(config, "metrics")[-1]
    assert last["drafter"]["steps"] == trainer.steps
    assert last["drafter"]["published"] == len(trainer.published)
    assert 1 < last["drafter"]["accepted_length"] < 5
    assert last["idle_used_s"] == trainer.used_s > 0
    assert read_run(directory(config)).nodes[0].metrics[-1].drafter == last["drafter"]
    shown = " ".join(report(directory(config)).split())
    assert f"{trainer.steps} steps of training in waits, {len(trainer.published)} published" in shown


def test_an_export_has_the_drafter(runs, tmp_path):
    config, node, _ = runs
    export(directory(config), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layer = load_drafter(tmp_path / "out" / "drafter", model)
    in_use = node.objective.learner.online.tensors()
    assert all(value.equal(in_use[name]) for name, value in layer.state_dict().items())


def test_a_resumed_run_goes_on_with_its_drafter_and_its_steps(runs, monkeypatch):
    config, node, _ = runs
    train_in_windows(monkeypatch)
    found = []

    def look(resumed):
        found.append((resumed.objective.learner.online.tensors(), resumed.objective.learner.steps_before))

    run(replace(config, train=replace(config.train, steps=25)), look, attempt=2)
    ((tensors, steps),) = found
    in_use = node.objective.learner.online.tensors()
    assert all(value.equal(in_use[name]) for name, value in tensors.items())
    assert steps == trained_steps(file_of(config))


def test_the_most_trained_drafter_of_a_run_is_exported(tmp_path):
    model = policy()
    for number, steps in enumerate((5, 30, 0)):
        file = tmp_path / "nodes" / str(number) / "drafter.safetensors"
        file.parent.mkdir(parents=True)
        DraftLayer.of(model).save(file, steps=steps)
    assert drafter_of_run(tmp_path) == tmp_path / "nodes" / "1" / "drafter.safetensors"


@pytest.mark.parametrize("collect_s", [0.0, 0.001, 0.05, 3.0])
def test_collecting_takes_at_most_its_share_and_begins_a_version_after_enough_passes(collect_s):
    """Each pass takes a second; the first one may exceed the share, as its cost is not known before."""
    now, versions, collected = [0.0], [], []

    def spend(seconds):
        now[0] += seconds

    features = SimpleNamespace(
        collecting=lambda model, texts, version: collected.append(version) or nullcontext(),
        write=lambda: spend(collect_s) if collected and learner._collects else None,
    )
    learner = TextLearner(
        policy=SimpleNamespace(update=versions.append),
        online=SimpleNamespace(after_update=lambda: None),
        features=features,
        watch=None,
        shards=Shards(),
        clock=lambda: now[0],
        directory=None,
    )
    for _ in range(400):
        learner.begin_step()
        with learner.collecting(None, torch.zeros(2, 3, dtype=torch.int64)):
            spend(1.0)
        learner.write()
    cost_s = now[0] - 400
    assert cost_s <= MAX_SHARE * now[0] + collect_s
    assert cost_s >= min(400 * collect_s, MAX_SHARE * now[0]) * 0.999
    assert collected == [1 + 2 * number // SAMPLES for number in range(len(collected))]
    assert versions == sorted({*collected})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model__family": "gpt2", "model__sizes": {"n_embd": 32, "n_layer": 1, "n_head": 2}},
            "must be one of",
        ),
        ({"drafter__form": "eagle3"}, "must be 3 or more"),
    ],
)
def test_a_model_without_a_draft_layer_is_refused_in_one_line(tmp_path, keys, message):
    config = config_of(tmp_path, drafter__train=True, **keys)
    with pytest.raises(UserError, match=message) as said:
        run(config)
    assert re.match(r"drafter\.(train|form) = ", str(said.value))
    assert "\n" not in str(said.value)
    with pytest.raises(UserError, match=message):  # in a dry run too
        measure(config, Placement())


@pytest.mark.slow  # two trainers load torch
def test_a_fast_node_trains_its_drafter_while_it_waits_and_the_weights_stay_the_same(world, tmp_path):
    """The slow node takes its last step once the other's trainer has published."""
    found = []
    for name, train in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        args = {"directory": tmp_path / name, "keys": {"drafter__train": train}}
        found.append(world.run("tests/dist_jobs/text_learner_jobs.py", "two_nodes", size=2, args=args))
    ours, theirs = found
    for (own, losses, _), (plain, plain_losses, nothing) in zip(ours, theirs, strict=True):
        assert losses == plain_losses
        assert all(value.equal(plain[name]) for name, value in own.items())
        assert nothing is None
    fast = ours[0][2]
    assert fast["published"] > 0
    assert fast["used_s"] > 0
    assert fast["idle_by_cause_s"]["round"] > 0
    assert drafter_of_run(tmp_path / "with" / "run") == file_of(config_of(tmp_path / "with"))
