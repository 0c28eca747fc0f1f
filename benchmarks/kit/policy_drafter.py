"""Drafters for the policies of the rollout benchmarks, trained on the policy's own rollouts."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    FeatureSample,
    LossConfig,
    Match,
    PolicyEmbeddings,
    RingShape,
    RowFeatures,
    held_out_match,
    pack_samples,
)
from benchmarks.policies import ROOT, Policy, load, prompts, ready

ROWS = 32
MAX_TOKENS = 1024
"""Prompt and answer."""
PROMPTS_AT = 1 << 32
"""Seeds from here on are the drafters': nobody measures with their prompts."""
JUDGED_EVERY = 8
"""One of so many rollouts judges the drafter that learned from the others."""
JUDGED_DEPTH = 8
LOWEST_LR = 0.05
"""At the end, as a share."""


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
        samples = collect(model, prompts_of(recipe), recipe.num_tokens)
        training = DraftTrainingConfig(lr=recipe.lr, loss=LossConfig(tokens=recipe.loss))
        layer, match = train_drafter(model, samples, training, recipe.minutes, recipe.seed)
        out.with_suffix(".json").write_text(json.dumps(asdict(recipe) | asdict(match), indent=1) + "\n")
        layer.save(out)
    return out


def collect(model: PreTrainedModel, asked: Iterator[Prompt], num_tokens: int) -> list[FeatureSample]:
    """Return the policy's rollouts with its hidden states, `num_tokens` of them or slightly more."""
    engine = Engine.of(model, rows=ROWS, max_tokens=MAX_TOKENS)
    width = engine.target.feature_size
    most = num_tokens + ROWS * MAX_TOKENS  # and as much again for pages that are not full
    shape = RingShape.within(2 * most * RingShape(width, torch.float32, 1).row_bytes, width, torch.float32)
    buffer = np.zeros(shape.num_bytes, np.uint8)
    sink = RowFeatures(FeatureRing(buffer, shape))
    engine.sink = sink
    made = 0
    for prompt in asked:
        engine.add(prompt)
        while len(engine.running) + len(engine.waiting) >= ROWS and made < num_tokens:
            made += sum(len(one.tokens) + len(one.prompt.tokens) for one in engine.step().finished)
        if made >= num_tokens:
            break
    engine.close()
    reader = FeatureReader(buffer)
    return [sample for entry in reader.entries() if (sample := reader.read(entry)) is not None]


def train_drafter(
    model: PreTrainedModel,
    samples: Sequence[FeatureSample],
    training: DraftTrainingConfig,
    minutes: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[DraftLayer, Match]:
    """Train a new layer on most of the samples for this long by `clock`.

    Return it and its match on the others.
    """
    learned = [sample for sample in samples if sample.serial % JUDGED_EVERY]
    apart = [sample for sample in samples if sample.serial % JUDGED_EVERY == 0]
    if not (learned and apart):
        raise ValueError(f"{len(samples)} rollouts are too few to learn from some and judge by others")
    layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(seed))
    trainer = DraftTrainer(layer, replace(training, batch_pairs=512, row_pairs=512))
    ends = policy_ends(model)
    began, rng = clock(), random.Random(seed)
    while (share := (clock() - began) / (60 * minutes)) < 1:
        trainer.lr_factor = LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * share))
        trainer.step(_batch(learned, trainer.config.batch_pairs, rng), ends)
    rows = [row.to(layer.gain.device) for row in pack_samples(apart, trainer.config.row_pairs)]
    return layer, held_out_match(layer, rows, ends, JUDGED_DEPTH)


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


def _batch(samples: Sequence[FeatureSample], num_pairs: int, rng: random.Random) -> list[FeatureSample]:
    """Return random samples with `num_pairs` pairs in total, or slightly more."""
    chosen: list[FeatureSample] = []
    while sum(len(sample.features_MF) for sample in chosen) < num_pairs:
        chosen.append(rng.choice(samples))
    return chosen


def policy_ends(model: PreTrainedModel) -> PolicyEmbeddings:
    """Return the policy's embedding and head."""
    untyped: Any = model  # its methods carry no types
    embedding, head = untyped.get_input_embeddings().weight, untyped.get_output_embeddings().weight
    return PolicyEmbeddings(embedding.detach(), head.detach(), version=0)
