"""Tests the learned drafter of a reinforcement-learning node: records, file, resume, and equal results."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from kit.rl_nodes import config_of, records, run, weights
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from aedit.launch.config import DrafterConfig
from aedit.launch.data import load_tokenizer
from aedit.launch.node import saved_layer
from aedit.launch.node.rl_engine import (
    TrainerWatch,
    hand_drafter,
    make_helper_engine,
    make_online,
    pretrained_layer,
)
from aedit.spec_rollout import make_target
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, parse_arm
from aedit.spec_rollout.training import TrainedPolicy
from aedit.types import UserError

FILE = "drafter.safetensors"


def node_folder(config):
    return Path(config.dir) / config.name / "nodes" / "0"


def drafting(arm):
    """Return what makes a node use this arm in each step."""

    def force(node):
        node.objective.stream.pipeline.source.engine.chooser = Fixed(parse_arm(arm))

    return force


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return configuration and node of a run that drafts with a layer."""
    config = config_of(
        tmp_path_factory.mktemp("drafter"), drafter__kind="layer", train__steps=2, checkpoint__every=0
    )
    return config, run(config, drafting("layer:3"))


def test_a_run_records_its_drafter_and_ends_its_trainer(first):
    config, node = first
    last = records(config, "metrics")[-1]["rl"]
    assert last["arms"].keys() <= {"layer:3", "off"}
    assert last["drafter"].keys() == {
        "steps", "published", "adopted", "refused", "accepted_length", "version", "starved",
        "rests",
    }  # fmt: skip
    accepted = last["drafter"]["accepted_length"]
    assert accepted is None or accepted >= 1, "an untrained drafter is not tried"
    assert node.sync.idle is None
    unit = node.sync.units[-1]
    assert unit.name == "drafter"
    tensors = node.objective.online.tensors()
    assert dict(zip(unit.names, [p.shape for p in unit.params], strict=True)) == {
        f"drafter.{name}": tensor.shape for name, tensor in tensors.items()
    }
    started = [
        child
        for child in psutil.Process().children(recursive=True)
        if "trainer_process" in str(child.cmdline())
    ]
    assert started == []


def test_a_drafter_learns_from_all_rollouts_and_the_engine_pays_nothing_for_it(first):
    config, node = first
    trained = records(config, "metrics")[-1]["rl"]["rollouts"]
    assert node.objective.online.sink.ring.status()["begun"] == trained > 0
    assert node.objective.stream.pipeline.source.engine.sink is None


def test_the_drafter_is_saved_beside_the_checkpoints_and_a_resume_continues_with_it(first):
    config, node = first
    saved = load_file(node_folder(config) / FILE)
    tensors = node.objective.online.tensors()
    assert saved.keys() == tensors.keys()
    assert all(saved[name].equal(value) for name, value in tensors.items())
    other = DraftLayer.of(node.sync.model, generator=torch.Generator().manual_seed(9))
    other.save(node_folder(config) / FILE)
    found = []
    resumed = run(config, lambda node: found.append(node.objective.online.state()), attempt=2)
    assert resumed.sync.steps == node.sync.steps
    assert all(found[0][f"layer.{name}"].equal(value) for name, value in other.state_dict().items())


def test_a_damaged_file_of_a_drafter_costs_its_training_only(first, capsys, tmp_path):
    _, node = first
    (tmp_path / FILE).write_bytes(b"damaged")
    assert saved_layer(tmp_path / FILE, TrainedPolicy(node.sync.model)) is None
    assert capsys.readouterr().err.startswith("aedit: the drafter begins anew: ")


def test_a_run_begins_with_a_given_drafter_which_has_passed_a_gate_before(first, tmp_path):
    _, node = first
    given = DraftLayer.of(node.sync.model, generator=torch.Generator().manual_seed(9))
    given.save(tmp_path / "given.safetensors")
    keys = {"drafter__kind": "layer", "train__steps": 1, "checkpoint__every": 0}
    config = config_of(tmp_path, drafter__pretrained=str(tmp_path / "given.safetensors"), **keys)
    seen = []

    def look(node):
        seen.append((node.objective.online.is_trained, node.objective.online.tensors()))

    run(config, look)
    ((is_trained, tensors),) = seen
    assert is_trained
    assert all(tensors[name].equal(value) for name, value in given.state_dict().items())


@pytest.mark.parametrize(("content", "form", "reason"), [
    (b"damaged", "own", "no usable drafter there"),
    (None, "own", "no usable drafter there"),
    ("layer", "eagle3", 'its tensors are not those of drafter.form = "eagle3"'),
])  # fmt: skip
def test_a_given_drafter_that_cannot_be_used_is_refused_by_name(first, tmp_path, content, form, reason):
    _, node = first
    path = tmp_path / "given.safetensors"
    if content == "layer":
        DraftLayer.of(node.sync.model).save(path)
    elif content is not None:
        path.write_bytes(content)
    config = replace(config_of(tmp_path).drafter, kind="layer", form=form, pretrained=str(path))
    policy = TrainedPolicy(deeper(node.sync.model) if form == "eagle3" else node.sync.model)
    with pytest.raises(
        UserError, match=re.escape(f"drafter.pretrained = '{path}'") + ".*" + re.escape(reason)
    ):
        pretrained_layer(config, policy)


def deeper(model):
    """Return a model of three layers, as EAGLE-3 needs, of the same sizes."""
    return LlamaForCausalLM(LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": 3}))


def test_the_engine_for_other_nodes_drafts_with_the_layer_of_its_rank(tmp_path):
    config = config_of(tmp_path, drafter__kind="layer", train__steps=1, checkpoint__every=0)
    seen = []

    def look(node):
        online, own = node.objective.online, node.objective.stream.pipeline.source.engine
        parts = SimpleNamespace(config=config, tokenizer=load_tokenizer(config.data))
        engine = make_helper_engine(parts, own.target, online)
        ours, theirs = own.drafters["layer"], engine.drafters["layer"]
        for layer in (None, DraftLayer.of(node.sync.model, generator=torch.Generator().manual_seed(9))):
            if layer is not None:
                online._use(layer.state_dict())
            hand_drafter(online, engine)
            weights = ours._runner._weights
            equal = all(torch.equal(w, theirs._runner._weights[name]) for name, w in weights.items())
            seen.append((ours.version, theirs.version, equal))

    run(config, look)
    assert seen == [(-1, -1, True), (1, 1, True)]


def test_the_digest_of_the_rollouts_is_equal_exactly_if_they_are(tmp_path):
    keys = {"drafter__kind": "off", "train__steps": 2, "checkpoint__every": 0}
    runs = [config_of(tmp_path / name, seed=seed, **keys) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    for config in runs:
        run(config)
    one, again, other = (records(config, "metrics")[-1]["rl"]["digest"] for config in runs)
    assert one == again != other
    assert one > 0


def test_a_drafter_that_changes_after_each_step_of_the_engine_changes_no_weight(tmp_path):
    keys = {"rl__engine_dtype": "fp64", "train__steps": 3, "checkpoint__every": 0}
    plain = run(config_of(tmp_path / "plain", drafter__kind="off", **keys))
    changes = []

    def force(node):
        drafting("layer:3x2x5")(node)
        online = node.objective.online

        def adopt():
            changes.append(len(changes))
            layer = DraftLayer.of(node.sync.model, generator=torch.Generator().manual_seed(len(changes)))
            online.load_state(online.state() | {f"layer.{n}": t for n, t in layer.state_dict().items()})
            return True

        online.adopt = adopt

    changed = run(config_of(tmp_path / "changed", drafter__kind="layer", **keys), force)
    assert len(changes) > 10
    assert all(torch.equal(value, weights(changed)[name]) for name, value in weights(plain).items())


@pytest.mark.parametrize("kind", ["layer", "auto", "suffix", "off"])
def test_a_policy_without_a_draft_layer_is_refused_by_name_only_if_asked_for(tmp_path, kind):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    parts = SimpleNamespace(
        config=config_of(tmp_path, drafter__kind=kind),
        recorder=SimpleNamespace(directory=tmp_path),
        world=SimpleNamespace(rank=0),
    )
    refused = pytest.raises(UserError, match=r'drafter\.kind = "layer": .*model_type')
    with refused if kind == "layer" else nullcontext():
        assert make_online(parts, make_target(model, rows=2, max_tokens=16)) is None


@pytest.mark.parametrize(("priority", "remedy"), [("idle", "set drafter.priority"), ("normal", "processors")])
def test_a_trainer_without_processor_time_is_reported_once_until_it_gets_some(priority, remedy):
    events = []
    status = {"allowed_s": 0.0, "cpu_s": 0.0, "has_work": True}
    watch = TrainerWatch.of(
        SimpleNamespace(status=lambda: status),
        lambda name, **fields: events.append((name, fields)),
        DrafterConfig(priority=priority),
    )

    def go_on(share, seconds=100, *, has_work=True):
        for _ in range(seconds):
            status.update(allowed_s=status["allowed_s"] + 1, cpu_s=status["cpu_s"] + share, has_work=has_work)
            watch.report()

    go_on(0.5)
    go_on(0.0, has_work=False)
    go_on(0.05, 40)
    assert (events, watch.starved) == ([], False)
    go_on(0.05, 90)
    ((name, fields),) = events
    assert name == "drafter_trainer_starved"
    assert fields["used_s"] < 0.1 * fields["allowed_s"] <= 7
    assert remedy in fields["remedy"]
    assert watch.starved
    go_on(0.5, 130)
    assert not watch.starved
    go_on(0.0, 200)
    assert [name for name, _ in events] == ["drafter_trainer_starved"] * 2
