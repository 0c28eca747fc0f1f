"""Training of a drafter before a run, once, on rollouts of its policy."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from aedit.spec_rollout.drafters import DraftForm, DraftLayer
from aedit.spec_rollout.training.batches import pack_samples
from aedit.spec_rollout.training.feature_ring import FeatureSample
from aedit.spec_rollout.training.gate import Match, held_out_match
from aedit.spec_rollout.training.learning import DraftTrainer, DraftTrainingConfig
from aedit.spec_rollout.training.losses import PolicyEmbeddings

JUDGED_EVERY = 8
"""One of so many rollouts judges the drafter that learned from the others."""
JUDGED_DEPTH = 8
BATCH_PAIRS = 512
LOWEST_LR = 0.05
"""At the end, as a share."""


def train_drafter(
    model: Any,
    samples: Sequence[FeatureSample],
    training: DraftTrainingConfig,
    minutes: float,
    seed: int = 0,
    *,
    form: DraftForm | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[DraftLayer, Match]:
    """Train a new layer on most of the samples for this long, with a falling rate; others judge it.

    Args:
        model: The policy.
        samples: Its rollouts, with features of the form's taps.
        training: Loss and first learning rate.
        minutes: Duration by `clock`.
        seed: Seed of the layer and of the batches.
        form: Form of the layer; None: the own one.
        clock: Seconds.

    Returns:
        The layer, and its match on the other samples.

    Raises:
        ValueError: There are too few samples.
    """
    learned = [sample for sample in samples if sample.serial % JUDGED_EVERY]
    apart = [sample for sample in samples if sample.serial % JUDGED_EVERY == 0]
    if not (learned and apart):
        raise ValueError(f"{len(samples)} rollouts are too few to learn from some and judge by others")
    taps = samples[0].features_MF.shape[1] // model.config.hidden_size - 1
    layer = (form or DraftForm()).new(model, taps=taps, generator=torch.Generator().manual_seed(seed))
    trainer = DraftTrainer(layer, replace(training, batch_pairs=BATCH_PAIRS, row_pairs=BATCH_PAIRS))
    ends = policy_ends(model)
    began, rng = clock(), random.Random(seed)
    while (share := (clock() - began) / (60 * minutes)) < 1:
        trainer.lr_factor = LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * share))
        trainer.step(_batch(learned, BATCH_PAIRS, rng), ends)
    rows = [row.to(layer.gain.device) for row in pack_samples(apart, BATCH_PAIRS)]
    return layer, held_out_match(layer, rows, ends, JUDGED_DEPTH)


def policy_ends(model: Any) -> PolicyEmbeddings:
    """Return the policy's embedding and head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return PolicyEmbeddings(embedding.detach(), head.detach(), version=0)


def _batch(samples: Sequence[FeatureSample], num_pairs: int, rng: random.Random) -> list[FeatureSample]:
    """Return random samples with `num_pairs` pairs in total, or slightly more."""
    chosen: list[FeatureSample] = []
    while sum(len(sample.features_MF) for sample in chosen) < num_pairs:
        chosen.append(rng.choice(samples))
    return chosen
