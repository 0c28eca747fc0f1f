"""GRPO by `trl.GRPOTrainer`, as a program: `python -m benchmarks.programs.trl_trainer JOB`, with JOB as JSON.

Model, rows, reward and settings are those of a run of this project. The last line of its output is the mean
reward of each step, as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
import trl
from transformers import AutoTokenizer

from aedit.launch.config import RunConfig, load
from aedit.launch.data import load_problems, load_tokenizer
from aedit.spec_rollout.rl.rewards.built_in import numeric_reward

_trl: Any = trl  # it says not what it exports


def settings(config: RunConfig, steps: int, directory: str) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig` that mean what the run's configuration says."""
    rl, train = config.rl, config.train
    return {
        "output_dir": directory,
        "max_steps": steps,
        "seed": config.seed,
        "per_device_train_batch_size": rl.groups * rl.group_size,
        "num_generations": rl.group_size,
        "max_completion_length": rl.sampling.max_new_tokens,
        "temperature": rl.sampling.temperature,
        "learning_rate": train.lr,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": train.lr_final},
        "weight_decay": train.weight_decay,
        "adam_beta1": train.betas[0],
        "adam_beta2": train.betas[1],
        "max_grad_norm": train.grad_clip,
        "beta": rl.kl,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "model_init_kwargs": {"dtype": torch.float32},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def main(job: dict[str, Any]) -> list[float]:
    """Train for `steps` steps from the model in `model`; return the mean reward of each step."""
    torch.set_num_threads(1)
    config = load(Path(job["config"]), job["flags"]).config
    longest = config.data.seq_len - config.rl.sampling.max_new_tokens
    problems = load_problems(config.prompts, load_tokenizer(config.data), seed=config.seed, longest=longest)
    rows = [{"prompt": problem.prompt, **problem.columns} for problem in problems.train]
    with tempfile.TemporaryDirectory() as directory:
        trainer = _trl.GRPOTrainer(
            job["model"],
            numeric_reward,
            _trl.GRPOConfig(**settings(config, job["steps"], directory)),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
        )
        trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
