"""Train and keep the policies of the rollout benchmarks.

    python -m benchmarks.policies [--task scratchpad|python] [--size 10m|25m|...] [--minutes M] [--drafter]

A policy is kept in runs/policies under a name that its settings give it: the same settings find it again. An
interrupted training goes on where it stopped.
"""

import argparse
import json
import os
import random
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from aedit.launch.cli.export import write_model
from aedit.launch.data import ByteTokenizer
from aedit.launch.node import num_parameters
from aedit.spec_rollout.rl.tasks.scratchpad import MAX_CHARS, Task, draw_tasks
from benchmarks.kit.policy_training import (
    Budget,
    Rows,
    Training,
    mean_loss,
    task_rows,
    text_rows,
    watched,
)
from benchmarks.kit.small_llama import corpus

ABOUT = "Train a policy for the rollout benchmarks, unless it is there already."
ROOT = Path("runs/policies")
MAX_TOKENS = 2048
"""Positions of a policy."""
SEQ_LEN = 512
"""Of a row that it learns from; one that begins with a longer task is as long as that."""
NUM_TOKENS = {"cpu": 256, "cuda": 64 * SEQ_LEN}
"""Of one step, or a row: many small steps where a step is slow."""
SHORTEST = 40
"""Characters of the tasks with which arithmetic begins."""
GROWING = 0.6
"""Share of its training in which they grow to their full length."""
PROMPT_BYTES = 64
"""Of a prompt out of Python text."""
REVISION: dict[str, int] = {"scratchpad": 3, "python": 2}
"""Goes up when the same settings would make another policy."""
HELD_OUT_ROWS = 16

Kind = Literal["scratchpad", "python"]
Size = Literal["quick", "10m", "25m", "100m", "300m"]
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    width: int
    layers: int
    heads: int
    shared_heads: int
    """Heads of keys and values."""
    inside: int
    """Width of the feed-forward part."""


SHAPES: dict[Size, Shape] = {
    "quick": Shape(64, 2, 2, 1, 128),
    "10m": Shape(256, 12, 8, 4, 768),
    "25m": Shape(384, 15, 12, 4, 1152),
    "100m": Shape(768, 14, 12, 4, 2304),
    "300m": Shape(1024, 24, 16, 8, 3072),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that determines a policy. Equal settings give the same policy."""

    task: Kind = "scratchpad"
    size: Size = "10m"
    minutes: float = 30.0
    seed: int = 0
    longest: int = MAX_CHARS
    """Characters of a task and its answer."""

    @property
    def name(self) -> str:
        settings = json.dumps([REVISION[self.task], asdict(self)], sort_keys=True)
        return f"{self.task}-{self.size}-{sha256(settings.encode()).hexdigest()[:8]}"


def ready(policy: Policy, root: Path = ROOT, device: str | None = None) -> Path:
    """Return the directory of a trained policy, as `save_pretrained` writes it.

    Train it if it does not exist.

    device: by default `cuda` where there is one, else `cpu`. policy.json in the directory records the
    training.
    """
    out = root / policy.name
    if not (out / "config.json").exists():
        _train(policy, out, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return out


def load(policy: Policy, root: Path = ROOT) -> PreTrainedModel:
    """Return the policy in fp32 on CPU, in evaluation mode; train it if it does not exist."""
    model: PreTrainedModel = _auto.from_pretrained(ready(policy, root), dtype=torch.float32)
    model.train(False)
    return model


def new_model(policy: Policy) -> PreTrainedModel:
    """Return the policy before its training; the same settings give the same bits."""
    shape, tokenizer = SHAPES[policy.size], ByteTokenizer()
    # In trials of some minutes a narrow model learned to copy sooner than from the usual 0.02.
    spread = shape.width**-0.5 if policy.task == "scratchpad" else 0.02
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.inside,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared_heads,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(policy.seed)
        return LlamaForCausalLM(config)


def tasks(count: int, seed: int) -> list[Task]:
    """Return questions for a policy of scratchpad arithmetic, separate from those of its training."""
    return draw_tasks(count, seed)


def prompts(policy: Policy, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return token ids of prompts: questions, or the beginnings of lines of Python text never trained on."""
    tokenizer = ByteTokenizer()
    if policy.task == "scratchpad":
        return [tuple(map(int, tokenizer.encode(task.prompt))) for task in tasks(count, seed)]
    rows, rng = corpus(SEQ_LEN).held_out, random.Random(seed)
    chosen = (rows[rng.randrange(len(rows))] for _ in range(count))
    return [tuple(map(int, row[:PROMPT_BYTES])) for row in chosen]


def _train(policy: Policy, out: Path, device: str) -> None:
    lr = (0.15 if policy.task == "scratchpad" else 0.3) / SHAPES[policy.size].width
    budget = Budget(seconds=60 * policy.minutes, lr=lr, device=device)
    rows_of = partial(_rows, policy, NUM_TOKENS[device])
    place = out.with_name(f".{out.name}.training")
    model = new_model(policy)
    if device == "cpu" and policy.task == "scratchpad":
        model.set_attn_implementation("eager")  # the fused one's way back takes a third of a step in bf16
    training = Training(model, rows_of, budget, place)
    watched(out.name, training.run(), budget.seconds)
    model.train(False)
    story = {"settings": asdict(policy), "device": device, "parameters": num_parameters(model)}
    story |= asdict(training.progress) | {"held_out_loss": _held_out_loss(policy, model, device)}
    _keep(model.cpu(), story, out)
    place.unlink(missing_ok=True)


def _rows(policy: Policy, num_tokens: int, step: int, done: float) -> Rows:
    seed = f"{policy.seed}/{step}"
    if policy.task == "scratchpad":
        longest = round(SHORTEST * (policy.longest / SHORTEST) ** min(1.0, done / GROWING))
        seq_len = min(max(64, longest + 2), SEQ_LEN)
        return task_rows(max(1, num_tokens // seq_len), seq_len, seed, longest)
    return text_rows(corpus(SEQ_LEN).train, max(1, num_tokens // SEQ_LEN), seed)


@torch.inference_mode()
def _held_out_loss(policy: Policy, model: PreTrainedModel, device: str) -> float:
    """Return the nats per token over rows that no training uses."""
    if policy.task == "scratchpad":
        rows = task_rows(HELD_OUT_ROWS, SEQ_LEN, "held out")
    else:
        rows = text_rows(corpus(SEQ_LEN).held_out, HELD_OUT_ROWS, "held out")
    return float(mean_loss(model, rows, device))


def _keep(model: PreTrainedModel, story: dict[str, Any], out: Path) -> None:
    """Write the directory so that it appears with all of its files."""
    writing = out.with_name(f".{out.name}.{os.getpid()}")
    model.config.use_cache = True
    write_model(model, ByteTokenizer(), writing)
    (writing / "policy.json").write_text(json.dumps(story, indent=1) + "\n")
    writing.rename(out)


def main() -> None:
    """Run the command line."""
    usual = Policy()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=ABOUT)
    parser.add_argument("--task", choices=get_args(Kind), default=usual.task)
    parser.add_argument("--size", choices=get_args(Size), default=usual.size)
    parser.add_argument("--minutes", type=float, default=usual.minutes, help="of training")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--drafter", action="store_true", help="and a drafter of it, on its own rollouts")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")
    args = parser.parse_args()
    policy = Policy(task=args.task, size=args.size, minutes=args.minutes, seed=args.seed)
    out = ready(policy, args.root)
    story = json.loads((out / "policy.json").read_text())
    size, loss = story["parameters"] / 1e6, story["held_out_loss"]
    print(f"{out}: {size:.1f} M parameters, {loss:.3f} nats per token held out")
    if args.drafter:
        from benchmarks.kit.policy_drafter import Recipe, drafter_ready

        path = drafter_ready(Recipe(policy=policy), args.root)
        match = json.loads(path.with_suffix(".json").read_text())
        print(f"{path}: overlap by depth {', '.join(f'{x:.2f}' for x in match['overlap_D'])}")


if __name__ == "__main__":
    main()
