"""Nodes of reinforcement learning whose drafter is trained by its own process, as long as a test wants."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from aedit.launch.node import rl_engine
from aedit.spec_rollout.training import IdleConfig, Publication
from aedit.spec_rollout.training.windows import NoTraining
from kit import trainers

LOUDNESS = 10.0


def train_at_once(monkeypatch, module=rl_engine):
    """Let the trainers that `module` starts run on a busy machine too, see each sample and evaluate early."""
    original = module.online_config

    def quick(config, log):
        found = original(config, log)
        training = replace(found.learning.training, lr=5e-3, warmup_steps=5)
        learning = replace(found.learning, training=training, evaluate_every_steps=8, evaluation_depth=2)
        idle = IdleConfig(log=log, niceness=0, restarts=trainers.AT_ONCE)
        return replace(found, learning=learning, idle=idle, max_share=1.0)

    monkeypatch.setattr(module, "online_config", quick)


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


class ScriptedTrainer(NoTraining):
    """Publishes the drafter in use with added noise in some batches, after given numbers of steps."""

    def __init__(self, node, script):
        """Take the place of the trainer of `node`; script: (batch, steps, seed), batches from 1 on."""
        super().__init__()
        self._stream, self._online, self._script = node.objective.stream, node.objective.online, script
        self.offered = []
        self._online._trainer.close()
        self._online._trainer = self

    def newest(self, after=1):
        done = self._done()
        if len(done) + 1 <= after:
            return None
        rng = torch.Generator().manual_seed(done[-1][2])
        tensors = {
            name: t + 0.02 * torch.randn(t.shape, generator=rng) for name, t in self._online.tensors().items()
        }
        return Publication(len(done) + 1, 0, tensors)

    def offer(self, drafter):
        self.offered.append({name: tensor.clone() for name, tensor in drafter.items()})
        return len(self._done()) + 1

    def status(self):
        done = self._done()
        steps = done[-1][1] if done else 0
        return super().status() | {"steps": steps, "published": len(done)}

    def _done(self):
        return [each for each in self._script if each[0] <= self._stream.batches + 1]
