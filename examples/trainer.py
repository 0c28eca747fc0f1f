"""A `transformers.Trainer` as a node of a hub: one callback.

aedit hub examples/hub.toml --directory OUT/hub       # once
python examples/trainer.py HOST:PORT NAME OUT/NAME    # as many as you like, each with its own NAME
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from aedit import EditCallback, HubExchange


def main(address: str, name: str, out: str) -> None:
    """Train 30 steps on sequences that count upwards."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    starts = torch.randint(0, 48, (64,)).tolist()
    samples = [{"input_ids": torch.arange(s, s + 16), "labels": torch.arange(s, s + 16)} for s in starts]
    args = TrainingArguments(
        out, max_steps=30, learning_rate=1e-2, save_strategy="no", report_to="none", use_cpu=True
    )

    exchange = HubExchange.join(address, model, name=name)
    callback = EditCallback(exchange=exchange)
    result = Trainer(model=model, args=args, train_dataset=samples, callbacks=[callback]).train()
    sync = callback.sync
    print(f"{name}: {sync.steps} steps, {sync.round_id} pushes, loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
