"""Jobs of tests/test_rl_ranks.py and tests/test_rl_step.py: a node whose ranks are processes."""

import torch
from kit.plain_grpo import Recording
from kit.rl_drafter import ScriptedTrainer
from kit.rl_nodes import config_of, handlers_put_back
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from aedit.launch.config import NodeOptions
from aedit.launch.node.build import build
from aedit.launch.node.rl_groups import GroupStream
from aedit.launch.node.rl_objective import train_policy
from aedit.launch.node.world import World


def train(rank, size, directory, keys, scripts=()):
    """Train a node of `size` ranks; return this rank's trained positions and the node's whole weights.

    scripts: of each rank's drafter trainer, see `ScriptedTrainer`; also return `follow_drafter`'s then.
    """
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    world = World(0, 1, rank, size, torch.device("cpu"), mesh)
    config = config_of(directory, **keys)
    trained, original = [], GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        trained.extend(each.position for each in groups)
        return groups

    GroupStream.trained = follow
    try:
        with handlers_put_back(), build(config, world, NodeOptions(), lambda *_: None) as node:
            drafters = follow_drafter(node, scripts[rank]) if scripts else None
            train_policy(node, node.objective)
            full = {name: _whole(p) for name, p in node.sync.model.named_parameters()}
    finally:
        GroupStream.trained = original
    return trained, full, drafters


def follow_drafter(node, script):
    """Return a list that gets, for each round of the drafter, what this rank brought and what landed."""
    ScriptedTrainer(node, script)
    online, unit = node.objective.online, node.sync.units[-1]
    before_round, after_landing, rounds = unit.before_round, unit.after_landing, []

    def now():
        return torch.cat([p.detach().flatten() for p in unit.params])

    def own():
        return torch.cat([t.flatten() for t in online.tensors().values()])

    def before():
        rounds.append({"steps": online.shared_steps, "own": own()})
        before_round()
        rounds[-1]["brought"] = now()

    def after():
        after_landing()
        rounds[-1]["landed"] = now()

    unit.before_round, unit.after_landing = before, after
    return rounds


def recorded(rank, size, directory, keys):
    """Train a node of `size` ranks; return the recording of this rank."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    world = World(0, 1, rank, size, torch.device("cpu"), mesh)
    config, recording = config_of(directory, **keys), Recording()
    with handlers_put_back(), build(config, world, NodeOptions(), lambda *_: None) as node:
        recording.watch(node)
        train_policy(node, node.objective)
    return recording


def _whole(p):
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
