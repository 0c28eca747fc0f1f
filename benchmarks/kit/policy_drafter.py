"""Drafters for the policies of the rollout benchmarks, trained on the policy's own rollouts."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from aedit.launch.cli.train_drafter import MAX_TOKENS, ROWS, collect_rollouts
from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import DraftTrainingConfig, LossConfig, train_drafter
from benchmarks.policies import ROOT, Policy, load, prompts, ready

PROMPTS_AT = 1 << 32
"""Seeds from here on are the drafters': nobody measures with their prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines a drafter of a policy. Equal recipes give the same drafter."""

    policy: Policy
    num_tokens: int = 131_072
    """Tokens of the policy's rollouts, prompts included."""
    minutes: float = 10.0
    """Duration of the training, without the collection."""
    temperature: float = 1.0
    lr: float = 3e-3
    loss: Literal["ce", "tv"] = "ce"
    seed: int = 0

    @property
    def name(self) -> str:
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"drafter-{digest}.safetensors"


def drafter_ready(recipe: Recipe, root: Path = ROOT) -> Path:
    """Return the file of a trained drafter, in its policy's directory, for `DraftLayer.load`.

    It is trained now if it does not exist. A .json beside it has its match on held-out rollouts.
    """
    out = ready(recipe.policy, root) / recipe.name
    if not out.exists():
        model = load(recipe.policy, root)
        module: nn.Module = model
        module.to("cuda" if torch.cuda.is_available() else "cpu")
        samples = collect_rollouts(model, prompts_of(recipe), recipe.num_tokens)
        training = DraftTrainingConfig(lr=recipe.lr, loss=LossConfig(tokens=recipe.loss))
        layer, match = train_drafter(model, samples, training, recipe.minutes, recipe.seed)
        out.with_suffix(".json").write_text(json.dumps(asdict(recipe) | asdict(match), indent=1) + "\n")
        layer.save(out)
    return out


def prompts_of(recipe: Recipe) -> Iterator[Prompt]:
    """Return endless prompts of the recipe's policy."""
    stop_tokens = (ByteTokenizer().eos_id,)
    for chunk in count():
        texts = prompts(recipe.policy, ROWS, PROMPTS_AT + chunk)
        for i, tokens in enumerate(text for text in texts if len(text) < MAX_TOKENS // 2):
            sampling = Sampling(
                temperature=recipe.temperature,
                max_new_tokens=MAX_TOKENS - len(tokens),
                stop_tokens=stop_tokens,
            )
            yield Prompt(tokens=tokens, rollout=recipe.seed, sample=ROWS * chunk + i, sampling=sampling)
