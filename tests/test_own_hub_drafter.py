"""Tests a drafter that nodes with loops of their own share over a real hub: who trains it, who gets it."""

import torch
from kit.hub_process import real_hub
from kit.tiny_policies import policy
from kit.waiting import until

from aedit import HubExchange, LayerSync
from aedit import spec_rollout as rl
from aedit.edit.hub_join import HubNodeOptions
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, parse_arm
from aedit.spec_rollout.training import DraftTrainer, DraftTrainingConfig, Publication
from aedit.spec_rollout.training.online_drafter import embeddings_of
from aedit.spec_rollout.training.windows import NoTraining

HUB = """
name = "test"
[drafter]
kind = "layer"
[outer]
kind = "average"
lr = 1.0
[edit]
every = 1
timeout_s = 60
penalty = { clip = "none" }
[hub]
address = "127.0.0.1:0"
endless = true
weights = "uniform"
quorum = 1
codec = "bf16"
heartbeat_s = 0.05
"""
STEPS = 30
"""Of the drafter's training."""


class Learned(NoTraining):
    """Trainer that has published what `learn` made of the drafter."""

    made = None

    def newest(self, after=1):
        return Publication(2, 0, self.made) if self.made is not None and after < 2 else None

    def status(self):
        steps = STEPS if self.made is not None else 0
        return super().status() | {"steps": steps, "published": int(steps > 0)}


class Node:
    """Node with a loop of its own: rollouts with a drafter, and a round per step."""

    def __init__(self, address, name, seed=0):
        self.model = policy(dtype=torch.float32)
        target = rl.make_target(self.model, rows=8, max_tokens=64)
        config = rl.OnlineConfig(memory_bytes=2**20, max_share=1.0, train=False)
        self.online = rl.OnlineDrafter.of(target, config=config, seed=seed)
        self.trainer = self.online._trainer = Learned()
        drafters = {"layer": self.online.drafter}
        self.engine = rl.Engine(target, drafters=drafters, chooser=Fixed(parse_arm("layer:3")))
        self.engine.sink = self.online.sink
        options = HubNodeOptions(name=name, agent="thread", drafter=self.online)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.sync = LayerSync.of(self.model, inner, exchange=HubExchange.of(address, self.model, options))

    def generate(self, first):
        """Hand the weights over and generate, so that there are samples of this policy."""
        self.sync.update_engine(self.engine)
        self.online.after_update()
        sampling = rl.Sampling(max_new_tokens=24)
        prompts = [rl.Prompt(tokens=(i, i + 1), rollout=first + i, sampling=sampling) for i in range(16)]
        assert len(list(self.engine.generate(prompts))) == 16

    def learn(self):
        """Train the drafter on the rollouts so far, and adopt it."""
        self.online.sink.flush()
        reader = self.online._gate._reader
        samples = [reader.read(entry) for entry in reader.entries()]
        layer = DraftLayer(self.online.layer.shape).to(self.online.layer.gain)
        layer.load_state_dict(self.online.tensors())
        trainer = DraftTrainer(layer, DraftTrainingConfig(lr=5e-3, warmup_steps=5))
        for _ in range(STEPS):
            trainer.step(samples, embeddings_of(self.online._policy))
        self.trainer.made = {name: t.detach().clone() for name, t in layer.state_dict().items()}
        assert self.online.adopt()

    def round(self):
        """Take a step without a gradient, and land the answers of its round."""
        self.sync.inner.step()
        self.sync.step()
        self.sync.finish()


def bytes_sent(*nodes):
    return [node.sync.exchange.bytes_sent for node in nodes]


def flat(tensors):
    return torch.cat([t.detach().flatten().double() for t in tensors.values()])


def test_what_one_node_has_trained_drafts_on_all_nodes_and_on_one_that_joins_later(tmp_path):
    with real_hub(tmp_path, HUB) as hub:
        trains, other = Node(hub.address, "a"), Node(hub.address, "b")
        with trains.sync, other.sync:
            trains.generate(0), other.generate(100)
            other.round(), trains.round(), other.round()
            assert other.online.status()["adopted"] == 0, "no node has trained it"
            before = bytes_sent(trains, other)
            other.round(), trains.round()
            model, drafter = (
                2 * flat(trains.model.state_dict()).numel(),
                2 * flat(trains.online.tensors()).numel(),
            )
            assert [new - old for new, old in zip(bytes_sent(trains, other), before, strict=True)] == 2 * [
                model
            ]
            trains.learn()
            trains.round()
            until(
                lambda: other.round() or other.online.adopt(), "the drafter"
            )  # a heartbeat names its version
            found = bytes_sent(trains, other)
            trains.round(), other.round()
            assert [new - old for new, old in zip(bytes_sent(trains, other), found, strict=True)] == 2 * [
                model
            ]
            assert found[0] - before[0] == 2 * model + drafter
            expected, found = flat(trains.online.tensors()), flat(other.online.tensors())
            assert (found - expected).norm() < 0.01 * expected.norm()
            late = Node(hub.address, "c", seed=3)
            with late.sync:
                late.generate(200)
                assert late.online.adopt()
                assert torch.equal(flat(late.online.tensors()), found)
