"""Tests that a drafter learns from a node's ring, is judged on held-out samples, and is published if better.

Training runs in this process, and in a process of its own.
"""

import sys
from dataclasses import replace

import pytest
import torch
from kit import trainers
from kit.tiny_policies import ends, policy, said

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    GateConfig,
    IdleConfig,
    LayerTraining,
    LearningConfig,
    RingShape,
    held_out_match,
    pack_samples,
    policy_tensors,
    train_when_idle,
)
from aedit.spec_rollout.training.batches import is_held_out_entry

QUICK = LearningConfig(
    training=DraftTrainingConfig(lr=2e-3, warmup_steps=5, batch_pairs=512),
    evaluate_every_steps=8,
    evaluation_depth=2,
)


@pytest.fixture(scope="module")
def world():
    """Return a small policy and its samples of 64 prompts."""
    model = policy(dtype=torch.float32)
    prompts = torch.randint(48, (64, 4), generator=torch.Generator().manual_seed(0)).tolist()
    return model, said(model, prompts, 40)


def shape_of(model):
    return RingShape.within(2**20, model.config.hidden_size, torch.float32)


def write(ring, samples, version=1):
    for sample in samples:
        growing = ring.begin(int(sample.tokens_N[0]), sample.num_prompt, version)
        assert ring.append(growing, sample.tokens_N[1:], sample.features_MF)
        ring.end(growing, True)


def beginner(model):
    return DraftLayer.of(model, generator=torch.Generator().manual_seed(0))


def learning_of(model, samples, config=QUICK, **more):
    shape = shape_of(model)
    memory = bytearray(shape.num_bytes)
    learning = LayerTraining(beginner(model), memory, config, **more)
    learning.set_policy(policy_tensors(ends(model)), 1)
    learning.begin(beginner(model).state_dict())
    ring = FeatureRing(memory, shape)
    write(ring, samples)
    return learning, ring, memory


def published(learning, pieces):
    found = []
    for _ in range(pieces):
        learning.microbatch()
        better = learning.to_publish()
        if better is not None:
            found.append(better)
    return found


def test_what_is_published_is_better_on_samples_that_nobody_has_learned_from(world):
    model, _ = world
    prompts = torch.randint(48, (64, 4), generator=torch.Generator().manual_seed(1)).tolist()
    learning, _, memory = learning_of(model, said(model, prompts, 40))
    found = published(learning, 500)
    assert len(found) >= 2
    reader = FeatureReader(memory)
    apart = [reader.read(entry) for entry in reader.entries() if is_held_out_entry(entry)]
    rates = []
    for tensors in (beginner(model).state_dict(), found[0], found[-1]):
        layer = beginner(model)
        layer.load_state_dict(tensors)
        rates.append(held_out_match(layer, pack_samples(apart, 256), ends(model), 2).rate)
    assert rates == sorted(rates)
    assert rates[-1] > 1.2 * rates[0]
    assert learning.metrics()["match_published"] <= rates[-1] + 1e-6
    assert learning._uses.keys().isdisjoint(e.serial for e in reader.entries() if is_held_out_entry(e))


def test_the_average_is_what_is_compared_and_published(world):
    model, samples = world
    learning, _, memory = learning_of(model, samples)
    for _ in range(500):
        learning.microbatch()
        better = learning.to_publish()
        if better is not None:
            break
    average, layer = (each.state_dict() for each in (learning._trainer.averaged, learning._trainer.layer))
    assert all(torch.equal(better[name], value) for name, value in average.items())
    assert not torch.equal(better["down.weight"], layer["down.weight"])
    reader = FeatureReader(memory)
    apart = [reader.read(entry) for entry in reader.entries() if is_held_out_entry(entry)]
    match = held_out_match(learning._trainer.averaged, pack_samples(apart, 256), ends(model), 2)
    assert learning.metrics()["match_candidate"] == pytest.approx(match.rate, abs=1e-6)


def test_what_is_not_better_is_kept_back_and_learns_at_half_the_rate(world):
    model, samples = world
    config = LearningConfig(
        training=QUICK.training,
        gate=GateConfig(gain=2.0, harm=2.0, patience=100),
        evaluate_every_steps=2,
        evaluation_depth=1,
    )
    learning, _, _ = learning_of(model, samples, config)
    assert published(learning, 70) == []
    assert learning.metrics()["lr_factor"] == 1 / 16
    assert learning.metrics()["rejected"] > 3


NOTHING_IS_BETTER = LearningConfig(
    training=QUICK.training,
    gate=GateConfig(gain=2.0, harm=2.0, rest_versions=2),
    evaluate_every_steps=1,
    evaluation_depth=1,
)


def test_it_rests_while_policies_come_and_tries_again_after_ever_more_of_them(world):
    model, samples = world
    learning, _, _ = learning_of(model, samples, NOTHING_IS_BETTER)
    trained = []
    for version in range(1, 20):
        learning.set_policy(policy_tensors(ends(model)), version)
        before = learning.metrics().get("steps", 0)
        for _ in range(100):
            learning.microbatch()
        assert not any(learning.microbatch() for _ in range(10)), "it rests"
        assert learning.metrics()["rests"] == 1
        trained.append(learning.metrics()["steps"] > before)
    assert [version for version, has in enumerate(trained, 1) if has] == [1, 3, 7, 15]


def test_a_rest_ends_at_once_when_the_drafter_in_use_becomes_worse(world):
    model, samples = world
    learning, _, _ = learning_of(model, samples, NOTHING_IS_BETTER)
    for _ in range(200):
        learning.microbatch()
    steps = learning.metrics()["steps"]
    assert not any(learning.microbatch() for _ in range(10))
    moved = policy_tensors(ends(model))
    learning.set_policy(moved | {"head": 8 * moved["head"]}, 2)  # it agrees with this one less
    for _ in range(40):
        learning.microbatch()
    assert learning.metrics()["steps"] > steps
    assert learning.metrics()["rests"] == 0


def test_evaluations_after_few_steps_bring_no_rest_however_many_they_are(world):
    """A wait may be long enough for few steps only, each time on another version."""
    model, samples = world
    config = replace(NOTHING_IS_BETTER, evaluate_every_steps=32, evaluate_moved_steps=1, held_out_tokens=64)
    learning, _, _ = learning_of(model, samples, config)
    rested = {}
    for version in range(1, 400):
        learning.set_policy(policy_tensors(ends(model)), version)
        for _ in range(12):
            learning.microbatch()
        found = learning.metrics()
        if found["rests"]:
            rested[version] = found
            break
    (found,) = rested.values()
    assert found["steps"] >= 3 * 32
    assert found["evaluations"] > 10


def test_without_features_there_is_nothing_to_learn(world):
    model, samples = world
    memory = bytearray(shape_of(model).num_bytes)
    learning = LayerTraining(beginner(model), memory, QUICK)
    assert not learning.microbatch()
    learning.set_policy(policy_tensors(ends(model)), 1)
    assert not any(learning.microbatch() for _ in range(50))
    ring = FeatureRing(memory, shape_of(model))
    assert not any(learning.microbatch() for _ in range(50))
    write(ring, samples)
    assert learning.microbatch()


def test_features_of_the_versions_before_teach_and_judge(world):
    """In a round of two steps, say, the held-out group may always be of the first one."""
    model, samples = world
    learning, _, _ = learning_of(model, samples)
    learning.set_policy(policy_tensors(ends(model)), 9)
    assert published(learning, 200)
    assert learning.metrics()["match_published"] > 0


def test_who_has_learned_for_a_moved_policy_is_judged_at_once_and_not_when_it_is_late(world):
    model, samples = world
    config = replace(QUICK, evaluate_every_steps=1000, evaluate_moved_steps=2, held_out_tokens=64)
    learning, ring, _ = learning_of(model, samples, config)

    def judged_after(pieces):
        for _ in range(pieces):
            learning.microbatch()
        return learning.metrics().get("evaluations", 0)

    assert judged_after(40) == judged_after(40) == 1
    learning.set_policy(policy_tensors(ends(model)), 2)
    assert judged_after(40) == judged_after(40) == 2
    assert set(ring.status()["versions"]) == {1}, "samples of the version before judge"


def test_it_goes_on_from_a_checkpoint(world):
    model, samples = world
    learning, _, _ = learning_of(model, samples)
    for _ in range(20):
        learning.microbatch()
    state = learning.state()
    again, _, _ = learning_of(model, samples)
    again.resume(state)
    assert again.metrics()["steps"] == learning.metrics()["steps"]
    assert all(torch.equal(again.state()[name], state[name]) for name in state)


@pytest.mark.skipif(sys.platform != "linux", reason="states are Linux's")
def test_a_process_of_its_own_learns_in_windows_and_the_node_adopts_the_result(world):
    model, samples = world
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    layer, shape = beginner(model), shape_of(model)
    with train_when_idle(layer, ends(model), shape, learning=QUICK, idle=IdleConfig(niceness=0)) as work:
        write(FeatureRing(work.features, shape), samples)
        with work.window("tail"):
            trainers.until(lambda: work.status()["published"] >= 1, work)
        found = work.newest()
        first = held_out_match(layer, pack_samples(samples, 256), ends(model), 2).rate
        layer.load_state_dict(found.tensors)
        assert held_out_match(layer, pack_samples(samples, 256), ends(model), 2).rate > first
        assert found.version == 1
        assert work.status()["feature_bytes"] == shape.num_bytes
        work.update_policy(policy_tensors(ends(model)), 2)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_first_layer_is_a_new_one_and_those_that_are_offered_are_trained(world):
    model, samples = world
    learning, _, _ = learning_of(model, samples)
    trainer = learning._trainer

    def share_of_first():
        """Return the share of the first weights in the average after one step of training."""
        first = {name: value.clone() for name, value in trainer.averaged.state_dict().items()}
        while not trainer.num_steps:
            learning.microbatch()
        moved = trainer.averaged.down.weight - first["down.weight"]
        return 1 - float((moved / (trainer.layer.down.weight.detach() - first["down.weight"])).median())

    assert share_of_first() == pytest.approx(1 / 11, abs=0.01)
    learning.begin(beginner(model).state_dict())
    assert share_of_first() == pytest.approx(0.98, abs=0.01)
