"""Job of tests/test_text_learner.py: two nodes of a world train on text, the second is slow."""

import threading
from pathlib import Path

import pytest
import torch
from kit import trainers
from kit.rl_drafter import train_at_once
from kit.rl_nodes import handlers_put_back, weights
from kit.text_nodes import config_of
from torch.distributed.device_mesh import init_device_mesh

from aedit.launch.config import NodeOptions
from aedit.launch.node import text_learner
from aedit.launch.node.build import build
from aedit.launch.node.objective import TextObjective
from aedit.launch.node.train import train
from aedit.launch.node.world import World


def two_nodes(rank, size, directory, keys):
    """Return this node's weights, losses, and the state of its drafter.

    With a drafter the slow node takes its last step once the other's trainer has published.
    """
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("sync", "shard"))
    world = World(rank, size, 0, 1, torch.device("cpu"), mesh)
    config, published, losses = config_of(directory, **keys), Path(directory) / "published", []
    take_step = TextObjective.accumulate_gradients

    def step(objective, add_loss):
        if objective.learner is not None and rank == 1 and objective.sync.steps == config.train.steps - 1:
            trainers.until(published.exists)
        take_step(objective, lambda loss: (losses.append(float(loss)), add_loss(loss)))

    with pytest.MonkeyPatch.context() as patch, handlers_put_back():
        train_at_once(patch)
        patch.setattr(text_learner, "MAX_SHARE", 1.0)
        patch.setattr(text_learner, "SAMPLES", 32)
        patch.setattr(TextObjective, "accumulate_gradients", step)
        with build(config, world, NodeOptions(), lambda *_: None) as node:
            online = None if node.objective.learner is None else node.objective.learner.online
            if online is not None and rank == 0:
                threading.Thread(target=_tell, args=(online, published), daemon=True).start()
            train(node)
            status = None if online is None else online.status()
    return weights(node), losses, status


def _tell(online, published):
    """Write a file once the trainer has published."""
    trainers.until(lambda: online.status()["published"], online)
    published.touch()
