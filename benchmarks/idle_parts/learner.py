"""Real training of a draft layer, as a benchmark's trainer."""

import os
import time

import torch
from transformers import LlamaConfig

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training import (
    DrafterTraining,
    FeatureRing,
    GateConfig,
    IdleConfig,
    LearningConfig,
    PolicyEmbeddings,
    RingShape,
    train_when_idle,
)

HIDDEN_SIZE, VOCABULARY = 256, 512
BEGINS_WITHIN_S = 120.0
NUM_SAMPLES, SAMPLE_TOKENS = 64, 256


def learner(config: IdleConfig) -> DrafterTraining:
    """Return the training of a draft layer for a policy of about ten million parameters, on random features.

    It never converges and never publishes.
    """
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    embedding = torch.randn(VOCABULARY, HIDDEN_SIZE) / 50
    ring = RingShape.within(32 * 2**20, HIDDEN_SIZE, torch.float32)
    never = LearningConfig(gate=GateConfig(gain=2.0, harm=2.0, patience=10**9))
    work = train_when_idle(
        DraftLayer.of(sizes), PolicyEmbeddings(embedding, embedding, 1), ring, learning=never, idle=config
    )
    features = FeatureRing(work.features, ring)
    for _ in range(NUM_SAMPLES):
        sample = features.begin(0, 8, 1)
        assert sample is not None, "the ring is large enough"
        tokens = torch.randint(VOCABULARY, (SAMPLE_TOKENS,))
        features.append(sample, tokens, torch.randn(SAMPLE_TOKENS, HIDDEN_SIZE))
        features.end(sample, True)
    return work


def begun(work: DrafterTraining) -> None:
    """Wait until it has begun to learn. Raises TimeoutError if it gets no core on a busy machine."""
    give_up_s = time.monotonic() + BEGINS_WITHIN_S
    with work.window("start"):
        while work.status()["steps"] == 0:
            if time.monotonic() > give_up_s:
                state, error = work.status()["state"], work.status()["error"]
                load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
                raise TimeoutError(
                    f"after {BEGINS_WITHIN_S:g} s the trainer is still {state}; {error or load}"
                )
            time.sleep(0.01)
