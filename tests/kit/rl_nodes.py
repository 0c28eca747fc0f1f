"""A node of reinforcement learning in the test process: tiny policy, sums of small numbers."""

import json
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from aedit.launch.config import NodeOptions, parse_config
from aedit.launch.node.build import build
from aedit.launch.node.rl_objective import train_policy
from aedit.launch.node.world import World

CONFIG = """
device = "cpu"
[model.sizes]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
seq_len = 16
[prompts]
source = "aedit.spec_rollout.rl.tasks.arithmetic:rows"
options = { digits = 2, work = false }
size = 60
held_out = 0.2
[reward]
functions = ["kit.rl_rewards:digits"]
[rl]
groups = 3
group_size = 4
eval_every = 0
eval_problems = 4
[rl.sampling]
max_new_tokens = 5
[train]
steps = 4
batch_size = 6
lr = 3e-3
[edit]
every = 2
[checkpoint]
every = 1
"""


def config_of(directory, **keys):
    """Return the configuration with dotted keys replaced, such as rl__groups=2."""
    return with_keys(replace(parse_config(CONFIG, "test"), dir=str(directory)), **keys)


def with_keys(config, **keys):
    """Return the configuration with dotted keys replaced."""
    for name, value in keys.items():
        config = _with(config, name.split("__"), value)
    return config


def _with(config, names, value):
    first, *rest = names
    return replace(config, **{first: _with(getattr(config, first), rest, value) if rest else value})


@contextmanager
def handlers_put_back():
    """Restore the signal handlers, which a node replaces, when the block ends."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def alone(device="cpu"):
    """Yield a world of one node with one rank."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("sync", "shard"))
        yield World(0, 1, 0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device), mesh)
    finally:
        dist.destroy_process_group()


def run(config, watch=lambda node: None, attempt=1):
    """Train a node alone; `watch` gets the node before its first step. Return the node, which is closed."""
    with (
        handlers_put_back(),
        alone(config.device) as world,
        build(config, world, NodeOptions(attempt=attempt), lambda *_: None) as node,
    ):
        watch(node)
        train_policy(node, node.objective)
    return node


def records(config, kind):
    """Return the lines of metrics or events of the node."""
    path = Path(config.dir) / config.name / "nodes" / "0" / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(node):
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in node.sync.model.named_parameters()}
