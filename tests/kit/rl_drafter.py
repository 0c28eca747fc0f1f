"""Nodes of reinforcement learning whose drafter is trained by its own process, as long as a test wants."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from aedit.launch.node import rl_drafter
from aedit.spec_rollout.idle.trainer_supervisor import IdleConfig
from kit import trainers

LOUDNESS = 10.0


def train_at_once(monkeypatch):
    """Let the trainers of nodes run on a busy machine too, and evaluate early."""
    original = rl_drafter._online_config

    def quick(config, log):
        found = original(config, log)
        training = replace(found.learning.training, lr=5e-3, warmup_steps=5)
        learning = replace(found.learning, training=training, evaluate_every_steps=8, evaluation_depth=2)
        idle = IdleConfig(log=log, niceness=0, restarts=trainers.AT_ONCE)
        return replace(found, learning=learning, idle=idle)

    monkeypatch.setattr(rl_drafter, "_online_config", quick)


@torch.no_grad()
def make_loud(node):
    """Make the random policy of a node certain of its tokens, so that a drafter has something to learn."""
    node.sync.model.get_output_embeddings().weight.mul_(LOUDNESS)


def wait_for_publications(node, batches):
    """Make the node wait after the rollouts of these batches, until its trainer has published once more."""
    stream, online = node.objective.stream, node.objective.online
    pipeline, left = stream.pipeline, list(batches)
    window = pipeline.window

    @contextmanager
    def wait(cause):
        with window(cause):
            if cause == "rank" and left and stream.batches + 1 == left[0]:
                del left[0]
                published = online.status()["published"]
                trainers.until(lambda: online.status()["published"] > published, online)
            yield

    pipeline.window = wait
