"""Jobs of tests/test_rl_ranks.py and tests/test_rl_step.py: a node whose ranks are processes."""

import io
import threading
import time
from contextlib import redirect_stderr

import torch
import torch.distributed as dist
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
from aedit.spec_rollout.remote import rank_links, rank_pool
from aedit.spec_rollout.remote.rank_transfer import RankChannel


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


def pooled(rank, size, directory, keys, parts=()):
    """Train `size` nodes of one rank in one world; return this node's groups, weights and totals of the pool.

    Groups are positions, tokens and rewards. parts: share of each batch that a node gives to the other one,
    per batch of both; no helper is ever late. Empty: the pool decides by itself.
    """
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("sync", "shard"))
    world = World(rank, size, 0, 1, torch.device("cpu"), mesh)
    config = config_of(directory, **keys)
    trained, original = [], GroupStream.trained
    changed = ("HELPER_SHARE", "ANSWER_WITHIN_S", "LATE_S", "divide_groups")
    kept = {name: getattr(rank_pool, name) for name in changed}
    shares = iter(parts)

    def follow(stream, count):
        groups = original(stream, count)
        for each in groups:
            tokens = [list(rollout.tokens) for rollout in each.rollouts]
            trained.append((each.position, tokens, each.rewards))
        return groups

    def divided(groups, engines, lengths):
        kept["divide_groups"](groups, engines, lengths)
        given = round(next(shares, 0.0) * len(groups)) * (len(engines) > 1)
        return [0] * (len(groups) - given) + [1] * given, [0.0] * len(engines)

    GroupStream.trained = follow
    if parts:
        rank_pool.HELPER_SHARE, rank_pool.ANSWER_WITHIN_S, rank_pool.LATE_S = 0.0, 30.0, 600.0
        rank_pool.divide_groups = divided
    try:
        with handlers_put_back(), build(config, world, NodeOptions(), lambda *_: None) as node:
            train_policy(node, node.objective)
            weights = {name: _whole(p) for name, p in node.sync.model.named_parameters()}
            status = node.objective.stream.pipeline.source.status()
    finally:
        GroupStream.trained = original
        for name, value in kept.items():
            setattr(rank_pool, name, value)
    return trained, weights, status.get("pool")


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


def lose_a_link(rank, size):
    """Let rank 1 send a message and no more.

    Returns what rank 0 received, its threads that are left, and what it has printed.
    """
    received, group = [], dist.new_group(list(range(size)), backend="gloo")
    names = {rank_links.HELPS: "hello", rank_links.BYE: "bye"}
    with redirect_stderr(io.StringIO()) as printed:
        links = rank_links.PoolLinks(group, lambda peer, message: received.append(names[message.kind]))
        if rank == 1:
            links.send(0, rank_links.Message(rank_links.HELPS, text=True))
            while not links.sent:
                time.sleep(0.01)
            dist.barrier()
            return None
        while not received:
            time.sleep(0.01)
        links.close()
        for thread in links.threads:
            thread.join(30)
    dist.barrier()
    return received, [thread.name for thread in links.threads if thread.is_alive()], printed.getvalue()


def break_a_link(rank, size):
    """Let rank 1 send what is no message; return the error of rank 0, and what it has printed."""
    group, left = dist.new_group(list(range(size)), backend="gloo"), threading.Event()
    if rank == 1:
        header = torch.zeros(rank_links.HEADER_WORDS, dtype=torch.int64)
        RankChannel.to(0, group, 30.0).send(header, "header")
        dist.barrier()
        return None
    with redirect_stderr(io.StringIO()) as printed:
        links = rank_links.PoolLinks(group, lambda peer, message: left.set())
        assert left.wait(30.0)
        links.close()
    dist.barrier()
    return links.error, printed.getvalue()
