"""Jobs of tests/test_rl_windows.py: one of two processes is slow, for as long as the other one needs."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit import trainers
from kit.rl_drafter import make_loud, train_at_once
from kit.rl_nodes import config_of, handlers_put_back
from torch.distributed.device_mesh import init_device_mesh

from aedit.launch.config import NodeOptions
from aedit.launch.node.build import build
from aedit.launch.node.rl_objective import train_policy
from aedit.launch.node.world import World
from aedit.spec_rollout.model import whole


def two_nodes(rank, size, directory, keys):
    """Train a node of two; the second rolls out until the first has used the wait for it."""
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("sync", "shard"))
    world = World(rank, size, 0, 1, torch.device("cpu"), mesh)
    used = Path(directory) / "used"
    with pytest.MonkeyPatch.context() as patch:
        train_at_once(patch)
        return _train(directory, keys, world, _tell(used) if rank == 0 else _slow(used.exists, batches={2}))


def two_ranks(rank, size, directory, keys):
    """Train a node of two ranks; in turns, one rolls out until a window is open on the other one."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    world = World(0, 1, rank, size, torch.device("cpu"), mesh)

    def watch(node):
        node.sync.idle = _Windows(Path(directory), node.objective.stream, rank)
        other = 1 - rank
        _slow(lambda: (Path(directory) / f"{other}-waits-in-{rank}").exists(), batches={rank})(node)

    return _train(directory, keys, world, watch)


class _Windows:
    """Idle work that writes a file when a wait begins, named after its batch."""

    used_s = 0.0

    def __init__(self, directory, stream, rank):
        self.directory, self.stream, self.rank = directory, stream, rank

    @contextmanager
    def window(self, cause):
        if cause == "rank":
            (self.directory / f"{self.rank}-waits-in-{self.stream.batches}").touch()
        yield


def _train(directory, keys, world, watch):
    config = config_of(directory, **keys)
    with handlers_put_back(), build(config, world, NodeOptions(), lambda *_: None) as node:
        make_loud(node) if world.ranks == 1 else None
        watch(node)
        train_policy(node, node.objective)
        online = node.objective.online
        if online is None:
            return dict(node.objective.records.waits.seconds)
        return online.status()["idle_by_cause_s"] if world.node == 0 else None


def _tell(used):
    """Return what makes a node write a file once its trainer has used a wait."""

    def watch(node):
        online = node.objective.online

        def look():
            trainers.until(lambda: online.used_s > 0 and online.status()["steps"] > 0, online)
            used.touch()

        threading.Thread(target=look, daemon=True).start()

    return watch


def _slow(is_over, batches):
    """Return what makes a node wait before it generates these batches."""

    def watch(node):
        stream = node.objective.stream
        source = stream.pipeline.source
        step = source.step

        def slow():
            if stream.batches in batches:
                trainers.until(is_over)
            return step()

        source.step = slow

    return watch


def ranks_with_workers(rank, size, directory, keys):
    """Train a node whose ranks have workers; return the samples of this rank's ring and its trained texts."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    world = World(0, 1, rank, size, torch.device("cpu"), mesh)
    config, found, trained = config_of(directory, **keys), [], []
    with handlers_put_back(), build(config, world, NodeOptions(), lambda *_: None) as node:
        online, accumulate = node.objective.online, node.objective.gradient.accumulate
        model, before = node.sync.model, {}

        def keep(samples, add_loss, version):
            before[version] = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
            trained.extend((*each.prompt.tokens, *each.tokens) for each in samples)
            return accumulate(samples, add_loss, version)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(node.objective.gradient), "accumulate", lambda self, *args: keep(*args))
            train_policy(node, node.objective)
        reader = online._gate._reader
        for entry in reader.entries():
            sample = reader.read(entry)
            found.append((sample.tokens_N, sample.features_MF, sample.num_prompt, sample.version))
        shapes = {name: tuple(t.shape) for name, t in online.tensors().items()}
        policy = node.objective.gradient.learner.policy
        return found, trained, before, shapes, (policy.version, policy.embedding.clone(), policy.head.clone())
