"""GRPO with speculative rollouts and a drafter: `torchrun --nproc-per-node 2 examples/grpo.py`."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from aedit import EverySteps, LayerSync, MeanExchange, TorchTransport
from aedit import spec_rollout as rl
from aedit.async_sgd import Average

GROUPS, SIZE, LENGTH, STEPS = 4, 8, 16, 32


def reward(tokens: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


dist.init_process_group("gloo")
node, nodes = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
)
inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
target = rl.make_target(model, rows=GROUPS * SIZE, max_tokens=LENGTH + 1)
online, sampling, means = rl.OnlineDrafter.of(target), rl.Sampling(max_new_tokens=LENGTH), []
engine = rl.Engine(target, drafters={"layer": online.drafter}, chooser=rl.Goodput.of("layer:2", "layer:4"))
engine.sink = online.sink  # features of the rollouts, on which the drafter trains
exchange = MeanExchange(TorchTransport(timeout_s=60), outer=Average())
sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(4))
sync.idle = online  # it trains while this node waits for the other one
with online, sync:
    for step in range(STEPS):
        sync.update_engine(engine)  # lands what has arrived, and hands the weights over
        online.after_update()
        first = (step * nodes + node) * GROUPS  # no two nodes have the same prompts and noise
        for n, i in [(n, i) for n in range(first, first + GROUPS) for i in range(SIZE)]:
            engine.add(rl.Prompt(tokens=(n % 64,), rollout=n, sample=i, group=n, sampling=sampling))
        rollouts = [*engine.running, *engine.waiting]
        while engine.running or engine.waiting:
            engine.step()
            online.adopt()  # a drafter that has become better
        found = [[reward(r.tokens) for r in rollouts[g : g + SIZE]] for g in range(0, len(rollouts), SIZE)]
        means.append(sum(map(sum, found)) / len(rollouts))
        tokens_BL = torch.tensor([[*r.prompt.tokens, *r.tokens] for r in rollouts])
        logp_BTV = model(input_ids=tokens_BL).logits[:, :-1].log_softmax(-1)
        logp_BT = logp_BTV.gather(-1, tokens_BL[:, 1:, None])[..., 0]  # all prompts have one token
        behaviour_BT, mask_BT = torch.tensor([r.logprobs for r in rollouts]), logp_BT < torch.inf
        A_B, count = torch.tensor(rl.advantages(found)).flatten(), len(rollouts)
        inputs = rl.LossInputs(logp_BT=logp_BT, behaviour_BT=behaviour_BT, mask_BT=mask_BT, advantages_B=A_B,
                            num_tokens=count * LENGTH, num_sequences=count, max_tokens=LENGTH)  # fmt: skip
        rl.find_loss("grpo")(inputs, rl.LossSettings()).loss.backward()
        inner.step()
        inner.zero_grad()
        sync.step()
figures = f"reward {means[0]:.2f} -> {means[-1]:.2f}, {sync.round_id} rounds, {online.status()['state']}"
print(f"node {node}: {figures}\n", end="")
dist.destroy_process_group()
