"""A node that trains on text in the test process, and a drafter that trains inside the node's waits."""

import pydoc_data.topics
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from aedit.launch.config import NodeOptions, parse_config
from aedit.launch.node.build import build
from aedit.launch.node.train import train
from aedit.spec_rollout.drafters import layer_of
from aedit.spec_rollout.training import LayerTraining, Publication, policy_tensors
from aedit.spec_rollout.training import online_drafter as online_module
from aedit.spec_rollout.training.windows import NoTraining
from kit.rl_nodes import alone, handlers_put_back, with_keys

CONFIG = """
device = "cpu"
[model.sizes]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
attention_dropout = 0.1
[data]
seq_len = 48
held_out = 0.2
[train]
steps = 24
batch_size = 4
lr = 1e-2
eval_samples = 8
[edit]
every = 8
[checkpoint]
every = 0
"""


def config_of(directory, **keys):
    """Return the configuration with dotted keys replaced, such as train__steps=2."""
    text = Path(directory) / "text.md"
    text.write_text("".join(pydoc_data.topics.topics.values())[: 1 << 16])
    config = replace(parse_config(CONFIG, "test"), dir=str(directory))
    return with_keys(config, data__source=str(text), **keys)


def run(config, watch=lambda node: None, attempt=1):
    """Train a node alone; `watch` gets the node before its first step. Return the node, which is closed."""
    with (
        handlers_put_back(),
        alone(config.device) as world,
        build(config, world, NodeOptions(attempt=attempt), lambda *_: None) as node,
    ):
        watch(node)
        train(node)
    return node


class TrainsInWindows(NoTraining):
    """`Trainer` in the process of the node: each window is as long as some pieces of training take."""

    used_s = 0.0

    def __init__(self, layer, embeddings, ring, config, pieces=3):
        super().__init__()
        self.memory, self.pieces, self.steps = bytearray(ring.num_bytes), pieces, 0
        self.published = []
        training = replace(config.learning.training, lr=5e-3, warmup_steps=2)
        learning = replace(config.learning, training=training, evaluate_every_steps=8)
        self.training = LayerTraining(layer_of(layer.shape).to(layer.gain), self.memory, learning)
        self.training.begin(layer.state_dict())
        self.update_policy(policy_tensors(embeddings), embeddings.version)

    @contextmanager
    def window(self, cause):
        with super().window(cause), torch.enable_grad():
            for _ in range(self.pieces):
                self.steps += self.training.microbatch()
                if (better := self.training.to_publish()) is not None:
                    self.published.append({name: value.clone() for name, value in better.items()})
            self.used_s += 1.0
            yield

    def newest(self, after=1):
        number = len(self.published) + 1
        return Publication(number, 0, self.published[-1]) if number > after else None

    def update_policy(self, policy, version):
        self.training.set_policy({name: value.clone() for name, value in policy.items()}, version)

    def status(self):
        own = {"state": "running", "steps": self.steps, "published": len(self.published)}
        return super().status() | own | {"training": dict(self.training.metrics())}


def train_in_windows(monkeypatch):
    """Let drafters be trained by `TrainsInWindows` from now on."""

    def start(policy, layer, ring, config, is_trained):
        trainer = TrainsInWindows(layer, online_module.embeddings_of(policy), ring, config)
        return trainer, trainer.memory

    monkeypatch.setattr(online_module, "_start", start)


def wait_after_steps(node):
    """Let the node wait once after each of its steps."""
    step = node.sync.step

    def step_and_wait():
        step()
        with node.sync.idle.window("test"):
            pass

    node.sync.step = step_and_wait
