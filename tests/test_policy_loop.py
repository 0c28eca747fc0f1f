"""Tests reinforcement learning over a hub: trainer and engine have the same policy in every step."""

import random
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from benchmarks.kit.paced import layout_of
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.async_sgd.inprocess import InProcessHub
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig
from aedit.clock import VirtualClock
from aedit.edit import EditConfig, HubExchange, LayerSync
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUP, STEPS, EVERY = 8, 24, 3


def hub_for(model):
    plan = HubPlan(
        hub=HubConfig(weights="uniform"),
        outer=OuterConfig(kind="average", lr=1.0),
        penalty=PenaltyConfig(detector="off", clip=None),
        every=EVERY,
        pace="steps",
        steps=10_000,
    )
    return InProcessHub(plan, layout_of(model), clock=VirtualClock())  # no member is late for it


class Node:
    """Trainer and engine of one node, which share the parameters."""

    def __init__(self, hub, name, model):
        self.model, self.name = model, name
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        config = EditConfig(every=EVERY, landing="arrival", timeout_s=10)
        exchange = HubExchange(hub.link(name))
        self.sync = LayerSync.of(model, self.inner, exchange=exchange, config=config)
        self.engine = Engine.of(model, rows=GROUP, max_tokens=32)
        self.steps, self.rewards, self.versions = 0, [], []

    def prompts(self):
        sampling = Sampling(max_new_tokens=6)
        tokens = (1 + self.steps % 5, 7)
        ids = {"rollout": 1000 * len(self.name) + self.steps, "group": self.steps}
        return [Prompt(tokens=tokens, sample=i, sampling=sampling, **ids) for i in range(GROUP)]

    def logprobs(self, rollouts):
        """Return the training forward's log-probs of the rollouts' tokens, (GROUP, 6)."""
        text = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens] for rollout in rollouts])
        logp = self.model(input_ids=text).logits[:, 1:-1].log_softmax(-1)
        return logp.gather(-1, text[:, 2:, None])[..., 0]

    def step(self, hand_over):
        """Take a step of GRPO and return the largest |ratio - 1| of trainer and behaviour probabilities."""
        hand_over(self)
        rollouts = list(self.engine.generate(self.prompts()))
        self.versions.append({version for rollout in rollouts for version in rollout.versions})
        reward = torch.tensor([sum(t % 2 == 0 for t in rollout.tokens) / 6 for rollout in rollouts])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        behaviour = torch.tensor([rollout.logprobs for rollout in rollouts])
        ratio = (self.logprobs(rollouts) - behaviour).exp()
        (-(ratio * advantage[:, None]).mean()).backward()
        self.inner.step()
        self.inner.zero_grad()
        self.sync.step()
        self.steps += 1
        self.rewards.append(reward.mean().item())
        return (ratio - 1).abs().max().item()


def train(hand_over, steps=STEPS):
    """Return the ratios of all steps of two nodes, and the nodes."""
    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(2)]
    hub = hub_for(models[0])
    nodes = [Node(hub, name, model) for name, model in zip(("a", "bb"), models, strict=True)]
    ratios = []
    with nodes[0].sync, nodes[1].sync:
        for n in range(steps):
            ratios += [node.step(hand_over) for node in nodes[: 1 + (n % 4 != 0)]]  # of unequal speed
    return ratios, nodes


def test_trainer_and_engine_have_one_policy_in_every_step_over_a_hub():
    landed = []

    def hand_over(node):
        before = [p.detach().clone() for p in node.model.parameters()]
        version = node.sync.update_engine(node.engine)
        changed = any(not torch.equal(a, b) for a, b in zip(before, node.model.parameters(), strict=True))
        landed.append(changed)
        assert version == node.engine.version

    ratios, nodes = train(hand_over)
    assert max(ratios) < 1e-3
    assert sum(landed) > 8, "nothing has landed between rollouts and training"
    for node in nodes:
        assert node.versions == [{n + 1} for n in range(node.steps)]
        rewards = torch.tensor(node.rewards)
        assert rewards[-6:].mean() > rewards[:6].mean() + 0.1


def test_without_landing_what_arrives_lands_behind_the_rollouts_and_breaks_the_ratio():
    ratios, _ = train(lambda node: node.engine.update_weights(None, node.engine.version + 1))
    assert sum(ratio > 1e-2 for ratio in ratios) > 4


def test_without_a_hand_over_the_engine_refuses_to_generate_after_the_first_step():
    def hand_over(node):
        if node.steps == 0:
            node.sync.update_engine(node.engine)
        else:
            node.sync.land()

    with pytest.raises(RuntimeError, match=r"has changed, .* version 1: call .* sync\.update_engine"):
        train(hand_over)


def bits(model):
    return sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def move(node, chance):
    """Change the weights of a node in one of the ways in which they change, or not at all."""
    model, kind = node.model, chance.randrange(6)
    if kind == 0:
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        node.inner.step()
        node.inner.zero_grad()
    if kind <= 1:
        node.sync.step()
    if kind == 2:
        model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    if kind == 3:
        for p in model.parameters():
            p.data.mul_(1.01)
    if kind == 4:  # a landing
        model(input_ids=torch.arange(8)[None])


def test_two_sets_of_weights_of_a_node_never_have_one_version_and_equal_ones_keep_it():
    """Inner steps, landings, checkpoints and writes past the count of changes, two engines, in any order."""
    torch.manual_seed(0)
    chance, models = random.Random(0), [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(3)]
    hub = hub_for(models[0])
    node, other = Node(hub, "a", models[0]), Node(hub, "bb", models[1])
    copied = Engine.of(models[2], rows=4, max_tokens=32)
    copied.update_weights(LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict(), 3)
    known, last = {}, 0
    with node.sync, other.sync:
        for _ in range(120):
            move(chance.choice([node, node, other]), chance)
            before = bits(node.model)
            engine = chance.choice([node.engine, copied])
            version = node.sync.update_engine(engine)
            assert version == engine.version >= last
            assert bits(engine.target.model) == bits(node.model)
            assert known.setdefault(version, bits(node.model)) == bits(node.model)
            if before == bits(node.model):
                assert node.sync.update_engine(engine) == version
            last = version
    assert 30 < len(known) < 120
    assert node.engine.target.embedding.data_ptr() == models[0].get_input_embeddings().weight.data_ptr()


def test_the_loop_of_the_documentation_runs(monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "rollouts.md").read_text()
    section = text[text.index("## Generate between training steps") :].split("\n## ")[0]
    loop, sharded = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    node, ratios = Node(hub_for(model), "a", model), []

    def policy_loss(model, rollouts):
        ratio = (node.logprobs(rollouts) - torch.tensor([each.logprobs for each in rollouts])).exp()
        ratios.append((ratio - 1).abs().max().item())
        return -ratio.mean()

    def batches():
        for node.steps in range(8):
            yield node.prompts()

    monkeypatch.setattr(LayerSync, "of", lambda *_, exchange: node.sync)
    names = {"LayerSync": LayerSync, "exchange": None, "policy_loss": policy_loss, "inner": node.inner}
    names |= {"Engine": Engine, "model": model, "batches": batches(), "rank": 0}
    other = {"copy_of_the_policy": LlamaForCausalLM(LlamaConfig(**SIZES))}
    exec(loop, names)
    assert len(ratios) == 8
    assert max(ratios) < 1e-3
    assert names["version"] == 8
    exec(sharded, names | other | {"sync": node.sync})
