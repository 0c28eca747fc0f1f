"""Tests that an online drafter trains in windows, takes only what is better, and never changes a token."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from kit import trainers
from kit.tiny_policies import drafter, ends, policy

from aedit.spec_rollout import Engine, OnlineConfig, OnlineDrafter, Prompt, Sampling, make_target
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, parse_arm
from aedit.spec_rollout.training import (
    DraftTrainer,
    DraftTrainingConfig,
    IdleConfig,
    LearningConfig,
    TrainedPolicy,
)
from aedit.spec_rollout.training.batches import is_held_out_entry

LEARNING = LearningConfig(
    training=DraftTrainingConfig(lr=2e-3, warmup_steps=5, batch_pairs=512),
    evaluate_every_steps=8,
    evaluation_depth=2,
)
MEMORY_BYTES = 2**20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def prompts(count=16, length=24, temperature=1.0):
    sampling = Sampling(max_new_tokens=length, temperature=temperature)
    return [Prompt(tokens=(i, i + 1, i + 2), rollout=i, sampling=sampling) for i in range(count)]


def tokens(rollouts):
    return {rollout.prompt.rollout: rollout.tokens for rollout in rollouts}


def plain(model, asked):
    return tokens(Engine.of(model, rows=4, max_tokens=64).generate(asked))


def online_of(model, *, train=False, **more):
    """Return an online drafter and an engine that uses it in each step."""
    target = make_target(model, rows=4, max_tokens=64)
    idle = IdleConfig(niceness=0, restarts=trainers.AT_ONCE)  # so that tests end on a busy machine
    config = OnlineConfig(learning=LEARNING, idle=idle, memory_bytes=MEMORY_BYTES, max_share=1.0, train=train)
    online = OnlineDrafter.of(target, config=config, **more)
    arm = Fixed(parse_arm(more.pop("arm", "layer:3")))
    engine = Engine(target, drafters={"layer": online.drafter}, chooser=arm)
    engine.sink = online.sink
    return online, engine


def layer_with(model, change):
    layer = drafter(model)
    with torch.no_grad():
        for value in layer.parameters():
            value.copy_(change(value))
    return layer


POISONS = {
    "nan": lambda value: torch.full_like(value, torch.nan),
    "infinite": lambda value: torch.full_like(value, -torch.inf),
    "zeros": torch.zeros_like,
    "huge": lambda value: 1e200 * value,
    "opposite": lambda value: -value,
}


@pytest.fixture(scope="module")
def better():
    """Return tensors of a drafter that has learned from samples that are not held out."""
    model = policy()
    online, engine = online_of(model)
    list(engine.generate(prompts(32)))
    reader = online._gate._reader
    samples = [reader.read(entry) for entry in reader.entries() if not is_held_out_entry(entry)]
    layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(0))
    trainer = DraftTrainer(layer, LEARNING.training)
    for _ in range(25):
        trainer.step(samples, ends(model, version=0))
    return trainer.layer.state_dict()


def test_a_new_drafter_after_any_step_changes_no_token():
    model, asked = policy(), prompts()
    expected = plain(model, asked)
    online, engine = online_of(model)
    rollouts = [engine.add(prompt) for prompt in asked]
    steps = 0
    while engine.running or engine.waiting:
        engine.step()
        steps += 1
        online.load_state({**online.state(), **_as_state(drafter(model, seed=steps))})
        online.adopt()
    assert steps > 30
    assert tokens(rollouts) == expected
    assert online.drafter.version == steps


def _as_state(layer):
    return {f"layer.{name}": value for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("arm", ["layer:3", "layer:3x2x5"])
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_drafter_changes_no_token(poison, arm):
    """The gate is bypassed: the weights are those that an attacker would like."""
    model, asked = policy(), prompts(6, 12)
    online, engine = online_of(model)
    engine.chooser = Fixed(parse_arm(arm))
    online.drafter.replace(layer_with(model, POISONS[poison]), 1)
    assert tokens(engine.generate(asked)) == plain(model, asked)


@pytest.mark.parametrize("poison", POISONS)
def test_the_gate_refuses_a_poisoned_drafter_of_another_node(poison, better):
    model = policy()
    online, engine = online_of(model)
    list(engine.generate(prompts(16)))
    online.load_state({**online.state(), **{f"layer.{name}": value for name, value in better.items()}})
    before = {name: value.clone() for name, value in online.tensors().items()}
    online.take_shared(layer_with(model, POISONS[poison]).state_dict())
    assert not online.adopt()
    assert online.status()["refused"] == 1
    assert all(value.equal(before[name]) for name, value in online.tensors().items())


def test_of_drafters_of_other_nodes_the_better_is_taken_and_the_worse_refused(better):
    model = policy()
    online, engine = online_of(model)
    list(engine.generate(prompts(16)))
    beginner = {name: value.clone() for name, value in online.tensors().items()}
    online.take_shared(better)
    assert online.adopt()
    assert all(value.equal(better[name]) for name, value in online.tensors().items())
    online.take_shared(beginner)
    assert not online.adopt()
    assert all(value.equal(better[name]) for name, value in online.tensors().items())
    online.take_shared(better)
    assert online.adopt(), "equal is not worse"
    assert (online.status()["adopted"], online.status()["refused"]) == (2, 1)


def test_a_node_that_never_trained_takes_a_good_drafter_with_the_first_samples(better):
    """None of its four samples is held out of training, which it does not do."""
    model = policy()
    online, engine = online_of(model, train=False)
    list(engine.generate(prompts(4)))
    entries = online._gate._reader.entries()
    kept = [entry for entry in entries if not is_held_out_entry(entry)]
    online._gate._reader.entries = lambda: kept
    online.take_shared(layer_with(model, POISONS["huge"]).state_dict())
    assert not online.adopt(), "it predicts nothing finite"
    online.take_shared(better)
    assert online.adopt()
    online.take_shared(better)
    assert not online.adopt(), "now it is compared on held-out samples, of which there are none"


def test_a_drafter_of_another_node_waits_for_samples():
    model = policy()
    online, engine = online_of(model)
    online.take_shared(drafter(model).state_dict())
    assert not online.adopt()
    engine.update_weights({name: 1.01 * value for name, value in model.state_dict().items()}, 7)
    online.after_update()
    list(engine.generate(prompts(16)))
    verdict = online.adopt()
    assert online.status()["adopted"] + online.status()["refused"] == 1
    assert verdict == (online.status()["adopted"] == 1)


def test_other_names_or_shapes_are_refused_without_an_error():
    model = policy()
    online, _ = online_of(model)
    good = drafter(model).state_dict()
    online.take_shared({**good, "extra": torch.zeros(2)})
    online.take_shared({name: value[:1] for name, value in good.items()})
    assert online.status()["refused"] == 2
    assert online._shared is None


def test_a_state_continues_in_another_process_with_the_same_bits():
    model = policy()
    first, _ = online_of(model, layer=drafter(model, seed=5))
    state = first.state()
    second, engine = online_of(model)
    second.load_state(state)
    assert second.state().keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in second.tensors().items() if name in state)
    assert all(second.state()[name].equal(t) for name, t in state.items() if name != "counts")
    asked = prompts(4)
    assert tokens(engine.generate(asked)) == plain(model, asked)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("counts"),
        lambda state: state.pop("layer.gain"),
        lambda state: state.update({"layer.gain": torch.ones(3)}),
        lambda state: state["layer.gain"].fill_(torch.nan),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    model = policy()
    online, _ = online_of(model)
    before, damaged = online.state(), online.state()
    change(damaged)
    with pytest.raises(ValueError, match=r"draft"):
        online.load_state(damaged)
    assert all(online.state()[name].equal(value) for name, value in before.items())


def test_without_training_the_waits_are_measured_by_cause():
    online, _ = online_of(policy())
    with online.window("hub"), online.window("rank"):
        pass
    status = online.status()
    assert status["idle_by_cause_s"].keys() == {"hub", "rank"}
    assert (status["windows"], status["state"], online.used_s) == (2, "off", 0.0)


def test_a_policy_without_an_engine_has_a_drafter_too():
    model = policy("qwen3", torch.float32)
    trained_policy = TrainedPolicy(model)
    config = OnlineConfig(memory_bytes=MEMORY_BYTES, train=False)
    online = OnlineDrafter.of(trained_policy, config=config)
    assert online.drafter is None
    trained_policy.version = 3
    online.after_update()
    assert not online.adopt()
    assert online.sink.ring.shape.width == model.config.hidden_size


def cpu_s(pid):
    """Return the processor time of a process by the kernel's account, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@on_linux
def test_a_trainer_in_windows_publishes_and_its_death_stops_nothing(tmp_path):
    model, asked = policy(), prompts(32)
    expected = plain(model, asked)
    online, engine = online_of(model, train=True, checkpoint=tmp_path / "training")
    with online:
        assert tokens(engine.generate(asked)) == expected
        trainers.until(lambda: online.status()["pid"] is not None, online)
        began_s = cpu_s(online.status()["pid"])
        with online.window("rollouts"):
            trainers.until(lambda: online.status()["published"] >= 1, online)
        trainers.until(lambda: trainers.is_stopped(online), online)
        pid = online.status()["pid"]
        assert cpu_s(pid) - began_s == pytest.approx(online.used_s, abs=0.3)
        assert online.adopt()
        assert not online.adopt()
        assert tokens(engine.generate(asked)) == expected
        engine.update_weights({name: 1.01 * value for name, value in model.state_dict().items()}, 1)
        online.after_update()
        other = plain(model, asked)
        used_s, adopted = online.used_s, online.state()
        os.kill(pid, signal.SIGKILL)
        with online.window("round"):
            trainers.until(lambda: online.status()["deaths"] == 1, online)
            online.adopt()
            trainers.until(lambda: online.status()["pid"] not in (None, pid), online)
        assert tokens(engine.generate(asked)) == other
        assert online.used_s >= used_s
        assert online.state()["layer.gain"].equal(adopted["layer.gain"])
        assert online.status()["idle_by_cause_s"].keys() == {"rollouts", "round"}
    assert not Path(f"/proc/{pid}").exists()


def test_an_untrained_drafter_is_never_tried_and_one_that_passed_a_gate_is(better):
    model = policy()
    online, engine = online_of(model)
    engine.chooser = Fixed(parse_arm("layer:3"))
    list(engine.generate(prompts(32)))
    assert set(engine.meters.arms) == {"off"}
    assert (online.is_trained, online.shared_steps) == (False, 0)
    online.load_state({**online.state(), **{f"layer.{name}": t for name, t in online.tensors().items()}})
    assert not online.is_trained, "a resumed attempt has not trained it either"
    online.take_shared(better)
    assert online.adopt()
    list(engine.generate(prompts(32)))
    assert engine.meters.arms["layer:3"] > 0


def test_while_drafts_can_gain_nothing_no_features_are_collected_and_windows_do_not_train():
    model = policy()
    online, engine = online_of(model)
    online.can_gain = False
    list(engine.generate(prompts(4)))
    online.after_update()
    with online.window("round"):
        assert online._trainer.status().get("paused", True)
    assert online.sink.status()["samples"] == 0
    online.can_gain = True
    list(engine.generate(prompts(4)))
    assert online.sink.status()["samples"] > 0
