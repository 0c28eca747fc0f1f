"""Tests that a drafter trains while a node waits for other engines' last samples and other nodes' rounds."""

import queue
import sys
import threading
from copy import deepcopy

import pytest
import torch
from kit import trainers
from kit.deferred import node
from kit.nodes import in_threads, tower
from kit.tiny_policies import ends, policy

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    FeatureRing,
    IdleConfig,
    LearningConfig,
    RingShape,
    RowFeatures,
    train_when_idle,
)
from aedit.types import Round

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states are Linux's")

LEARNING = LearningConfig(
    training=DraftTrainingConfig(lr=2e-3, warmup_steps=5, batch_pairs=512),
    evaluate_every_steps=8,
    evaluation_depth=2,
)


class Node:
    """A policy, an engine that drafts and writes its features, and the drafter's trainer."""

    def __init__(self):
        self.model = policy()
        self.layer = DraftLayer.of(self.model, generator=torch.Generator().manual_seed(0))
        self.layer.to(torch.float64)
        ring = RingShape.within(2**20, self.model.config.hidden_size, torch.float64)
        idle = IdleConfig(niceness=0)  # so that the test ends on a busy machine
        self.work = train_when_idle(
            self.layer, ends(self.model, version=0), ring, learning=LEARNING, idle=idle
        )
        target = Target.of(self.model, rows=4, max_tokens=64)
        drafters = {"layer": LayerDrafter.of(self.layer, target)}
        self.engine = Engine(target, drafters=drafters, chooser=Fixed(parse_arm("layer:3")))
        self.engine.sink = RowFeatures(FeatureRing(self.work.features, ring))

    def once(self, is_so, do):
        """Start a thread that calls `do` once `is_so()` is true of the trainer; return the thread."""

        def watch():
            trainers.until(is_so, self.work)
            do()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def is_stopped(self):
        trainers.until(lambda: trainers.is_stopped(self.work), self.work)
        steps = self.work.status()["steps"]
        torch.randn(300, 300) @ torch.randn(300, 300)
        return self.work.status()["steps"] == steps


@pytest.fixture(scope="module")
def world():
    made = Node()
    with made.work:
        yield made


def prompts():
    """Return twelve prompts with short samples and four with long ones."""
    lengths = [20] * 12 + [50] * 4
    return [
        Prompt(tokens=(i, i + 1, i + 2), rollout=i, sampling=Sampling(max_new_tokens=length))
        for i, length in enumerate(lengths)
    ]


def test_it_learns_while_an_engine_waits_for_the_long_samples_of_another(world):
    """The other engine's samples arrive after the trainer has learned.

    In the middle of its own samples this engine adopts the drafter learned meanwhile, and no token differs.
    """
    work, engine = world.work, world.engine
    plainly = Engine.of(world.model, rows=4, max_tokens=64).generate(prompts())
    plain = {rollout.prompt.rollout: rollout.tokens for rollout in plainly}
    from_another, rollouts = queue.SimpleQueue(), engine.generate(prompts())
    finished = [next(rollouts) for _ in range(13)]
    assert engine.running, "it waits in the middle of its own long ones"
    assert world.is_stopped()
    watching = world.once(lambda: work.status()["published"], lambda: from_another.put("long ones"))
    with work.window("tail"):
        assert from_another.get(timeout=trainers.PATIENCE_S) == "long ones"
    watching.join(trainers.PATIENCE_S)
    assert world.is_stopped()
    world.layer.load_state_dict(work.newest().tensors)
    finished += rollouts
    assert {rollout.prompt.rollout: rollout.tokens for rollout in finished} == plain
    assert work.newest().version == engine.target.version
    assert work.status()["idle_by_cause_s"]["tail"] > 0


def test_it_learns_while_layer_sync_waits_for_another_node(world):
    learned, model = threading.Event(), tower()
    if not world.work.status()["steps"]:
        list(world.engine.generate(prompts()))
    wanted = world.work.status()["steps"] + 8
    watching = world.once(lambda: world.work.status()["steps"] >= wanted, learned.set)

    def job(transport, n):
        own = deepcopy(model)
        sync, _ = node(own, transport)
        if n == 0:
            sync.idle = world.work
        with sync:
            if n == 1:
                assert learned.wait(trainers.PATIENCE_S)
            sync.begin(Round(1, 1))
            own(torch.ones(1, 5))
            sync.schedule.last_id = 1
        return sync.idle_used_s, {name: p.detach().clone() for name, p in own.named_parameters()}

    (used_s, ours), (nothing_s, theirs) = in_threads(2, job, timeout_s=2 * trainers.PATIENCE_S)
    watching.join(trainers.PATIENCE_S)
    assert used_s > 0 == nothing_s
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    assert world.is_stopped()
