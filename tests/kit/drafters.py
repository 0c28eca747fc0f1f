"""The shipped drafters in engines of tiny policies: a fresh one, and one trained on the text it will meet."""

import torch

from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.training import (
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    PolicyEmbeddings,
    RingShape,
    RowFeatures,
)
from aedit.spec_rollout.training.losses import LossConfig
from kit.rollouts import Flips


def engine_of(model, rows, arms, *, layer=None, suffix=False, sink=None, taps=()):
    """Return an engine with these drafters; `layer` is a `DraftLayer`, or a drafter that takes its place."""
    target = Target.of(model, rows=rows, max_tokens=48, nodes=12, taps=taps)
    drafters = {} if layer is None else {"layer": layer}
    if isinstance(layer, DraftLayer):
        drafters["layer"] = LayerDrafter.of(layer, target)
    if suffix:
        drafters["suffix"] = SuffixDrafter(min_match=1)
    engine = Engine(target, drafters=drafters, chooser=Flips(*arms))
    engine.sink = sink
    return engine


def fresh(model, **more):
    return DraftLayer.of(model, generator=torch.Generator().manual_seed(0), **more)


def learned_by_heart(model, prompts, layer, *, steps=30, taps=()):
    """Return the layer after it was trained on the rollouts of these prompts.

    The features come from an engine without speculation that writes them into a ring.
    """
    shape = RingShape.within(2**20, layer.shape.feature_size, model.dtype)
    memory = bytearray(shape.num_bytes)
    engine = engine_of(model, 16, ["off"], sink=RowFeatures(FeatureRing(memory, shape)), taps=taps)
    list(engine.generate(prompts))
    reader = FeatureReader(memory)
    learned = [reader.read(entry) for entry in reader.entries()]
    assert len(learned) == len(prompts)
    ends = PolicyEmbeddings(
        model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), version=0
    )
    settings = DraftTrainingConfig(lr=1e-2, warmup_steps=5, loss=LossConfig(num_passes=2))
    trainer = DraftTrainer(layer, settings)
    for _ in range(steps):
        trainer.step(learned, ends)
    return trainer.layer.requires_grad_(False)
